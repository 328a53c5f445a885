"""Compose: pages of one side straight into pages of another, as a list of copies.

Two plans of one model name the same canonical bytes, so the elected bytes of a source
and the held bytes of a destination meet there, whatever the page sizes, orders and
topologies. The law: every byte of the tokens that a destination rank holds is written
by exactly one copy, and copies that touch on both sides are one.

    for c in compose(writer_plan, reader_plan, num_tokens=8):
        # [c.source_offset, + c.nbytes) of page c.source_page on rank c.source_rank
        # goes to [c.offset, + c.nbytes) of page c.page on rank c.rank

Pages are counted by table position: page k of a side keeps its k-th run of tokens.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvmem import errors
from kvmem.canonical.format import format_id
from kvmem.canonical.plan import CopyPlan
from kvmem.canonical.units import expand

__all__ = ["Copy", "compose"]


class Copy(NamedTuple):
    """Bytes that stand together on both sides.

    Offsets count from the start of a page, its planes laid end to end.
    """

    source_rank: int
    source_page: int
    source_offset: int
    rank: int
    page: int
    offset: int
    nbytes: int


def compose(
    source: CopyPlan, destination: CopyPlan, num_tokens: int
) -> tuple[Copy, ...]:
    """Return the copies that fill a destination's first `num_tokens` tokens.

    Sorted by destination: rank, page, offset.

    Raises:
        FormatMismatch: plans of two models.
    """
    ids = [format_id((plan.group,)) for plan in (source, destination)]
    if ids[0] != ids[1]:
        raise errors.FormatMismatch(
            errors.say(
                f"pages of {ids[0]} into pages of {ids[1]}",
                "bytes keep their meaning only between plans of one format",
                "Make both plans from one model's group",
            )
        )
    unit = math.gcd(source.unit_nbytes, destination.unit_nbytes)
    origin = _origin(source, unit, num_tokens)
    return tuple(
        copy
        for rank in range(destination.topology.ranks)
        for copy in _merged(rank, _moves(destination, rank, origin, unit), unit)
    )


class _Origin(NamedTuple):
    """Where each canonical unit of the tokens is read: [tokens * units a record]."""

    rank: np.ndarray
    page: np.ndarray
    unit: np.ndarray


def _origin(plan: CopyPlan, unit: int, num_tokens: int) -> _Origin:
    """Look up the elected writer of every unit."""
    page_units = plan.page_tokens * plan.record_nbytes // unit
    turns = plan.turns(max(1, -(-num_tokens // plan.page_tokens)))
    ranks, units = np.zeros((2, len(turns), page_units), np.int64)
    for i, turn in enumerate(turns):
        for rank, runs in enumerate(plan.writers(turn)):
            local, canonical = expand(runs, unit, plan.envelope(rank).plane_starts)
            ranks[i, canonical], units[i, canonical] = rank, local
    wanted = np.arange(num_tokens * plan.record_nbytes // unit)
    page, inside = np.divmod(wanted, page_units)
    at = page % len(turns), inside
    return _Origin(ranks[at], page, units[at])


def _moves(
    plan: CopyPlan, rank: int, origin: _Origin, unit: int
) -> tuple[np.ndarray, ...]:
    """Return (source rank, source page, source unit, page, unit) in page order."""
    local, canonical = expand(plan.runs[rank], unit, plan.envelope(rank).plane_starts)
    order = np.argsort(local)
    page_units = plan.page_tokens * plan.record_nbytes // unit
    pages = np.arange(-(-len(origin.rank) // page_units))
    wanted = (pages[:, None] * page_units + canonical[order]).reshape(-1)
    held = wanted < len(origin.rank)
    page = np.repeat(pages, len(local))[held]
    at = np.tile(local[order], len(pages))[held]
    wanted = wanted[held]
    return origin.rank[wanted], origin.page[wanted], origin.unit[wanted], page, at


def _merged(rank: int, moves: tuple[np.ndarray, ...], unit: int) -> Iterator[Copy]:
    """Join units that stand together on both sides."""
    source_rank, source_page, source_unit, page, at = moves
    if not at.size:
        return
    joined = (np.diff(source_unit) == 1) & (np.diff(at) == 1)
    for same in (source_rank, source_page, page):
        joined &= np.diff(same) == 0
    firsts = np.flatnonzero(np.concatenate([[True], ~joined]))
    counts = np.diff(np.append(firsts, at.size))
    for i, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        yield Copy(
            source_rank=int(source_rank[i]),
            source_page=int(source_page[i]),
            source_offset=int(source_unit[i]) * unit,
            rank=rank,
            page=int(page[i]),
            offset=int(at[i]) * unit,
            nbytes=count * unit,
        )
