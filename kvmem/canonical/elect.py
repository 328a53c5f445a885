"""Elect: which holder writes which rows of a batch of pages.

The rows that several ranks hold are dealt to them like cards: widest first, and page
after page of the batch. Dealt in falling order, no holder gets more above another than
one card, and a card is one field of one record. So the law holds for one page and for
any number of them, and ids of pages have no say in it: one writer a byte, and bytes of
two holders of a head differ by one field at most.

    elect(held, Turn(page=2, pages=5))    # who writes what of the third of five pages
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvmem.canonical.runs import CopyRun

__all__ = ["ALONE", "Runs", "Turn", "elect", "period", "sharers"]

Runs = tuple[CopyRun, ...]
# Ranks -> bytes of a row -> rows, each a list of equal runs, one a rank.
_Shared = dict[tuple[int, ...], dict[int, list[list[CopyRun]]]]


class Turn(NamedTuple):
    """Page number `page` of a batch of `pages`, counted from the batch's first."""

    page: int = 0
    pages: int = 1


ALONE = Turn()  # a page that is a batch by itself


def elect(held: Sequence[Runs], turn: Turn) -> list[Runs]:
    """Return for each rank the rows that it writes.

    Args:
        held: for each rank its rows, a fragment being one token's.
    """
    elected: list[list[CopyRun]] = [[] for _ in held]
    for ranks, by_width in _shared_rows(held).items():
        dealt = 0  # cards of the whole batch that are wider
        for _, copies in sorted(by_width.items(), reverse=True):
            num_rows = _count(copies)
            shares = _deal(num_rows, len(ranks), dealt + turn.page * num_rows)
            stops = list(itertools.accumulate(shares, initial=0))
            for i, rank in enumerate(ranks):
                mine = [by_holder[i] for by_holder in copies]
                elected[rank] += _slice(mine, stops[i], stops[i + 1])
            dealt += turn.pages * num_rows
    return [tuple(runs) for runs in elected]


def period(held: Sequence[Runs]) -> int:
    """Return after how many pages an election repeats; 1: all pages are dealt alike."""
    periods = [
        len(ranks) // math.gcd(len(ranks), *map(_count, by_width.values()))
        for ranks, by_width in _shared_rows(held).items()
    ]
    return math.lcm(*periods)


def sharers(held: Sequence[Runs]) -> tuple[int, ...]:
    """Return the ranks that hold bytes which another rank holds too."""
    found = {rank for ranks in _shared_rows(held) if len(ranks) > 1 for rank in ranks}
    return tuple(sorted(found))


def _deal(num_rows: int, holders: int, start: int) -> list[int]:
    """Return how many rows each holder gets when holder `start` gets the first."""
    even, left = divmod(num_rows, holders)
    return [even + ((i - start) % holders < left) for i in range(holders)]


def _count(copies: Sequence[Sequence[CopyRun]]) -> int:
    return sum(by_holder[0].count for by_holder in copies)


def _shared_rows(held: Sequence[Runs]) -> _Shared:
    """Sort rows by holders and width: each row is listed once, with a copy a holder."""
    copies: dict[tuple[int, int, int], list[tuple[int, CopyRun]]] = {}
    for rank, runs in enumerate(held):
        for run in runs:
            place = (run.canonical_offset, run.canonical_stride, run.nbytes)
            copies.setdefault(place, []).append((rank, run))
    shared: _Shared = {}
    for (_, _, nbytes), found in sorted(copies.items(), key=lambda item: item[0]):
        ranks = tuple(rank for rank, _ in found)
        by_width = shared.setdefault(ranks, {})
        by_width.setdefault(nbytes, []).append([run for _, run in found])
    return shared


def _slice(runs: Sequence[CopyRun], first: int, stop: int) -> Iterable[CopyRun]:
    """Yield fragments [first, stop) of runs laid end to end."""
    start = 0
    for run in runs:
        low, high = max(first - start, 0), min(stop - start, run.count)
        if low < high:
            yield run.cut(low, high)
        start += run.count
