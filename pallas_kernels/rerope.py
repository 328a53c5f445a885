"""rerope: keys of pages rotated by a change of position, in place.

Contract: donates `pages` u8[P, E]. In every slot s of page ids[i] and for every offset
of `offsets` i32[K], the window of 2 F elements at byte offset + s * slot_stride is F
pairs (x, y): pair f becomes (x c - y s, y c + x s) of cos[i, s, f] and sin[i, s, f].
Pairs are (f, f + F) in style "half" and (2 f, 2 f + 1) in style "interleaved". Where
the cosine is 1 and the sine 0 the bytes stay as they are, NaNs among them. An entry
whose id is outside [0, num_pages), or that a later entry repeats, writes nothing. No
two windows of a page overlap.

The arithmetic is float32, and for 16-bit keys the same to the last bit everywhere; see
`rotation`. `import_turned` does the same to records on their way into pages.

    cos, sin = rotation.tables(deltas, frequencies)
    rerope.reference(pages, ids, offsets, cos, sin, style="half", dtype="bfloat16",
                     slot_stride=256)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring, rotation, words
from pallas_kernels.rotation import Window

__all__ = ["host", "kernel", "reference", "supports"]

_TILE_ROWS = 16
_BLOCKS = 8 * limits.BLOCKS


def reference(
    pages,
    ids,
    offsets,
    cos,
    sin,
    *,
    style: str,
    dtype: str,
    slot_stride: int,
    num_pages: int | None = None,
) -> jax.Array:
    """Return the pool with the windows rotated."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    _, slots, pairs = cos.shape
    window = Window(style, dtype, pairs)
    settled = lists.settle(ids, num_pages)
    page = jnp.where(settled < 0, pages.shape[0], settled)[:, None, None, None]
    slot = jnp.arange(slots, dtype=jnp.int32) * slot_stride
    byte = jnp.arange(window.nbytes, dtype=jnp.int32)
    at = offsets[:, None, None] + slot[None, :, None] + byte[None, None, :]
    old = pages.at[page, at[None]].get(mode="fill", fill_value=0)  # u8[n, K, T, W]
    new = window.turned_bytes(old, cos[:, None], sin[:, None])
    return pages.at[page, at[None]].set(new, mode="drop")


def host(pages: np.ndarray, *arrays, **facts) -> np.ndarray:
    """Do the same on the CPU, by the reference."""
    return rotation.on_host(reference, pages, *arrays, **facts)


def kernel(
    pages,
    ids,
    offsets,
    cos,
    sin,
    *,
    style: str,
    dtype: str,
    slot_stride: int,
    num_pages: int | None = None,
    blocks: int = _BLOCKS,
    interpret=None,
) -> jax.Array:
    """Do the same: a tile of slots, its tables once, then every window of the tile."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    n, slots, pairs = cos.shape
    count = offsets.shape[0]
    if not n * count:
        return pages
    window = Window(style, dtype, pairs)
    rows = window.tile_rows(slots, _TILE_ROWS)
    tiles = n * (slots // rows)
    per_block = -(-count // max(1, min(count, blocks // tiles)))
    split = window.by_column(cos, sin)
    run = plgpu.kernel(
        _body(window, rows, slots, slot_stride, count, per_block, num_pages),
        out_type=(),
        scratch_types=(
            plgpu.SMEM((rows, window.words), jnp.uint32),
            *(plgpu.SMEM((rows, window.columns), jnp.float32) for _ in split),
            plgpu.Barrier(num_arrivals=len(split)),
            plgpu.Barrier(num_arrivals=rows),
        ),
        grid=(tiles, -(-count // per_block)),
        grid_names=("tile", "group"),
        interpret=interpret,
    )
    pool = jax.new_ref(words.as_words(pages))
    run(pool, lists.settle(ids, num_pages), offsets, *split)
    return words.as_bytes(pool[...])


def _body(window: Window, rows, slots, slot_stride, count, per_block, num_pages):
    """Return the body of the kernel."""
    num_tables = window.num_tables

    def rerope(pages_ref, ids_ref, offsets_ref, *refs):
        # in:  pages u32[P, E / 4], written; ids i32[n]; offsets i32[K];
        #      tables f32[n T, columns]
        # scratch: window u32[rows, width], tables f32[rows, columns], barriers
        table_refs, (window_ref, *held) = refs[:num_tables], refs[num_tables:]
        *held, tabled, loaded = held
        tile = lax.axis_index("tile")
        page = ids_ref[tile // (slots // rows)]
        first_slot = lax.rem(tile, slots // rows) * rows
        first = lax.axis_index("group") * per_block
        last = jnp.minimum(first + per_block, count)

        def turn(k):
            start = offsets_ref[k] // 4

            def at(s):
                place = start + (first_slot + s) * (slot_stride // 4)
                return pages_ref.at[page, pl.ds(place, window.words)]

            def load(s, _):
                ring.bulk_load(at(s), window_ref.at[s], loaded)

            def store(s, _):
                plgpu.copy_smem_to_gmem(window_ref.at[s], at(s))

            lax.fori_loop(0, rows, load, None)
            plgpu.barrier_wait(loaded)
            window.turn_tile(lambda some: window_ref.at[:, some], held, rows)
            plgpu.commit_smem()
            lax.fori_loop(0, rows, store, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(ring.guarded(page, num_pages))
        def _():
            for table_ref, own in zip(table_refs, held, strict=True):
                ring.bulk_load(table_ref.at[pl.ds(tile * rows, rows)], own, tabled)
            plgpu.barrier_wait(tabled)
            lax.fori_loop(first, last, lambda k, _: turn(k), None)
            plgpu.wait_smem_to_gmem(0)

    return rerope


def supports(
    pages,
    ids,
    offsets,
    cos,
    sin,
    *,
    style: str,
    dtype: str,
    slot_stride: int,
    num_pages: int | None = None,
) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    n, slots, pairs = cos.shape
    window = Window(style, dtype, pairs)
    refusal = window.objection()
    refusal = (
        refusal
        or limits.misaligned(
            page=pages.shape[1],
            window=window.nbytes,
            slot_stride=slot_stride,
            table=4 * window.columns,
        )
        or limits.too_long(pages=pages.shape[0], slots=n * slots)
        or limits.misplaced(offsets, limits.ALIGNMENT, "a page")
        or limits.outside(
            offsets, (slots - 1) * slot_stride + window.nbytes, pages.shape[1], "a page"
        )
        or limits.overlapping(offsets, window.nbytes, slot_stride, slots)
    )
    if refusal:
        return refusal
    rows = window.tile_rows(slots, _TILE_ROWS)
    if not rows:
        return (
            f"{slots} slots of {window.columns} columns: no tile of at most "
            f"{_TILE_ROWS} slots is a multiple of {limits.LANES} words"
        )
    return limits.not_in_shared(4 * rows * (window.words + 4 * window.columns), 2)
