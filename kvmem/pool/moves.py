"""Whole pages inside one pool: filled or moved, on all ranks at once.

The law: each touches the pages it is told and no others, in place, at a cost that does
not know the size of the pool. A page id is only ever an index along the page axis, so
nothing here wraps, however many bytes the pool has.

Pages are filled one by one in a loop, not by a scatter of zeros: XLA's CPU scatter
builds the zeros first and reaches a tenth of memset (1.6 against 21 GB/s at 256 KiB).
`move` takes one page after the other and holds one at a time, so no page of its lists
is in both; lists that overlap are `pallas_kernels.move_pages`'.
"""

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["fill", "move", "zero"]


def zero(pages: jax.Array, stack: jax.Array, start: jax.Array, count: jax.Array):
    """Return `pages` with the pages `stack[start : start + count]` set to zero.

    To be called inside jit. Args: pages u8[R, P, E], stack i32[N] of ids in [0, P).
    """
    return fill(pages, stack, start, count, 0)


def fill(
    pages: jax.Array, stack: jax.Array, start: jax.Array, count: jax.Array, byte: int
) -> jax.Array:
    """Return `pages` with every byte of the pages that `zero` would clear set so."""

    def clear(i: jax.Array, pages: jax.Array) -> jax.Array:
        page = stack[start + i]
        # `& 0` rather than zeros: it keeps the sharding of the slice under explicit
        # axes, and XLA folds it to a constant all the same.
        row = lax.dynamic_slice_in_dim(pages, page, 1, axis=1) & jnp.uint8(0)
        row = row | jnp.uint8(byte)
        return lax.dynamic_update_slice_in_dim(pages, row, page, axis=1)

    return lax.fori_loop(0, count, clear, pages)


def move(
    pages: jax.Array, sources: jax.Array, destinations: jax.Array, count: jax.Array
) -> jax.Array:
    """Return `pages` with page `destinations[i]` as `sources[i]` was, for i < count.

    To be called inside jit. Args: pages u8[R, P, E], ids of [0, P) in the first `count`
    places of both lists; no page is in both.
    """

    def place(i: jax.Array, pages: jax.Array) -> jax.Array:
        row = lax.dynamic_slice_in_dim(pages, sources[i], 1, axis=1)
        return lax.dynamic_update_slice_in_dim(pages, row, destinations[i], axis=1)

    return lax.fori_loop(0, count, place, pages)
