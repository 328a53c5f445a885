"""scatter_pages: whole pages into a pool, in the order of a list.

Contract: donates `pages`. Page ids[i] of pages u8[P, E] becomes row i of u8[n, E]; an
entry whose id is outside [0, num_pages) writes nothing; where an id repeats the last
entry wins. No other page is written.

    scatter_pages.reference(pages, ids, rows)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring
from pallas_kernels.ring import Slots

__all__ = ["host", "into", "kernel", "reference", "supports"]


def reference(pages, ids, rows, *, num_pages: int | None = None) -> jax.Array:
    """Return the pool with the rows in the pages of the list."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    settled = lists.settle(ids, num_pages)
    kept = jnp.where(settled < 0, pages.shape[0], settled)
    return pages.at[kept].set(rows, mode="drop")


def host(pages: np.ndarray, ids, rows, *, num_pages: int | None = None) -> np.ndarray:
    """Do the same in numpy, in place."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    named = (ids >= 0) & (ids < num_pages)
    if named.all():
        pages[ids] = rows
    else:
        pages[ids[named]] = rows[named]
    return pages


def kernel(
    pages,
    ids,
    rows,
    *,
    num_pages: int | None = None,
    blocks: int = limits.BLOCKS,
    stages: int | None = None,
    interpret=None,
) -> jax.Array:
    """Do the same by bulk copies through a ring, in place where `pages` is donated."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    if ids.size == 0:
        return pages
    pool = jax.new_ref(pages)
    settled = lists.settle(ids, num_pages)
    into(pool, settled, rows, num_pages, blocks, stages, interpret)
    return pool[...]


def into(pool, settled, rows, num_pages, blocks, stages, interpret) -> None:
    """Write rows into a pool's reference; no id of `settled` names a page twice."""
    n, page_nbytes = rows.shape
    slots = Slots.of(limits.chunk_nbytes(page_nbytes), stages)
    shares = lists.Shares(n, page_nbytes // slots.nbytes, blocks)

    def scatter_pages(pages_ref, ids_ref, rows_ref, slot_ref, id_ref, loaded, listed):
        # in:  pages u8[P, E], written; ids i32[padded n]; rows u8[n, E]
        # scratch: slots u8[stages, chunk], ids i32[span], barriers
        work = ring.my_share(shares)
        ring.bulk_load(ids_ref.at[pl.ds(work.base, shares.span)], id_ref, listed)
        plgpu.barrier_wait(listed)

        def page_of(k):
            return id_ref[work.entry(k) - work.base]

        def at(k):
            return pl.ds(work.chunk(k) * slots.nbytes, slots.nbytes)

        def load(k, slot):
            @pl.when(ring.guarded(page_of(k), num_pages))
            def _():
                source = rows_ref.at[work.entry(k), at(k)]
                ring.bulk_load(source, slot_ref.at[slot], loaded.at[slot])

        def store(k, slot):
            page = page_of(k)
            valid = ring.guarded(page, num_pages)

            @pl.when(valid)
            def _():
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.copy_smem_to_gmem(slot_ref.at[slot], pages_ref.at[page, at(k)])

            pl.when(~valid)(ring.drain)

        ring.turn(work.count, slots, load, store)

    run = plgpu.kernel(
        scatter_pages,
        out_type=(),
        scratch_types=(
            plgpu.SMEM((slots.stages, slots.nbytes), jnp.uint8),
            plgpu.SMEM((shares.span,), jnp.int32),
            plgpu.Barrier(num_barriers=slots.stages),
            plgpu.Barrier(),
        ),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    run(pool, shares.padded(settled), rows)


def supports(pages, ids, rows, *, num_pages: int | None = None) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    return ring.objection(pages.shape, ids.shape[0])
