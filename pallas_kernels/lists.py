"""Lists of ids, as kernels take them: guarded, settled, cut into shares.

Letters: P pages, n entries of a list. The law: an id outside [0, P) is nobody's page,
whatever its sign; where a list names one place twice the last entry wins, and that is
settled here, before a kernel writes places in no order at all.

    settle(jnp.array([3, -1, 3]), 4)    # [-1, -1, 3]
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.limits import round_up

__all__ = ["NULL", "Shares", "inside", "last_of", "settle"]

NULL = -1  # inside a kernel: below every page, however many there are


def inside(ids: jax.Array, num_pages: int) -> jax.Array:
    """Return which ids name a page."""
    return (ids >= 0) & (ids < num_pages)


def last_of(num_pages: int, ids: jax.Array, *within: jax.Array) -> jax.Array:
    """Return bool[n]: entries that name a page, and are the last to name their place.

    A place is a page, or a page and what `within` says of it (a slot).
    """
    valid = inside(ids, num_pages)
    keys = [jnp.where(valid, ids, num_pages), *within]
    order = jnp.lexsort(keys[::-1])  # stable: equal places stay in the list's order
    sorted_keys = [key[order] for key in keys]
    differs = [key[1:] != key[:-1] for key in sorted_keys]
    changes = jnp.stack(differs).any(axis=0)
    is_last = jnp.concatenate([changes, jnp.ones(1, bool)])
    return jnp.zeros_like(valid).at[order].set(is_last) & valid


def settle(ids: jax.Array, num_pages: int) -> jax.Array:
    """Return the ids, null where they name no page or a later entry names the same."""
    if ids.size == 0:
        return ids
    position = jnp.arange(ids.size, dtype=jnp.int32)
    kept = jnp.where(inside(ids, num_pages), ids, num_pages)
    winner = jnp.full(num_pages, -1, jnp.int32).at[kept].max(position, mode="drop")
    wins = winner.at[kept].get(mode="fill", fill_value=-1) == position
    return jnp.where(wins, kept, NULL)


@dataclasses.dataclass(frozen=True)
class Shares:
    """`units` pieces of work, of which entry u // per_entry of a list says the place.

    Each block takes a contiguous share, and copies the part of the list that it needs
    into shared memory at once: a read of 4 bytes from the device's memory takes longer
    than a small page.
    """

    entries: int
    per_entry: int
    most_blocks: int

    @property
    def units(self) -> int:
        """Pieces of work in all."""
        return self.entries * self.per_entry

    @property
    def per_block(self) -> int:
        """Pieces of a block; the last block may have fewer."""
        return -(-self.units // self.most_blocks)

    @property
    def blocks(self) -> int:
        """Blocks that have work."""
        return -(-self.units // self.per_block)

    @property
    def span(self) -> int:
        """Entries that a block copies: a multiple of 4, from a multiple of 4 on."""
        return round_up((self.per_block - 1) // self.per_entry + 2 + 3, 4)

    def padded(self, ids: jax.Array) -> jax.Array:
        """Return the list with null behind it, as far as any block copies."""
        last_first = (self.blocks - 1) * self.per_block // self.per_entry
        length = last_first // 4 * 4 + self.span
        return jnp.full(length, NULL, jnp.int32).at[: ids.size].set(ids)
