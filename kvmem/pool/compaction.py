"""Compaction: live pages moved to the low end, so that the free ones lie together.

The law: pinned pages stay; of all others, those in use are afterwards exactly the
lowest. Each page that lies too high moves to a free one below, the lowest first, and no
page is both a source and a destination. Only v2p, p2v and the free stack are rewritten:
virtual ids, references and pins do not know that anything happened.

    [  ] [A] [P] [B] [  ] [C]     ──►     [C] [A] [P] [B] [  ] [  ]
              │                                    │
            pinned                               stays

Alone among the verbs its cost grows with the pool: every book is read, and each moved
page is copied once.

    pool, num_moved = compact(pool)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvmem.pool import dispatch, moves
from kvmem.pool.state import POISON, GroupBooks, Pool

__all__ = ["compact"]


def compact(pool: Pool) -> tuple[Pool, jax.Array]:
    """Donates `pool`. Move what is in use and not pinned to the lowest pages there are.

    Physical pages known from an earlier `translate` are stale afterwards. The free
    stack is sorted: the lowest free page goes first.

    Returns:
        The pool; the number of physical pages moved, i32[].
    """
    return dispatch.call(_compact, pool)


@functools.partial(jax.jit, donate_argnums=0)
def _compact(pool: Pool):
    sources, destinations, count = _relocations(pool)
    pages = moves.move(pool.pages, sources, destinations, count)
    if pool.is_poisoned:
        pages = moves.fill(pages, sources, jnp.int32(0), count, POISON)
    # Beyond `count` both lists are null, which names nothing.
    owners = pool.p2v.at[sources].get(mode="fill", fill_value=0)
    nobody = jnp.tile(jnp.array([pool.null_owner], jnp.int32), (sources.size, 1))
    p2v = pool.p2v.at[destinations].set(owners, mode="drop")
    p2v = p2v.at[sources].set(nobody, mode="drop")
    moved_to = jnp.arange(pool.num_pages, dtype=jnp.int32)
    moved_to = moved_to.at[sources].set(destinations, mode="drop")
    groups = tuple(
        dataclasses.replace(
            books,
            v2p=moved_to.at[books.v2p].get(mode="fill", fill_value=pool.null_page),
        )
        for books in pool.groups
    )
    free = _lowest_first(pool, p2v[:, 0] == len(pool.groups))
    pool = dataclasses.replace(pool, pages=pages, p2v=p2v, free=free, groups=groups)
    return pool, count


def _relocations(pool: Pool):
    """Return which pages move where, i32[P] twice, null beyond their number, i32[]."""
    in_use = pool.p2v[:, 0] < len(pool.groups)
    movable = ~_is_pinned(pool)
    num_low = (in_use & movable).sum(dtype=jnp.int32)
    is_low = jnp.cumsum(movable.astype(jnp.int32)) <= num_low
    leaves = in_use & movable & ~is_low
    fills = ~in_use & is_low
    count = leaves.sum(dtype=jnp.int32)
    return _listed(leaves), _listed(fills), count


def _is_pinned(pool: Pool) -> jax.Array:
    """Return bool[P]: which pages some reader or writer in flight holds in place."""
    pinned = jnp.zeros(pool.num_pages, bool)
    for group, books in enumerate(pool.groups):
        pinned |= (pool.p2v[:, 0] == group) & _pins_of(books, pool.p2v[:, 1])
    return pinned


def _pins_of(books: GroupBooks, vpages: jax.Array) -> jax.Array:
    return books.pins.at[vpages].get(mode="fill", fill_value=0) > 0


def _listed(chosen: jax.Array) -> jax.Array:
    """Return i32[P]: the chosen ids, lowest first, null beyond."""
    null = chosen.size
    rank = jnp.cumsum(chosen.astype(jnp.int32)) - 1
    ids = jnp.arange(null, dtype=jnp.int32)
    listed = jnp.full(null, null, jnp.int32)
    return listed.at[jnp.where(chosen, rank, null)].set(ids, mode="drop")


def _lowest_first(pool: Pool, is_free: jax.Array) -> jax.Array:
    """Return the stack with the lowest free page on top; what lies above is kept."""
    rank = jnp.cumsum(is_free.astype(jnp.int32))
    slots = jnp.where(is_free, pool.num_free - rank, pool.num_pages)
    ids = jnp.arange(pool.num_pages, dtype=jnp.int32)
    return pool.free.at[slots].set(ids, mode="drop")
