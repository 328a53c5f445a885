"""What the device verbs do to the books, in pieces, for use inside jit.

Letters as in `kvmem.pool.state`: N lanes, V virtual pages, K parts of each, P physical
pages. The law: both stacks move together, one virtual page for K physical ones, part 0
first; a lane that names nothing is null, and null changes no book.

    pool, vpages, ok = take(pool, 0, want, max_pages=4)     # pops both stacks
    pool = give_back(pool, 0, books, ids, freed)            # pushes them
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvmem.pool.state import GroupBooks, Pool

__all__ = [
    "give_back",
    "is_first",
    "is_unheld",
    "named",
    "pad_one",
    "parts_of",
    "take",
    "with_group",
]


def take(pool: Pool, group: int, want: jax.Array, max_pages: int):
    """Pop both stacks and write the owners down: the books of a handout."""
    books = pool.groups[group]
    extent = books.extent
    in_range = (want >= 0) & (want <= max_pages)
    asked = jnp.where(in_range, want, 0)
    ends = jnp.cumsum(asked)
    total = ends[-1] if want.size else jnp.int32(0)
    # Divided, not multiplied: `total` times K may be more than int32 holds.
    ok = in_range.all() & (total <= pool.num_free // extent)
    ok &= total <= books.num_vfree
    column = jnp.arange(max_pages, dtype=jnp.int32)[None, :]
    active = (column < asked[:, None]) & ok
    depth = (ends - asked)[:, None] + column
    vpages = _pop(books.vfree, books.num_vfree, depth, active)
    lanes = pad_one(vpages.reshape(-1), books.null_vpage)
    part = jnp.arange(extent, dtype=jnp.int32)[None, None, :]
    depth = depth[..., None] * extent + part
    pages = _pop(pool.free, pool.num_free, depth, active[..., None])
    pages = pad_one(pages.reshape(-1, extent), pool.null_page)
    taken = jnp.where(ok, total, 0)
    books = dataclasses.replace(
        books,
        v2p=books.v2p.at[lanes].set(pages, mode="drop"),
        refs=books.refs.at[lanes].set(1, mode="drop"),
        num_vfree=books.num_vfree - taken,
    )
    owners = jnp.stack([jnp.full_like(lanes, group), lanes], axis=1)
    owners = jnp.repeat(owners, extent, axis=0)
    pool = dataclasses.replace(
        pool,
        p2v=pool.p2v.at[pages.reshape(-1)].set(owners, mode="drop"),
        num_free=pool.num_free - taken * extent,
    )
    return with_group(pool, group, books), vpages, ok


def give_back(
    pool: Pool, group: int, books: GroupBooks, ids: jax.Array, freed: jax.Array
) -> Pool:
    """Push the ids where `freed` on both stacks, in the order of their lanes."""
    null_vpage, null_page = books.null_vpage, pool.null_page
    ids = jnp.where(freed, ids, null_vpage)
    pages = books.v2p.at[ids].get(mode="fill", fill_value=null_page)
    # The same ids, but known only after the map was read: without that order between
    # the read and the write below, XLA copies the whole map.
    unmapped = jnp.where(pages[:, 0] < null_page, ids, null_vpage)
    rank = jnp.cumsum(freed.astype(jnp.int32)) - 1
    vslots = jnp.where(freed, books.num_vfree + rank, null_vpage)
    part = jnp.arange(books.extent, dtype=jnp.int32)[None, :]
    slots = pool.num_free + rank[:, None] * books.extent + part
    slots = jnp.where(freed[:, None], slots, null_page).reshape(-1)
    pages = pages.reshape(-1)
    count = freed.sum(dtype=jnp.int32)
    owner = jnp.array([pool.null_owner], jnp.int32)
    books = dataclasses.replace(
        books,
        v2p=books.v2p.at[unmapped].set(null_page, mode="drop"),
        vfree=books.vfree.at[vslots].set(ids, mode="drop"),
        num_vfree=books.num_vfree + count,
    )
    pool = dataclasses.replace(
        pool,
        p2v=pool.p2v.at[pages].set(jnp.tile(owner, (pages.size, 1)), mode="drop"),
        free=pool.free.at[slots].set(pages, mode="drop"),
        num_free=pool.num_free + count * books.extent,
    )
    return with_group(pool, group, books)


def parts_of(pool: Pool, group: int, vpages: jax.Array) -> jax.Array:
    """Return i32[..., K]: the physical pages of each id, null_page for all others."""
    books = pool.groups[group]
    ids = named(vpages, books.num_vpages)
    return books.v2p.at[ids].get(mode="fill", fill_value=pool.null_page)


def with_group(pool: Pool, group: int, books: GroupBooks) -> Pool:
    """Return `pool` with the books of one group replaced."""
    groups = (*pool.groups[:group], books, *pool.groups[group + 1 :])
    return dataclasses.replace(pool, groups=groups)


def named(vpages: jax.Array, num_vpages: int) -> jax.Array:
    """Return the ids with every one outside [0, V) made null: -1 would wrap."""
    return jnp.where((vpages >= 0) & (vpages < num_vpages), vpages, num_vpages)


def is_unheld(books: GroupBooks, vpages: jax.Array) -> jax.Array:
    """Return which lanes name a page that nobody holds; padding names none."""
    ids = named(vpages, books.num_vpages)
    return (vpages < 0) | (books.refs.at[ids].get(mode="fill", fill_value=1) == 0)


def is_first(ids: jax.Array) -> jax.Array:
    """Return which lanes are the first of their id: a sort of the short list."""
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros(ids.shape, bool).at[order].set(starts)


def pad_one(rows: jax.Array, null: int) -> jax.Array:
    """Return `rows` with a row of null added when there is one only.

    XLA rewrites a scatter of a single row to a select and an update whose read of the
    old row copies the whole operand; it also folds the reductions that keep a read of
    a book before the write to it.
    """
    if rows.shape[0] != 1:
        return rows
    return jnp.concatenate([rows, jnp.full((1, *rows.shape[1:]), null, np.int32)])


def _pop(stack: jax.Array, top: jax.Array, depth: jax.Array, active: jax.Array):
    """Return what lies `depth` below the top id; null where not active."""
    slots = jnp.where(active, top - 1 - depth, stack.size)
    return stack.at[slots].get(mode="fill", fill_value=stack.size)
