"""blocks_of_rows: token rows, scales behind values, into blocked-scale areas of pages.

Contract: the mirror of rows_of_blocks. Donates `pages` u8[P, E]; the block at
offsets[k] of page ids[i] becomes the rows u8[n, K, BS, V + S]. An entry whose id is
outside [0, num_pages), or that a later entry repeats, writes nothing; bytes of no block
keep their values.

    blocks_of_rows.reference(pages, ids, offsets, rows, shape=blocked.Shape(64, 128, 4))
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


def reference(pages, ids, offsets, rows, *, shape: blocked.Shape, num_pages=None):
    """Return the pool with the rows in the blocks of the list."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    settled = lists.settle(ids, num_pages)
    page = jnp.where(settled < 0, pages.shape[0], settled)[:, None, None]
    columns = shape.block_columns(offsets)
    return pages.at[page, columns].set(shape.blocks_of(rows), mode="drop")


def host(
    pages: np.ndarray, ids, offsets, rows, *, shape: blocked.Shape, num_pages=None
):
    """Do the same in numpy, in place."""
    num_pages = len(pages) if num_pages is None else num_pages
    named = (ids >= 0) & (ids < num_pages)
    split = shape.slots * shape.value_nbytes
    for k, offset in enumerate(offsets.tolist()):
        values, scales = np.split(rows[named, k], [shape.value_nbytes], axis=-1)
        count, middle = len(values), offset + split
        pages[ids[named], offset:middle] = values.reshape(count, split)
        scales = scales.reshape(count, shape.nbytes - split)
        pages[ids[named], middle : offset + shape.nbytes] = scales
    return pages


def kernel(
    pages, ids, offsets, rows, *, shape: blocked.Shape, num_pages=None, interpret=None
) -> jax.Array:
    """Do the same: a block of lanes fills a block of a page, four rows side by side."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    n, count = ids.shape[0], offsets.shape[0]
    if not n * count:
        return pages
    tall = shape.tall
    run = plgpu.kernel(
        _body(shape, count, num_pages),
        out_type=(),
        scratch_types=(
            plgpu.SMEM((tall, ROWS * shape.value_words), jnp.uint32),
            plgpu.SMEM((shape.slots * shape.scale_words,), jnp.uint32),
            plgpu.SMEM((tall, ROWS * shape.row_words), jnp.uint32),
            plgpu.Barrier(),
        ),
        grid=(n * count,),
        grid_names=("block",),
        interpret=interpret,
    )
    pool = jax.new_ref(words.as_words(pages))
    by_fours = words.as_words(rows.reshape(n * count * tall, -1))
    run(pool, lists.settle(ids, num_pages), offsets, by_fours)
    return words.as_bytes(pool[...])


def _body(shape: blocked.Shape, count: int, num_pages: int):
    """Return the body of the kernel, for `count` blocks of a page."""
    v, s, r = shape.value_words, shape.scale_words, shape.row_words
    tall = shape.tall

    def blocks_of_rows(pages_ref, ids_ref, offsets_ref, rows_ref, *scratch):
        # in:  pages u32[P, E / 4], written; ids i32[n]; offsets i32[K];
        #      rows by fours u32[n K BS / 4, 4 R]
        # scratch: values u32[BS / 4, 4 V], scales u32[BS S], rows u32[BS / 4, 4 R]
        value_ref, scale_ref, row_ref, loaded = scratch
        unit = lax.axis_index("block")
        page = ids_ref[unit // count]
        start = offsets_ref[lax.rem(unit, count)] // 4

        @pl.when(ring.guarded(page, num_pages))
        def _():
            ring.bulk_load(rows_ref.at[pl.ds(unit * tall, tall)], row_ref, loaded)
            plgpu.barrier_wait(loaded)
            layout = plgpu.Layout.WG_STRIDED((tall, v), vec_size=1)
            for a in range(ROWS):
                column = row_ref.at[:, pl.ds(a * r, v)]
                tile = plgpu.load(column, layout=layout, optimized=False)
                value_ref.at[:, pl.ds(a * v, v)][...] = tile

            def scale(t, _):
                for z in range(s):
                    column = r * lax.rem(t, ROWS) + v + z
                    scale_ref[t * s + z] = row_ref[t // ROWS, column]

            lax.fori_loop(0, shape.slots, scale, None)
            plgpu.commit_smem()

            def store(a, _):
                target = pages_ref.at[page, pl.ds(start + a * ROWS * v, ROWS * v)]
                plgpu.copy_smem_to_gmem(value_ref.at[a], target)

            lax.fori_loop(0, tall, store, None)
            behind = pl.ds(start + shape.slots * v, shape.slots * s)
            plgpu.copy_smem_to_gmem(scale_ref, pages_ref.at[page, behind])
            plgpu.wait_smem_to_gmem(0)

    return blocks_of_rows


def supports(pages, ids, offsets, rows, *, shape: blocked.Shape, num_pages=None):
    """Say why the kernel cannot serve these shapes, None when it can."""
    return shape.objection(pages, offsets, ids.shape[0])
