"""append_tokens: new tokens into their slots, one row a token.

Contract: donates `pages` u8[P, E]. Token i goes to slot slots[i] of page ids[i]: for
each run of `runs`, bytes [row_offset, + nbytes) of its row to bytes [page_offset + slot
* slot_stride, + nbytes) of the page. A token whose page is outside [0, num_pages) or
whose slot is outside [0, page_slots) is dropped; of two tokens in one slot the last
wins. Bytes of no run keep their values. Runs do not overlap: keys and values are two
runs, blocked values and their scales also.

    append_tokens.reference(pages, ids, slots, rows, runs=(Run(0, 256, 0, 256),),
                            page_slots=16)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring, words

__all__ = ["Run", "host", "kernel", "reference", "supports"]

_GROUP = 8  # rows that one copy brings
_MOST_RUNS = 64  # the body holds a copy of each


class Run(NamedTuple):
    """Where a part of a token's row stands in its page, in bytes."""

    page_offset: int
    slot_stride: int
    row_offset: int
    nbytes: int


def reference(
    pages,
    ids,
    slots,
    rows,
    *,
    runs: tuple[Run, ...],
    page_slots: int,
    num_pages: int | None = None,
    distinct: bool = False,
) -> jax.Array:
    """Return the pool with the tokens in their slots."""
    settled = _settle(pages, ids, slots, page_slots, num_pages, distinct)
    kept = jnp.where(settled < 0, pages.shape[0], settled)[:, None]
    for run in runs:
        start = run.page_offset + slots * run.slot_stride
        columns = start[:, None] + jnp.arange(run.nbytes, dtype=jnp.int32)[None, :]
        row = rows[:, run.row_offset : run.row_offset + run.nbytes]
        pages = pages.at[kept, columns].set(row, mode="drop")
    return pages


def host(
    pages: np.ndarray,
    ids,
    slots,
    rows,
    *,
    runs: tuple[Run, ...],
    page_slots: int,
    num_pages: int | None = None,
    distinct: bool = False,
) -> np.ndarray:
    """Do the same in numpy, in place."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    named = (ids >= 0) & (ids < num_pages) & (slots >= 0) & (slots < page_slots)
    for run in runs:
        strides = (pages.strides[0], run.slot_stride, 1)
        shape = (len(pages), page_slots, run.nbytes)
        view = np.ndarray(shape, np.uint8, pages, run.page_offset, strides)
        row = rows[:, run.row_offset : run.row_offset + run.nbytes]
        view[ids[named], slots[named]] = row[named]
    return pages


def kernel(
    pages,
    ids,
    slots,
    rows,
    *,
    runs: tuple[Run, ...],
    page_slots: int,
    num_pages: int | None = None,
    distinct: bool = False,
    interpret=None,
) -> jax.Array:
    """Do the same: a copy brings a group of rows, a copy a run takes them away.

    A run of 4 bytes, a scale, is one store of a word.

    Args:
        distinct: no slot is named twice, so nothing needs to be settled.
    """
    if ids.shape[0] == 0:
        return pages
    num_pages = pages.shape[0] if num_pages is None else num_pages
    settled = _settle(pages, ids, slots, page_slots, num_pages, distinct)
    group, columns, placed = _layout(ids.shape[0], rows.shape[1], runs)
    pad = limits.round_up(ids.shape[0], group) - ids.shape[0]
    operands = [words.as_words(rows[:, at : at + wide]) for at, wide in columns]
    operands = [jnp.pad(operand, ((0, pad), (0, 0))) for operand in operands]
    # A column of words is a list of them: copies want rows of 16 bytes.
    operands = [part[:, 0] if part.shape[1] == 1 else part for part in operands]
    settled = jnp.pad(settled, (0, pad), constant_values=lists.NULL)
    slots = jnp.pad(slots, (0, pad))
    run = plgpu.kernel(
        _body(group, len(operands), placed, num_pages),
        out_type=(),
        scratch_types=(
            *(plgpu.SMEM((group, *part.shape[1:]), jnp.uint32) for part in operands),
            plgpu.Barrier(num_arrivals=len(operands)),
        ),
        grid=(settled.size // group,),
        grid_names=("group",),
        interpret=interpret,
    )
    pool = jax.new_ref(words.as_words(pages))
    run(pool, settled, slots, *operands)
    return words.as_bytes(pool[...])


def _body(group: int, num_parts: int, placed, num_pages: int):
    """Return the body of the kernel: `placed` says which part holds which run."""

    def append_tokens(pages_ref, ids_ref, slots_ref, *refs):
        # in:  pages u32[P, E / 4], written; ids, slots i32[n]; rows u32[n, .] a part
        # scratch: rows u32[group, .] a part, a barrier
        parts, row_refs = refs[:num_parts], refs[num_parts:-1]
        loaded = refs[-1]
        first = lax.axis_index("group") * group
        for part, row_ref in zip(parts, row_refs, strict=True):
            ring.bulk_load(part.at[pl.ds(first, group)], row_ref, loaded)
        plgpu.barrier_wait(loaded)

        def put(g, _):
            page = ids_ref[first + g]

            @pl.when(ring.guarded(page, num_pages))
            def _():
                for (part, at), run in placed:
                    start = run.page_offset + slots_ref[first + g] * run.slot_stride
                    width = run.nbytes // words.WORD_NBYTES
                    if width == 1:
                        alone = len(row_refs[part].shape) == 1
                        word = row_refs[part][g if alone else (g, at // 4)]
                        pages_ref[page, start // 4] = word
                        continue
                    source = row_refs[part].at[g, pl.ds(at // 4, width)]
                    target = pages_ref.at[page, pl.ds(start // 4, width)]
                    plgpu.copy_smem_to_gmem(source, target)

        lax.fori_loop(0, group, put, None)
        plgpu.wait_smem_to_gmem(0)

    return append_tokens


def _settle(pages, ids, slots, page_slots, num_pages, distinct) -> jax.Array:
    """Return the page of each token, null where it is dropped or a later one wins."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    in_page = lists.inside(slots, page_slots) & lists.inside(ids, num_pages)
    ids = jnp.where(in_page, ids, lists.NULL)
    if distinct or ids.shape[0] < 2:
        return ids
    return jnp.where(lists.last_of(num_pages, ids, slots), ids, lists.NULL)


def _layout(n: int, row_nbytes: int, runs: tuple[Run, ...]):
    """Return rows a group, columns of the operands, and ((operand, byte), run) a run.

    Rows that are no multiple of 16 bytes come as an operand a run: then each stands
    aligned in shared memory. Four rows of any words are a multiple of 16 bytes.
    """
    if row_nbytes % limits.ALIGNMENT == 0:
        group = next(size for size in (_GROUP, 4, 2, 1) if n % size == 0)
        placed = [((0, run.row_offset), run) for run in runs]
        return group, [(0, row_nbytes)], placed
    columns = [(run.row_offset, run.nbytes) for run in runs]
    return _GROUP // 2, columns, [((k, 0), run) for k, run in enumerate(runs)]


def supports(
    pages,
    ids,
    slots,
    rows,
    *,
    runs: tuple[Run, ...],
    page_slots: int,
    num_pages: int | None = None,
    distinct: bool = False,
) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    refusal = limits.misaligned(page=pages.shape[1]) or limits.too_long(
        pages=pages.shape[0], bytes_of_a_page=pages.shape[1], tokens=ids.shape[0]
    )
    if refusal:
        return refusal
    if len(runs) > _MOST_RUNS:
        return f"{len(runs)} runs: the body holds a copy of each, at most {_MOST_RUNS}"
    for run in runs:
        whole = (page_slots - 1) * run.slot_stride + run.nbytes
        refusal = limits.outside(
            [run.page_offset], whole, pages.shape[1], "a page"
        ) or limits.outside([run.row_offset], run.nbytes, rows.shape[1], "a row")
        if refusal:
            return refusal
        if run.nbytes == words.WORD_NBYTES:
            if any(field % words.WORD_NBYTES for field in run):
                return f"{run}: a word stands at a multiple of {words.WORD_NBYTES} B"
            continue
        refusal = limits.misaligned(
            run=run.nbytes,
            offset_in_a_page=run.page_offset,
            slot_stride=run.slot_stride,
            offset_in_a_row=0 if rows.shape[1] % limits.ALIGNMENT else run.row_offset,
        )
        if refusal:
            return refusal
    group, columns, _ = _layout(max(ids.shape[0], 1), rows.shape[1], runs)
    return limits.not_in_shared(group * sum(wide for _, wide in columns), 1)
