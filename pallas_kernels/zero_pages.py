"""zero_pages: every byte of the pages of a list becomes zero, of no other page.

Contract: donates `pages` u8[P, E]. Ids outside [0, num_pages) name nothing; an id may
repeat. The whole envelope of a page is cleared, padding too.

    zero_pages.reference(pages, ids)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring
from pallas_kernels.ring import Slots

__all__ = ["host", "kernel", "reference", "supports"]


def reference(pages, ids, *, num_pages: int | None = None) -> jax.Array:
    """Return the pool with the pages of the list cleared."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    named = jnp.where(lists.inside(ids, num_pages), ids, pages.shape[0])
    return pages.at[named].set(jnp.uint8(0), mode="drop")


def host(pages: np.ndarray, ids, *, num_pages: int | None = None) -> np.ndarray:
    """Do the same in numpy, in place."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    pages[ids[(ids >= 0) & (ids < num_pages)]] = 0
    return pages


def kernel(
    pages,
    ids,
    *,
    num_pages: int | None = None,
    blocks: int = limits.BLOCKS,
    interpret=None,
) -> jax.Array:
    """Do the same by bulk stores of one buffer of zeros, which read no page."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    (n,), page_nbytes = ids.shape, pages.shape[1]
    if n == 0:
        return pages
    slots = Slots.of(limits.chunk_nbytes(page_nbytes), stages=1)
    shares = lists.Shares(n, page_nbytes // slots.nbytes, blocks)

    def zero_pages(pages_ref, ids_ref, zero_ref, id_ref, listed):
        # in:  pages u8[P, E], written; ids i32[padded n]
        # scratch: zeros u8[>= chunk], ids i32[span], a barrier
        work = ring.my_share(shares)
        ring.bulk_load(ids_ref.at[pl.ds(work.base, shares.span)], id_ref, listed)
        zero_ref[...] = jnp.zeros(zero_ref.shape, jnp.uint8)
        plgpu.commit_smem()
        plgpu.barrier_wait(listed)

        def clear(k, _):
            page = id_ref[work.entry(k) - work.base]

            @pl.when(ring.guarded(page, num_pages))
            def _():
                at = pl.ds(work.chunk(k) * slots.nbytes, slots.nbytes)
                zeros = zero_ref.at[pl.ds(0, slots.nbytes)]
                plgpu.copy_smem_to_gmem(zeros, pages_ref.at[page, at])

        lax.fori_loop(0, work.count, clear, None)
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        zero_pages,
        out_type=(),
        scratch_types=(
            plgpu.SMEM((limits.round_up(slots.nbytes, 1024),), jnp.uint8),
            plgpu.SMEM((shares.span,), jnp.int32),
            plgpu.Barrier(),
        ),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    pool = jax.new_ref(pages)
    run(pool, shares.padded(lists.settle(ids, num_pages)))
    return pool[...]


def supports(pages, ids, *, num_pages: int | None = None) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    return ring.objection(pages.shape, ids.shape[0], zeros=True)
