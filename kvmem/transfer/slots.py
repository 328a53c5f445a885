"""Slots: token records at any slots of a pool, in any order, on the host.

A slot is page * page_tokens + place in the page, as engines number them. Where
`export_records` moves the tokens of a sequence, these move rows that are named one by
one; every field of a row moves with it, a blocked page's scales with their values. The
law: a negative slot is skipped, and no other byte than those of a named row changes,
padding between pages included.

    rows = take_slots(pages, [32, 33, 7], plan)           # u8[3, record]
    pages = put_slots(pages, [96, -1, 5], rows, plan)     # Donates `pages`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from kvmem import errors
from kvmem.canonical.plan import CopyPlan
from kvmem.canonical.runs import CopyRun
from kvmem.transfer import checks, memory
from kvmem.transfer.arrays import Pages, Part, as_given, listed, num_pages, parts
from kvmem.transfer.choose import choose

__all__ = ["put_slots", "take_slots"]

Slots = Sequence[int] | np.ndarray
_Copy = Callable[..., None]  # (pages' rows, which, records' rows, which)


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
    split, writers = _split(at, plan), plan.writers()
    for plane, part in enumerate(parts(pages, plan)):
        shards = {s.index: s for s in listed(pages)[part.array].addressable_shards}
        for shard in shards.values():
            held = np.asarray(shard.data)
            _move(held, shard, split, out, writers, plane, part, _take)
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
            would race for it.
        FormatMismatch: records or pages that are not the plan's.
        IncompatiblePlan: pages that the host cannot reach.
    """
    pages = tuple(pages) if isinstance(pages, list) else pages
    at = _checked(pages, slots, plan)
    checks.records_fit(records, plan, len(at), "records")
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
    packed, split = np.ascontiguousarray(records), _split(at, plan)
    arrays = [memory.claim(array) for array in listed(pages)]
    for plane, part in enumerate(parts(as_given(arrays, pages), plan)):
        for shard in arrays[part.array].addressable_shards:
            held = memory.writable(shard.data)
            _move(held, shard, split, packed, plan.runs, plane, part, _put)
    return as_given(arrays, pages)


def _checked(pages: Pages, slots: Slots, plan: CopyPlan) -> np.ndarray:
    """Return the slots as i64[n], or refuse what cannot be moved."""
    checks.pages_fit(pages, plan)
    choose(pages, "host")
    at = np.array(slots, np.int64).reshape(-1)
    held = num_pages(pages, plan) * plan.page_tokens
    if at.size and at.max() >= held:
        raise errors.InvalidId(
            errors.say(
                f"slot {at.max()}",
                f"the pool has slots 0 to {held - 1}, and negative ones are skipped",
                "Give slots of pages that are held",
            )
        )
    return at


class _Split(NamedTuple):
    """Slots as pages and tokens of them, i64[n] each, and which are named at all."""

    page: np.ndarray
    token: np.ndarray
    named: np.ndarray


def _split(at: np.ndarray, plan: CopyPlan) -> _Split:
    return _Split(*np.divmod(at, plan.page_tokens), at >= 0)


def _move(
    held: np.ndarray,
    shard: jax.Shard,
    slots: _Split,
    records: np.ndarray,
    runs: Sequence[Sequence[CopyRun]],
    plane: int,
    part: Part,
    copy: _Copy,
) -> None:
    """Move the named rows of one plane between one shard and records."""
    ranks, first = held.shape[0], shard.index[0].start or 0
    flat = held.reshape(-1)
    for rank in range(ranks):
        memory_at = part._replace(base=part.base + rank * (flat.size // ranks))
        for run in runs[first + rank]:
            if run.plane == plane:
                _run(flat, memory_at, run, slots, records, copy)


def _run(
    flat: np.ndarray,
    part: Part,
    run: CopyRun,
    slots: _Split,
    records: np.ndarray,
    copy: _Copy,
) -> None:
    """Move one run: the same bytes of every named row that it has."""
    record_nbytes = records.shape[1]
    start, offset = divmod(run.canonical_offset, record_nbytes)
    step = max(run.canonical_stride // record_nbytes, 1)
    index, left = np.divmod(slots.token - start, step)
    held = slots.named & (left == 0) & (index >= 0) & (index < run.count)
    rows = np.flatnonzero(held)
    if not rows.size:
        return
    row = np.dtype((np.void, run.nbytes))
    page = slots.page[rows]
    pages = np.ndarray(
        (int(page.max()) + 1, run.count),
        row,
        flat,
        part.base + run.local_offset,
        (part.page_stride, run.local_stride),
    )
    taken = np.ndarray((len(records),), row, records, offset, (record_nbytes,))
    copy(pages, (page, index[rows]), taken, _plain(rows, len(records)))


def _plain(rows: np.ndarray, count: int) -> np.ndarray | slice:
    """Return every row as a slice, which numpy copies without an index."""
    return slice(None) if len(rows) == count else rows


def _take(pages, slots, records, rows) -> None:
    records[rows] = pages[slots]


def _put(pages, slots, records, rows) -> None:
    pages[slots] = records[rows]
