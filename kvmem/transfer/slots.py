"""Slots: token records at any slots of a pool, in any order, on the host.

A slot is page * page_tokens + place in the page, as engines number them. Where
`export_records` moves the tokens of a sequence, these move rows that are named one by
one; every field of a row moves with it, a blocked page's scales with their values. The
law: a negative slot is skipped, and no other byte than those of a named row changes,
padding between pages included.

    rows = take_slots(pages, [32, 33, 7], plan)           # u8[3, record]
    pages = put_slots(pages, [96, -1, 5], rows, plan)     # Donates `pages`.
"""

import operator
from collections.abc import Iterator, Sequence

import numpy as np

from kvmem import errors
from kvmem.canonical.elect import ALONE
from kvmem.canonical.grid import RunGrid
from kvmem.canonical.plan import CopyPlan
from kvmem.transfer import checks, host, memory
from kvmem.transfer.arrays import Pages, as_given, listed, num_pages, parts
from kvmem.transfer.choose import choose
from kvmem.transfer.host import Lane
from kvmem.transfer.window import Window

__all__ = ["put_slots", "take_slots"]

Slots = Sequence[int] | np.ndarray
_NEIGHBOURS = 8  # rows from which on a strided copy beats numpy's indexing


def take_slots(
    pages: Pages, slots: Slots, plan: CopyPlan, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the records at `slots`, u8[n, record]; those of negative slots are kept.

    Args:
        pages: u8[R, P, E] in this process's memory; a tuple where the plan's order has
            several arrays.
        out: u8[n, record] to fill, C-contiguous; None: zeros.

    Raises:
        InvalidId: a slot behind the pool's last.
        FormatMismatch: pages or `out` that are not the plan's.
        IncompatiblePlan: pages that the host cannot reach.
    """
    pages = tuple(pages) if isinstance(pages, list) else pages
    at = _checked(pages, slots, plan)
    if out is None:
        out = np.zeros((len(at), plan.record_nbytes), np.uint8)
    checks.records_fit(out, plan, len(at), "out")
    checks.writable(out)
    lanes = []
    for plane, part in enumerate(parts(pages, plan)):
        shards = {s.index: s for s in listed(pages)[part.array].addressable_shards}
        for index, shard in shards.items():
            held = np.asarray(shard.data)
            lanes += host.lanes_of(held, index, plan, ALONE, plane, part)
    _move(lanes, at, out, plan, to_pages=False)
    return out


def put_slots(
    pages: Pages,
    slots: Slots,
    records: np.ndarray,
    plan: CopyPlan,
    skip_prefix: int = 0,
) -> Pages:
    """Write records into `slots`, on every holder. Donates `pages`.

    Args:
        records: u8[n, record]; those of negative slots are not looked at.
        skip_prefix: first records that are skipped too.

    Raises:
        InvalidId: a slot behind the pool's last, or one that is named twice: two rows
            would race for it; or a prefix that is no count of rows.
        FormatMismatch: records or pages that are not the plan's.
        IncompatiblePlan: pages that the host cannot reach.
    """
    pages = tuple(pages) if isinstance(pages, list) else pages
    at = _checked(pages, slots, plan)
    checks.records_fit(records, plan, len(at), "records")
    _require_count(skip_prefix)
    at[:skip_prefix] = -1
    named = at[at >= 0]
    if len(np.unique(named)) != len(named):
        values, counts = np.unique(named, return_counts=True)
        raise errors.InvalidId(
            errors.say(
                f"slots {values[counts > 1].tolist()} named more than once",
                "a slot holds one row, and never values of one and scales of another",
                "Give every row a slot of its own",
            )
        )
    if not named.size:
        return pages
    packed, lanes = np.ascontiguousarray(records), []
    arrays = [memory.claim(array) for array in listed(pages)]
    for plane, part in enumerate(parts(as_given(arrays, pages), plan)):
        for shard in arrays[part.array].addressable_shards:
            held = memory.writable(shard.data)
            lanes += host.lanes_of(held, shard.index, plan, "holders", plane, part)
    _move(lanes, at, packed, plan, to_pages=True)
    return as_given(arrays, pages)


def _checked(pages: Pages, slots: Slots, plan: CopyPlan) -> np.ndarray:
    """Return the slots as i64[n], or refuse what cannot be moved."""
    checks.pages_fit(pages, plan)
    choose(pages, "host")
    given = np.asarray(slots)
    if given.size and not (given.ndim == 1 and np.issubdtype(given.dtype, np.integer)):
        raise errors.InvalidId(
            errors.say(
                f"slots {given.dtype}{list(given.shape)}",
                "a slot is an integer, one a row",
                "Give page * page_tokens + place in the page",
            )
        )
    held = num_pages(pages, plan) * plan.page_tokens
    if given.size and given.max() >= held:  # before a cast, which would wrap
        raise errors.InvalidId(
            errors.say(
                f"slot {given.max()}",
                f"the pool has slots 0 to {held - 1}, and negative ones are skipped",
                "Give slots of pages that are held",
            )
        )
    return given.astype(np.int64).reshape(-1)


def _require_count(skip_prefix: int) -> None:
    whole = isinstance(skip_prefix, int | np.integer)
    if not whole or isinstance(skip_prefix, bool) or skip_prefix < 0:
        raise errors.InvalidId(
            errors.say(
                f"skip_prefix = {skip_prefix!r}",
                "the first rows are skipped, so many of them",
                "Give a whole number from 0 on",
            )
        )


def _move(
    lanes: Sequence[Lane],
    at: np.ndarray,
    records: np.ndarray,
    plan: CopyPlan,
    to_pages: bool,
) -> None:
    """Move the named rows: by spans of neighbours, or row by row, whichever is less."""
    tokens, spans = plan.page_tokens, _spans(at, plan.page_tokens)
    if len(at) >= _NEIGHBOURS * len(spans):
        _by_spans(lanes, at, spans, records, tokens, to_pages)
    else:
        _by_rows(lanes, at, records, tokens, to_pages)


def _spans(at: np.ndarray, page_tokens: int) -> list[tuple[int, int]]:
    """Return [first, stop) of the rows whose slots are neighbours in one page."""
    follows = np.diff(at) == 1
    follows &= at[1:] % page_tokens != 0
    firsts = np.flatnonzero(np.r_[True, ~follows]) if at.size else np.zeros(0, int)
    stops = np.r_[firsts[1:], len(at)]
    return [
        (int(first), int(stop))
        for first, stop in zip(firsts, stops, strict=False)
        if at[first] >= 0
    ]


def _by_spans(
    lanes: Sequence[Lane],
    at: np.ndarray,
    spans: list[tuple[int, int]],
    records: np.ndarray,
    page_tokens: int,
    to_pages: bool,
) -> None:
    """Copy neighbours together: one strided copy a lane."""
    for first, stop in spans:
        page, token = divmod(int(at[first]), page_tokens)
        window, some = Window(token, stop - first, page_tokens), records[first:stop]
        for lane in lanes:
            for local, record in host.fragments(lane, page, 0, window, some):
                if to_pages:
                    np.copyto(local, record)
                else:
                    np.copyto(record, local)


def _by_rows(
    lanes: Sequence[Lane],
    at: np.ndarray,
    records: np.ndarray,
    page_tokens: int,
    to_pages: bool,
) -> None:
    """Copy rows that are apart: numpy walks the places of one field of all rows."""
    page, token = np.divmod(at, page_tokens)
    record_nbytes = records.shape[1]
    for lane in lanes:
        corner = lane.grid.corner
        start, offset = divmod(corner.canonical_offset, record_nbytes)
        step = max(corner.canonical_stride // record_nbytes, 1)
        index, left = np.divmod(token - start, step)
        held = (at >= 0) & (left == 0) & (index >= 0) & (index < corner.count)
        rows = np.flatnonzero(held)
        if not rows.size:
            continue
        places = page[rows], index[rows]
        for local, canonical in _cells(lane.grid):
            row = np.dtype((np.void, corner.nbytes))
            pages = np.ndarray(
                (int(places[0].max()) + 1, corner.count),
                row,
                lane.memory,
                lane.part.base + corner.local_offset + local,
                (lane.part.page_stride, corner.local_stride),
            )
            taken = np.ndarray(
                (len(records),), row, records, offset + canonical, (record_nbytes,)
            )
            if to_pages:
                pages[places] = taken[rows]
            else:
                taken[rows] = pages[places]


def _cells(grid: RunGrid) -> Iterator[tuple[int, int]]:
    """Yield how far each cell of a lattice is from its corner, on both sides."""
    for cell in np.ndindex(*grid.counts):
        yield tuple(
            sum(map(operator.mul, cell, steps))
            for steps in (grid.local_steps, grid.canonical_steps)
        )
