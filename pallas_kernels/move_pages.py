"""move_pages: pages of a pool into other pages of it, all at once.

Contract: donates `pages` u8[P, E]. Page destinations[i] becomes what page sources[i]
was before anything moved, so swaps, cycles and chains are right, and one source may
have many destinations. A pair with an id outside [0, num_pages) moves nothing; of pairs
with one destination the last wins, and `host` refuses them. No other page is written.

Few pairs move by slabs: a block owns columns of bytes, reads them of every source and
then writes them to every destination. Columns of two blocks never meet, so no block
waits for another and no byte of memory is taken. Many pairs move by way of a buffer of
n pages, which only pages that are source and destination at once pass through.

    move_pages.reference(pages, sources, destinations)    # a gather, then a scatter
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring, scatter_pages
from pallas_kernels.ring import Slots

__all__ = ["host", "kernel", "reference", "slab_nbytes", "supports"]

_SLABS_NBYTES = 200 << 10
_LEAST_SLAB = 512  # below, issuing copies costs more than the bytes


def reference(pages, sources, destinations, *, num_pages=None) -> jax.Array:
    """Return the pool with the pages moved."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    sources, settled = _pairs(sources, destinations, num_pages)
    rows = pages.at[sources].get(mode="promise_in_bounds")
    kept = jnp.where(settled < 0, pages.shape[0], settled)
    return pages.at[kept].set(rows, mode="drop")


def host(pages: np.ndarray, sources, destinations, *, num_pages=None) -> np.ndarray:
    """Do the same in numpy, in place.

    Raises:
        Unsupported: a destination that two pairs name; under jit the last one wins.
    """
    num_pages = pages.shape[0] if num_pages is None else num_pages
    named = (sources >= 0) & (sources < num_pages)
    named &= (destinations >= 0) & (destinations < num_pages)
    targets, counts = np.unique(destinations[named], return_counts=True)
    if (counts > 1).any():
        twice = targets[counts > 1].tolist()
        raise limits.Unsupported(
            f"page {twice[0]} as the destination of two pages: a page holds what one "
            "page held. Name each destination once."
        )
    pages[destinations[named]] = pages[sources[named]]
    return pages


def kernel(
    pages,
    sources,
    destinations,
    *,
    num_pages: int | None = None,
    variant: str | None = None,
    blocks: int = limits.BLOCKS,
    stages: int | None = None,
    interpret=None,
) -> jax.Array:
    """Do the same in place: few pairs by slabs, many by way of a buffer.

    Args:
        variant: "slabs" or "staged"; None: slabs while they are 512 bytes or more.
    """
    num_pages = pages.shape[0] if num_pages is None else num_pages
    (n,), page_nbytes = sources.shape, pages.shape[1]
    if n == 0:
        return pages
    sources, settled = _pairs(sources, destinations, num_pages)
    if variant is None:
        variant = "slabs" if fits_slabs(n, page_nbytes) else "staged"
    pool = jax.new_ref(pages)
    if variant == "slabs":
        _by_slabs(pool, sources, settled, num_pages, blocks, interpret)
    else:
        _staged(pool, sources, settled, num_pages, blocks, stages, interpret)
    return pool[...]


def _pairs(sources, destinations, num_pages: int):
    """Return sources that are all pages, and destinations, null where nothing moves."""
    named = lists.inside(sources, num_pages)
    settled = lists.settle(jnp.where(named, destinations, lists.NULL), num_pages)
    return jnp.where(named, sources, 0), settled


def slab_nbytes(n: int, page_nbytes: int) -> int:
    """Return the width of a slab of which n fit in shared memory."""
    return limits.chunk_nbytes(page_nbytes, _SLABS_NBYTES // n)


def fits_slabs(n: int, page_nbytes: int) -> bool:
    """Answer whether n pairs move by slabs."""
    if n > _SLABS_NBYTES // limits.ALIGNMENT:
        return False
    least = min(_LEAST_SLAB, page_nbytes)
    return n <= limits.MAX_ARRIVALS and slab_nbytes(n, page_nbytes) >= least


def _by_slabs(pool, sources, settled, num_pages, blocks, interpret) -> None:
    """Read a slab of every source, then write it to every destination, slab by slab."""
    (n,), page_nbytes = sources.shape, pool.shape[1]
    width = slab_nbytes(n, page_nbytes)
    shares = lists.Shares(1, page_nbytes // width, blocks)
    span = limits.round_up(n, 4)
    pad = (0, span - n)

    def move_pages(pages_ref, from_ref, to_ref, slab_ref, src_ref, dst_ref, *bars):
        # in:  pages u8[P, E], written; sources, destinations i32[padded n]
        # scratch: slabs u8[n, width], sources, destinations i32[padded n], barriers
        loaded, listed = bars
        ring.bulk_load(from_ref, src_ref, listed)
        ring.bulk_load(to_ref, dst_ref, listed)
        plgpu.barrier_wait(listed)
        first = lax.axis_index("block") * shares.per_block
        count = jnp.minimum(shares.per_block, shares.units - first)

        def slab(k, _):
            at = pl.ds((first + k) * width, width)

            def load(i, _):
                ring.bulk_load(pages_ref.at[src_ref[i], at], slab_ref.at[i], loaded)

            def store(i, _):
                page = dst_ref[i]

                @pl.when(ring.guarded(page, num_pages))
                def _():
                    plgpu.copy_smem_to_gmem(slab_ref.at[i], pages_ref.at[page, at])

            lax.fori_loop(0, n, load, None)
            plgpu.barrier_wait(loaded)
            plgpu.commit_smem()  # orders the reads of sources before their overwriting
            lax.fori_loop(0, n, store, None)
            plgpu.wait_smem_to_gmem(0)

        lax.fori_loop(0, count, slab, None)

    run = plgpu.kernel(
        move_pages,
        out_type=(),
        scratch_types=(
            plgpu.SMEM((n, width), jnp.uint8),
            plgpu.SMEM((span,), jnp.int32),
            plgpu.SMEM((span,), jnp.int32),
            plgpu.Barrier(num_arrivals=n),
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    run(pool, jnp.pad(sources, pad), jnp.pad(settled, pad, constant_values=-1))


def _staged(pool, sources, settled, num_pages, blocks, stages, interpret) -> None:
    """Move what no source is in the way of; stage the rest, and scatter it then."""
    moves = settled >= 0
    is_source = jnp.zeros(num_pages, bool).at[sources].max(moves)
    waits = moves & is_source.at[settled].get(mode="fill", fill_value=False)
    direct = jnp.where(waits, lists.NULL, settled)
    staged = jnp.where(waits, settled, lists.NULL)
    # What the first kernel does with an entry: a page, null, or P: into the buffer.
    targets = jnp.where(waits, num_pages, direct)
    rows = _copy(pool, sources, targets, num_pages, blocks, stages, interpret)
    scatter_pages.into(pool, staged, rows, num_pages, blocks, stages, interpret)


def _copy(pool, sources, targets, num_pages, blocks, stages, interpret) -> jax.Array:
    """Copy sources to their target pages, or to their rows of the buffer returned."""
    (n,), page_nbytes = sources.shape, pool.shape[1]
    slots = Slots.of(limits.chunk_nbytes(page_nbytes), stages)
    shares = lists.Shares(n, page_nbytes // slots.nbytes, blocks)

    run = plgpu.kernel(
        _copy_body(shares, slots, num_pages),
        out_type=jax.ShapeDtypeStruct((n, page_nbytes), jnp.uint8),
        scratch_types=(
            plgpu.SMEM((slots.stages, slots.nbytes), jnp.uint8),
            plgpu.SMEM((shares.span,), jnp.int32),
            plgpu.SMEM((shares.span,), jnp.int32),
            plgpu.Barrier(num_barriers=slots.stages),
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    return run(pool, shares.padded(sources), shares.padded(targets))


def _copy_body(shares: lists.Shares, slots: Slots, num_pages: int):
    """Return the body of the first of both kernels."""

    def copy_pages(pages_ref, from_ref, to_ref, rows_ref, slot_ref, *scratch):
        # in:  pages u8[P, E], written; sources, targets i32[padded n]
        # out: rows u8[n, E], written where a target is num_pages
        # scratch: slots u8[stages, chunk], sources, targets i32[span], barriers
        src_ref, dst_ref, loaded, listed = scratch
        work = ring.my_share(shares)
        span = pl.ds(work.base, shares.span)
        ring.bulk_load(from_ref.at[span], src_ref, listed)
        ring.bulk_load(to_ref.at[span], dst_ref, listed)
        plgpu.barrier_wait(listed)

        def at(k):
            return pl.ds(work.chunk(k) * slots.nbytes, slots.nbytes)

        def load(k, slot):
            here = work.entry(k) - work.base

            @pl.when(dst_ref[here] >= 0)
            def _():
                source = pages_ref.at[src_ref[here], at(k)]
                ring.bulk_load(source, slot_ref.at[slot], loaded.at[slot])

        def store(k, slot):
            target = dst_ref[work.entry(k) - work.base]

            @pl.when(target >= 0)
            def _():
                plgpu.barrier_wait(loaded.at[slot])

            @pl.when(ring.guarded(target, num_pages))
            def _():
                plgpu.copy_smem_to_gmem(slot_ref.at[slot], pages_ref.at[target, at(k)])

            @pl.when(target >= num_pages)
            def _():
                row = rows_ref.at[work.entry(k), at(k)]
                plgpu.copy_smem_to_gmem(slot_ref.at[slot], row)

            pl.when(target < 0)(ring.drain)

        ring.turn(work.count, slots, load, store)

    return copy_pages


def supports(pages, sources, destinations, *, num_pages=None) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    refusal = ring.objection(pages.shape, sources.shape[0])
    if refusal or not sources.shape[0] or not fits_slabs(*_sizes(pages, sources)):
        return refusal
    n, page_nbytes = _sizes(pages, sources)
    return limits.not_in_shared(n * slab_nbytes(n, page_nbytes) + 8 * (n + 3), 2)


def _sizes(pages, sources) -> tuple[int, int]:
    return sources.shape[0], pages.shape[1]
