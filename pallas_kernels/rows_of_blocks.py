"""rows_of_blocks: blocked-scale areas of pages as token rows, scales behind values.

Contract: rows u8[n, K, BS, V + S]; row [i, k, s] is the V bytes of values and the S of
scales of slot s in the block at offsets[k] of page ids[i] of pages u8[P, E]. Zeros
where the id is outside [0, num_pages). Ids may repeat.

    rows_of_blocks.reference(pages, ids, offsets, shape=blocked.Shape(64, 128, 4))
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import blocked, lists, ring, words
from pallas_kernels.blocked import ROWS

__all__ = ["host", "kernel", "reference", "supports"]


def reference(pages, ids, offsets, *, shape: blocked.Shape, num_pages=None):
    """Return the rows of the blocks, zeros for ids of nobody."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    named = lists.inside(ids, num_pages)
    page = jnp.where(named, ids, 0)[:, None, None]
    columns = shape.block_columns(offsets)
    rows = shape.rows_of(pages.at[page, columns].get(mode="promise_in_bounds"))
    return jnp.where(named[:, None, None, None], rows, jnp.uint8(0))


def host(pages: np.ndarray, ids, offsets, *, shape: blocked.Shape, num_pages=None):
    """Do the same in numpy."""
    num_pages = len(pages) if num_pages is None else num_pages
    rows = np.zeros((len(ids), len(offsets), shape.slots, shape.row_nbytes), np.uint8)
    named = (ids >= 0) & (ids < num_pages)
    split = shape.slots * shape.value_nbytes
    for k, offset in enumerate(offsets.tolist()):
        block = pages[ids[named], offset : offset + shape.nbytes]
        of_slot = len(block), shape.slots
        values = block[:, :split].reshape(*of_slot, shape.value_nbytes)
        scales = block[:, split:].reshape(*of_slot, shape.scale_nbytes)
        rows[named, k, :, : shape.value_nbytes] = values
        rows[named, k, :, shape.value_nbytes :] = scales
    return rows


def kernel(
    pages, ids, offsets, *, shape: blocked.Shape, num_pages=None, interpret=None
) -> jax.Array:
    """Do the same: a block of lanes takes a block of a page, four rows side by side."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    n, count = ids.shape[0], offsets.shape[0]
    if not n * count:
        return jnp.zeros((n, count, shape.slots, shape.row_nbytes), jnp.uint8)
    tall = shape.tall
    run = plgpu.kernel(
        _body(shape, count, num_pages),
        out_type=jax.ShapeDtypeStruct(
            (n * count * tall, ROWS * shape.row_words), jnp.uint32
        ),
        scratch_types=(
            plgpu.SMEM((tall, ROWS * shape.value_words), jnp.uint32),
            plgpu.SMEM((shape.slots * shape.scale_words,), jnp.uint32),
            plgpu.SMEM((tall, ROWS * shape.row_words), jnp.uint32),
            plgpu.Barrier(num_arrivals=tall + 1),
        ),
        grid=(n * count,),
        grid_names=("block",),
        interpret=interpret,
    )
    rows = words.as_bytes(run(words.as_words(pages), ids, offsets))
    return rows.reshape(n, count, shape.slots, shape.row_nbytes)


def _body(shape: blocked.Shape, count: int, num_pages: int):
    """Return the body of the kernel, for `count` blocks of a page."""
    v, s, r = shape.value_words, shape.scale_words, shape.row_words
    tall = shape.tall

    def rows_of_blocks(pages_ref, ids_ref, offsets_ref, out_ref, *scratch):
        # in:  pages u32[P, E / 4], ids i32[n], offsets i32[K]
        # out: rows by fours u32[n K BS / 4, 4 R]
        # scratch: values u32[BS / 4, 4 V], scales u32[BS S], rows u32[BS / 4, 4 R]
        value_ref, scale_ref, row_ref, loaded = scratch
        unit = lax.axis_index("block")
        page = ids_ref[unit // count]
        start = offsets_ref[lax.rem(unit, count)] // 4
        valid = ring.guarded(page, num_pages)
        page = jnp.where(valid, page, 0)
        kept = jnp.where(valid, jnp.uint32(1), jnp.uint32(0))

        def load(a, _):
            source = pages_ref.at[page, pl.ds(start + a * ROWS * v, ROWS * v)]
            ring.bulk_load(source, value_ref.at[a], loaded)

        lax.fori_loop(0, tall, load, None)
        behind = pl.ds(start + shape.slots * v, shape.slots * s)
        ring.bulk_load(pages_ref.at[page, behind], scale_ref, loaded)
        plgpu.barrier_wait(loaded)
        layout = plgpu.Layout.WG_STRIDED((tall, v), vec_size=1)
        for a in range(ROWS):
            column = value_ref.at[:, pl.ds(a * v, v)]
            tile = plgpu.load(column, layout=layout, optimized=False)
            row_ref.at[:, pl.ds(a * r, v)][...] = tile * kept

        def scale(t, _):
            for z in range(s):
                column = r * lax.rem(t, ROWS) + v + z
                row_ref[t // ROWS, column] = scale_ref[t * s + z] * kept

        lax.fori_loop(0, shape.slots, scale, None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row_ref, out_ref.at[pl.ds(unit * tall, tall)])
        plgpu.wait_smem_to_gmem(0)

    return rows_of_blocks


def supports(pages, ids, offsets, *, shape: blocked.Shape, num_pages=None):
    """Say why the kernel cannot serve these shapes, None when it can."""
    return shape.objection(pages, offsets, ids.shape[0])
