"""Programs with one fault each, compiled offline: prints what is said of every one.

Run in a process of its own, in `offline.environment(folder)`; no test by its name.
"""

import json

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gather_pages, offline, ring, scatter_pages

PAGES, NBYTES, N = 131_072, 65_536, 64
POOL = jax.ShapeDtypeStruct((PAGES, NBYTES), jnp.uint8)
IDS = jax.ShapeDtypeStruct((N,), jnp.int32)
ROWS = jax.ShapeDtypeStruct((N, NBYTES), jnp.uint8)


def flat(pages, ids):
    """Gather from a pool of one axis: page and size are multiplied in 32 bits."""

    def body(pages_ref, ids_ref, out_ref, slot_ref, loaded):
        block = lax.axis_index("block")
        source = pages_ref.at[pl.ds(ids_ref[block] * NBYTES, NBYTES)]
        ring.bulk_load(source, slot_ref, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(slot_ref, out_ref.at[block])
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((N, NBYTES), jnp.uint8),
        scratch_types=(plgpu.SMEM((NBYTES,), jnp.uint8), plgpu.Barrier()),
        grid=(N,),
        grid_names=("block",),
    )
    return run(pages.reshape(-1), ids)


def kept(pages, ids, rows):
    """Scatter into a pool that is needed afterwards, too."""
    return scatter_pages.kernel(pages, ids, rows), pages


def staged(pages, ids):
    """Gather by way of rows that nobody stated."""
    rows = gather_pages.kernel(pages, ids)
    return gather_pages.kernel(rows, jnp.arange(N, dtype=jnp.int32))


def said(run, *shapes, donate: bool, pool_nbytes: int) -> list[str]:
    """Return what the checker says of a program."""
    devices = offline.described()
    report = offline.compile_for(
        devices, run, *shapes, page_nbytes=NBYTES, donate=donate
    )
    return offline.objections(report, pool_nbytes, 8 * PAGES)


if __name__ == "__main__":
    nbytes = PAGES * NBYTES
    found = {
        "sound": said(gather_pages.kernel, POOL, IDS, donate=False, pool_nbytes=0),
        "flat": said(flat, POOL, IDS, donate=False, pool_nbytes=0),
        "staged": said(staged, POOL, IDS, donate=False, pool_nbytes=0),
        "kept": said(kept, POOL, IDS, ROWS, donate=True, pool_nbytes=nbytes),
    }
    print(json.dumps(found))
