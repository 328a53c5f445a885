"""The audit: every page's holders counted anew, and the books held to the count.

The law of each page: its references are the sequences that hold it, and one for the
cache. From it follows, in physical pages, free + evictable + in use = total.

    objections(accounts, shelf, holdings)      # () when sound
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmem.serve.holding import Holding
from kvmem.serve.shelf import Shelf

__all__ = ["Accounts", "objections"]

_MAX_NAMED = 8  # pages of one broken law that are named


class Accounts(NamedTuple):
    """Where every page is: free, cached only, in use by a sequence, and in all."""

    free: int
    evictable: int
    in_use: int
    total: int


def objections(
    accounts: Accounts, shelf: Shelf, holdings: Sequence[Holding]
) -> tuple[str, ...]:
    """Return the laws broken, in words.

    Args:
        accounts: what the books say.
        shelf: what the cache holds.
        holdings: of every sequence that holds any page.
    """
    found, evictable, in_use = [], 0, 0
    for group, books in enumerate(shelf.books.ledger.groups):
        held, cached = _holders(shelf, group, holdings)
        name = f" of group {group}" if len(shelf.lives) > 1 else ""
        wrong = (books.refs != held + cached) | (cached > 1)
        found += [
            f"page {page}{name} has {books.refs[page]} references, {held[page]} tables "
            f"name it and the cache {cached[page]} times"
            for page in np.flatnonzero(wrong)[:_MAX_NAMED]
        ]
        evictable += int(((cached > 0) & (held == 0)).sum()) * books.extent
        in_use += int((held > 0).sum()) * books.extent
    said = accounts.evictable, accounts.in_use
    if said != (evictable, in_use) or sum(accounts[:3]) != accounts.total:
        found.append(
            f"{accounts.free} free, {evictable} evictable and {in_use} in use of "
            f"{accounts.total} pages, where the accounts say {said[0]} and {said[1]}"
        )
    return (*found, *_lost(shelf))


def _holders(
    shelf: Shelf, group: int, holdings: Sequence[Holding]
) -> tuple[np.ndarray, np.ndarray]:
    """Count the sequences and the cache's entries that name each page."""
    refs = shelf.books.ledger.groups[group].refs
    held, cached = np.zeros_like(refs), np.zeros_like(refs)
    for holding in holdings:
        np.add.at(held, np.asarray(holding.columns[group], np.int64), 1)
    if group == shelf.first:
        np.add.at(cached, np.fromiter(shelf.cache.vpages(), np.int64), 1)
    elif group in shelf.others:
        units = shelf.companions.units(group)
        np.add.at(cached, shelf.companions.pages(group, units).astype(np.int64), 1)
    return held, cached


def _lost(shelf: Shelf) -> list[str]:
    """Name companions without a unit, and spares that are no companions."""
    units = set(shelf.cache.vpages()) if shelf.others else set()
    found = [
        f"group {group} has a page of unit {unit}, which is not cached"
        for group in shelf.others
        for unit in shelf.companions.units(group).tolist()
        if unit not in units
    ]
    found += [
        f"group {group} may spare a page of unit {unit} that it has not"
        for group, unit in shelf.companions.spares
        if not shelf.companions.has(group, [unit])[0]
    ]
    return found[:_MAX_NAMED]
