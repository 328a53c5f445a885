"""Host executor: numpy strided copies straight from and into the arrays' memory.

On CPU a pool's bytes are the process's own memory. Reading is a zero-copy `np.asarray`
of each shard; writing has rules of its own (`memory`). Pages are the outer loop and
ranks the inner one: a page's records stay in cache while every rank fills them, and
ranks that share a block of memory are one numpy copy.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvmem.canonical.grid import RunGrid, grids
from kvmem.canonical.plan import CopyPlan, Who
from kvmem.transfer import memory
from kvmem.transfer.arrays import Pages, Part, as_given, listed, parts
from kvmem.transfer.window import Window

__all__ = ["Lane", "export_pages", "fragments", "import_pages", "lanes_of"]

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Copy = Callable[[np.ndarray, np.ndarray], None]  # (pages' bytes, records' bytes)


class Lane(NamedTuple):
    """One grid of the ranks that share a block of memory."""

    memory: np.ndarray  # u8[ranks * bytes of a rank]
    part: Part
    grid: RunGrid


def export_pages(
    pages: Pages,
    page_ids: np.ndarray,
    plan: CopyPlan,
    window: Window,
    records: np.ndarray,
    threads: int = 1,
    rank: int | None = None,
) -> None:
    """Copy the bytes of the elected writers, or those of `rank`, out of pages.

    Args:
        pages: u8[R, P, E] in this process's memory, or an array a plane.
        page_ids: i64[M], physical pages by table position.
        records: u8[num_tokens, record], C-contiguous; bytes not moved are kept.
    """
    arrays = listed(pages)
    turns: tuple[Who, ...] = (rank,)
    if rank is None:
        turns = plan.turns(len(window.pages))[: len(window.pages)]
    dealt: list[list[Lane]] = [[] for _ in turns]
    for plane, part in enumerate(parts(pages, plan)):
        shards = {}
        for shard in arrays[part.array].addressable_shards:
            shards[shard.index] = shard  # equal copies of the same ranks: any of them
        for index, shard in shards.items():
            held = np.asarray(shard.data)  # waits for it
            for lanes, who in zip(dealt, turns, strict=True):
                lanes += lanes_of(held, index, plan, who, plane, part)
    _move(dealt, page_ids, window, records, threads, _to_records)


def import_pages(
    pages: Pages,
    page_ids: np.ndarray,
    plan: CopyPlan,
    window: Window,
    records: np.ndarray,
    threads: int = 1,
) -> Pages:
    """Copy records into the pages of every holder.

    Donates `pages`: the bytes stay where they are, under the array that is returned.
    """
    arrays, lanes = [memory.claim(array) for array in listed(pages)], []
    for plane, part in enumerate(parts(arrays, plan)):
        for shard in arrays[part.array].addressable_shards:
            held = memory.writable(shard.data)
            lanes += lanes_of(held, shard.index, plan, "holders", plane, part)
    _move([lanes], page_ids, window, records, threads, _to_pages)
    return as_given(arrays, pages)


def _to_records(local: np.ndarray, record: np.ndarray) -> None:
    np.copyto(record, local)


def _to_pages(local: np.ndarray, record: np.ndarray) -> None:
    np.copyto(local, record)


def lanes_of(
    held: np.ndarray,
    index: tuple[slice, ...],
    plan: CopyPlan,
    who: Who,
    plane: int,
    part: Part,
) -> list[Lane]:
    """Return the lanes of one plane in one shard, u8[ranks, ...]."""
    ranks = held.shape[0]
    first = index[0].start or 0
    flat = held.reshape(-1)
    found = _grids(plan, who, plane, first, ranks, flat.size // ranks)
    return [Lane(flat, part, grid) for grid in found]


@functools.lru_cache(maxsize=1024)
def _grids(
    plan: CopyPlan, who: Who, plane: int, first: int, ranks: int, rank_nbytes: int
) -> tuple[RunGrid, ...]:
    """Fold the runs of ranks that lie one after another: one copy for all of them."""
    lists = plan.lists(who)[first : first + ranks]
    moved = [
        dataclasses.replace(run, local_offset=run.local_offset + i * rank_nbytes)
        for i, runs in enumerate(lists)
        for run in runs
        if run.plane == plane
    ]
    return grids(moved, plan.record_nbytes)


def _move(
    dealt: Sequence[Sequence[Lane]],
    page_ids: np.ndarray,
    window: Window,
    records: np.ndarray,
    threads: int,
    copy: Copy,
) -> None:
    """Copy every page of the window: page i by the lanes of turn i % len(dealt)."""
    for k in window.cut_pages:
        for lane in dealt[(k - window.pages.start) % len(dealt)]:
            for local, record in fragments(lane, int(page_ids[k]), k, window, records):
                copy(local, record)
    whole = window.whole_pages
    if not whole:
        return
    ids = page_ids[whole.start : whole.stop].tolist()
    last, turn = max(ids), whole.start - window.pages.start
    views = [
        [(_pages(lane, last), _records(lane, window, records)) for lane in lanes]
        for lanes in dealt
    ]

    def move_some(some: range) -> None:
        for i in some:
            page = ids[i]
            for local, record in views[(turn + i) % len(views)]:
                copy(local[page], record[i])

    if threads == 1:
        return move_some(range(len(ids)))
    stops = [len(ids) * t // threads for t in range(threads + 1)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        shares = [range(a, b) for a, b in itertools.pairwise(stops)]
        list(pool.map(move_some, shares))  # list: errors of a thread are raised


def _pages(lane: Lane, last: int) -> np.ndarray:
    """Return [last + 1, *grid] rows: a lane's bytes in every page up to the last."""
    grid, part = lane.grid, lane.part
    return _cells(
        (last + 1, *grid.shape),
        lane.memory,
        part.base + grid.corner.local_offset,
        (part.page_stride, *grid.local_strides),
    )


def _records(lane: Lane, window: Window, records: np.ndarray) -> np.ndarray:
    """Return [whole pages, *grid] rows: a lane's bytes in the records of each page."""
    grid, whole = lane.grid, window.whole_pages
    first = whole.start * window.page_tokens - window.first_token
    record_nbytes = records.shape[1]
    return _cells(
        (len(whole), *grid.shape),
        records,
        first * record_nbytes + grid.corner.canonical_offset,
        (window.page_tokens * record_nbytes, *grid.canonical_strides),
    )


def _cells(
    shape: tuple[int, ...],
    held: np.ndarray,
    offset: int,
    strides: tuple[int, ...],
) -> np.ndarray:
    """Return rows of bytes as an array, each row one element.

    numpy's loop then runs over rows: 1.3 to 5 times faster than over the bytes of each,
    most for the shortest (scales: 4 bytes), and 1.1 times for rows of 256 and 768.
    """
    row = shape[-1]
    element = _WORDS.get(row) or np.dtype((np.void, row))
    return np.ndarray(shape[:-1], element, held, offset, strides[:-1])


def fragments(
    lane: Lane, page_id: int, page: int, window: Window, records: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a lane's bytes in the tokens that the window takes of one page."""
    corner, record_nbytes = lane.grid.corner, records.shape[1]
    token, step = corner.canonical_offset // record_nbytes, 1
    if corner.count > 1:
        step = corner.canonical_stride // record_nbytes
    low, high = (
        min(max(-(-(bound - token) // step), 0), corner.count)
        for bound in window.tokens_of(page)
    )
    if low == high:
        return
    first = page * window.page_tokens - window.first_token
    shape = (*lane.grid.counts, high - low, corner.nbytes)
    local_offset = corner.local_offset + low * corner.local_stride
    canonical_offset = corner.canonical_offset + low * corner.canonical_stride
    yield (
        _cells(
            shape,
            lane.memory,
            lane.part.base + page_id * lane.part.page_stride + local_offset,
            lane.grid.local_strides,
        ),
        _cells(
            shape,
            records,
            first * record_nbytes + canonical_offset,
            lane.grid.canonical_strides,
        ),
    )
