"""Memory: a pool's own bytes, to be written by the host.

jax arrays are immutable, and nothing else in kvmem writes to one. It is safe under five
rules: the pool lies in this process, one page after another (`choose`); it was just
donated to us (`claim`), so no computation or view reads it; it is ready; the pointer is
taken afresh for every import, never kept; and the view is dropped before the array is
handed back, since a later donation may move the bytes.

    pages = memory.claim(pages)
    for shard in pages.addressable_shards:
        memory.writable(shard.data)[...] = 0
"""

import ctypes
import functools
from collections.abc import Callable

import jax
import numpy as np

__all__ = ["claim", "writable"]


def claim(pages: jax.Array) -> jax.Array:
    """Return the pool as an array that nobody else refers to. Donates `pages`.

    The runtime does the donation: it waits for every step that still reads the pool,
    marks the old handle deleted, and where a numpy view of the old bytes is alive it
    copies, so that no reader ever sees bytes change.
    """
    return jax.block_until_ready(_donate_as(pages.sharding)(pages))


def writable(shard: jax.Array) -> np.ndarray:
    """Return the memory of one shard of a claimed pool, writable."""
    nbytes = shard.size
    address = shard.unsafe_buffer_pointer()
    held = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(held, np.uint8).reshape(shard.shape)


@functools.lru_cache(maxsize=64)
def _donate_as(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda pages: pages, donate_argnums=0, out_shardings=sharding)
