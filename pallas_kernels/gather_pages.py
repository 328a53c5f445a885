"""gather_pages: whole pages out of a pool, in the order of a list.

Contract: rows u8[n, E], row i the page ids[i] of pages u8[P, E]; zeros where the id is
outside [0, num_pages). Pages behind `num_pages` are never read. Ids may repeat.

    gather_pages.reference(pages, ids)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring
from pallas_kernels.ring import Slots

__all__ = ["host", "kernel", "reference", "supports"]


def reference(pages, ids, *, num_pages: int | None = None) -> jax.Array:
    """Return the pages of a list as rows, zeros for ids of nobody."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    named = lists.inside(ids, num_pages)
    rows = pages.at[jnp.where(named, ids, 0)].get(mode="promise_in_bounds")
    return jnp.where(named[:, None], rows, jnp.uint8(0))


def host(
    pages: np.ndarray,
    ids: np.ndarray,
    *,
    num_pages: int | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Do the same in numpy, into `out` u8[n, E] where it is given."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    named = (ids >= 0) & (ids < num_pages)
    rows = np.take(pages, np.where(named, ids, 0), axis=0, out=out, mode="clip")
    rows[~named] = 0
    return rows


def kernel(
    pages,
    ids,
    *,
    num_pages: int | None = None,
    blocks: int = limits.BLOCKS,
    stages: int | None = None,
    interpret=None,
) -> jax.Array:
    """Do the same by bulk copies through a ring, one persistent block a processor."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    (n,), page_nbytes = ids.shape, pages.shape[1]
    if n == 0:
        return jnp.zeros((0, page_nbytes), jnp.uint8)
    slots = Slots.of(limits.chunk_nbytes(page_nbytes), stages)
    shares = lists.Shares(n, page_nbytes // slots.nbytes, blocks)
    run = plgpu.kernel(
        _body(shares, slots, num_pages),
        out_type=jax.ShapeDtypeStruct((n, page_nbytes), jnp.uint8),
        scratch_types=(
            plgpu.SMEM((slots.stages, slots.nbytes), jnp.uint8),
            plgpu.SMEM((limits.round_up(slots.nbytes, 1024),), jnp.uint8),
            plgpu.SMEM((shares.span,), jnp.int32),
            plgpu.Barrier(num_barriers=slots.stages),
            plgpu.Barrier(),
        ),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    return run(pages, shares.padded(ids))


def _body(shares: lists.Shares, slots: Slots, num_pages: int):
    """Return the body of the kernel."""

    def gather_pages(pages_ref, ids_ref, out_ref, slot_ref, zero_ref, id_ref, *bars):
        # in:  pages u8[P, E], ids i32[padded n]
        # out: rows u8[n, E]
        # scratch: slots u8[stages, chunk], zeros u8[>= chunk], ids i32[span], barriers
        loaded, listed = bars
        work = ring.my_share(shares)
        ring.bulk_load(ids_ref.at[pl.ds(work.base, shares.span)], id_ref, listed)
        zero_ref[...] = jnp.zeros(zero_ref.shape, jnp.uint8)
        plgpu.commit_smem()
        plgpu.barrier_wait(listed)

        def page_of(k):
            return id_ref[work.entry(k) - work.base]

        def at(k):
            return pl.ds(work.chunk(k) * slots.nbytes, slots.nbytes)

        def load(k, slot):
            page = page_of(k)

            @pl.when(ring.guarded(page, num_pages))
            def _():
                source = pages_ref.at[page, at(k)]
                ring.bulk_load(source, slot_ref.at[slot], loaded.at[slot])

        def store(k, slot):
            valid = ring.guarded(page_of(k), num_pages)
            target = out_ref.at[work.entry(k), at(k)]

            @pl.when(valid)
            def _():
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.copy_smem_to_gmem(slot_ref.at[slot], target)

            @pl.when(~valid)
            def _():
                zeros = zero_ref.at[pl.ds(0, slots.nbytes)]
                plgpu.copy_smem_to_gmem(zeros, target)

        ring.turn(work.count, slots, load, store)

    return gather_pages


def supports(pages, ids, *, num_pages: int | None = None) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    return ring.objection(pages.shape, ids.shape[0], zeros=True)
