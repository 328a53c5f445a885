"""The verbs of a pool: handout, release, retain, fork, translate.

The law: `handout` is the only door off the free stack, and it zeroes what passes
through, on every rank (`fork` fills its one fresh page with a copy instead). Every
verb is total: when it cannot do the job, the state comes back unchanged, with null ids
and a flag. One trace serves all values, and none costs more in a larger pool.

All but `translate` donate their pool. Called on arrays, a verb runs outside any mesh
context, so warming up under one and serving under another compiles nothing twice;
inside jit it is traced into the caller's program.

    pool, vpages, ok = handout(pool, 0, want=[3, 1], max_pages=4)   # i32[2, 4]
    pool, rejected = release(pool, 0, vpages)
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvmem import errors
from kvmem.pool import dispatch, moves
from kvmem.pool.ids import as_ids
from kvmem.pool.state import GroupBooks, Pool

__all__ = ["fork", "handout", "release", "retain", "translate"]


def handout(
    pool: Pool, group: int, want: jax.typing.ArrayLike, max_pages: int
) -> tuple[Pool, jax.Array, jax.Array]:
    """Donates `pool`. Give each of S sequences `want` fresh pages, all zero, or none.

    Args:
        want: i32[S] pages for each sequence, from 0 to `max_pages`.
        max_pages: width of the answer.

    Returns:
        The pool; vpages i32[S, max_pages], null beyond `want`; ok bool[]: False when
        pages ran short for any, or a `want` is out of range: then all are null and the
        pool is unchanged.
    """
    _require_group(pool, group)
    return dispatch.call(_handout, pool, group, as_ids(want, "want"), max_pages)


def release(
    pool: Pool, group: int, vpages: jax.typing.ArrayLike
) -> tuple[Pool, jax.Array]:
    """Donates `pool`. Drop one reference for each lane; free what nobody holds.

    Ids beyond the end (null among them) are padding. An id is rejected in all its
    lanes, and nothing changes for it, when it is negative, is listed more often than it
    has references, or would be freed while pinned. Freed pages join the stack in the
    order of their first lanes.

    Returns:
        The pool; rejected bool, of the shape of `vpages`.
    """
    _require_group(pool, group)
    return dispatch.call(_release, pool, group, as_ids(vpages, "vpages"))


def retain(
    pool: Pool, group: int, vpages: jax.typing.ArrayLike
) -> tuple[Pool, jax.Array]:
    """Donates `pool`. Add one reference for each lane; reject ids that nobody holds.

    Ids beyond the end are padding, negative ones rejected.
    """
    _require_group(pool, group)
    return dispatch.call(_retain, pool, group, as_ids(vpages, "vpages"))


def fork(
    pool: Pool,
    group: int,
    vpages: jax.typing.ArrayLike,
    copied: jax.typing.ArrayLike,
) -> tuple[Pool, jax.Array, jax.Array]:
    """Donates `pool`. Give a second sequence the pages of a first: shared, one copied.

    Args:
        vpages: i32[M] pages of the first sequence, null beyond its length.
        copied: i32[] the column of its partial last page, which gets a copy of its own
            (every byte, on every rank); M or more when the last page is full.

    Returns:
        The pool; vpages i32[M] of the second sequence; ok bool[]: False when no page is
        left for the copy, or an id is not held: then all are null, the pool unchanged.
    """
    _require_group(pool, group)
    vpages, copied = as_ids(vpages, "vpages"), as_ids(copied, "copied")
    return dispatch.call(_fork, pool, group, vpages, copied)


def translate(pool: Pool, group: int, vpages: jax.typing.ArrayLike) -> jax.Array:
    """Return the physical page of each virtual page; null_page for all other ids."""
    _require_group(pool, group)
    return dispatch.call(_translate, pool, group, as_ids(vpages, "vpages"))


def _require_group(pool: Pool, group: int) -> None:
    if not 0 <= group < len(pool.groups):
        raise errors.InvalidId(
            errors.say(
                f"group {group} of a pool of {len(pool.groups)}",
                "groups are counted from zero",
                f"Use a group from 0 to {len(pool.groups) - 1}",
            )
        )


@functools.partial(jax.jit, static_argnums=(1, 3), donate_argnums=0)
def _handout(pool: Pool, group: int, want: jax.Array, max_pages: int):
    before = pool.num_free
    pool, vpages, ok = _take(pool, group, want, max_pages)
    taken = before - pool.num_free
    pages = moves.zero(pool.pages, pool.free, pool.num_free, taken)
    return dataclasses.replace(pool, pages=pages), vpages, ok


@functools.partial(jax.jit, static_argnums=(1, 3), donate_argnums=0)
def _handout_books(pool: Pool, group: int, want: jax.Array, max_pages: int):
    """Hand out without zeroing: half a verb, so that a benchmark can time it alone."""
    return _take(pool, group, want, max_pages)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _release(pool: Pool, group: int, vpages: jax.Array):
    books, shape = pool.groups[group], vpages.shape
    vpages = _pad_one(vpages.reshape(-1), books.null_vpage)
    ids = _named(vpages, books.num_vpages)
    refs = books.refs.at[ids].add(-1, mode="drop")
    left = refs.at[ids].get(mode="fill", fill_value=1)
    pinned = books.pins.at[ids].get(mode="fill", fill_value=0) > 0
    rejected = (vpages < 0) | (left < 0) | ((left == 0) & pinned)
    refs = refs.at[ids].add(rejected.astype(jnp.int32), mode="drop")
    freed = (left == 0) & ~rejected & _is_first(ids)
    books = dataclasses.replace(books, refs=refs)
    rejected = rejected[: math.prod(shape)].reshape(shape)
    return _give_back(pool, group, books, ids, freed), rejected


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _retain(pool: Pool, group: int, vpages: jax.Array):
    books, shape = pool.groups[group], vpages.shape
    vpages = _pad_one(vpages.reshape(-1), books.null_vpage)
    rejected = _is_unheld(books, vpages)
    ids = jnp.where(rejected, books.null_vpage, _named(vpages, books.num_vpages))
    refs = books.refs.at[ids].add(1, mode="drop")
    books = dataclasses.replace(books, refs=refs)
    rejected = rejected[: math.prod(shape)].reshape(shape)
    return _with_group(pool, group, books), rejected


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _fork(pool: Pool, group: int, vpages: jax.Array, copied: jax.Array):
    books, (num_lanes,) = pool.groups[group], vpages.shape
    vpages = _pad_one(vpages, books.null_vpage)
    is_copy = jnp.arange(vpages.size, dtype=jnp.int32) == copied
    source = jnp.min(jnp.where(is_copy, vpages, books.null_vpage))
    source_is_held = (copied >= num_lanes) | (source < books.num_vpages)
    askable = source_is_held & ~_is_unheld(books, vpages).any()
    want = (askable & (copied < num_lanes)).astype(jnp.int32)
    pool, fresh, has_room = _take(pool, group, want[None], 1)
    ok = askable & has_room
    shared = jnp.where(ok & ~is_copy, vpages, books.null_vpage)
    pool, _ = _retain(pool, group, shared)
    child = jnp.where(ok & is_copy, fresh[0], _named(shared, books.num_vpages))
    pages = moves.copy(
        pool.pages,
        _translate(pool, group, source[None]),
        _translate(pool, group, fresh[0]),
    )
    return dataclasses.replace(pool, pages=pages), child[:num_lanes], ok


@functools.partial(jax.jit, static_argnums=1)
def _translate(pool: Pool, group: int, vpages: jax.Array):
    books = pool.groups[group]
    ids = _named(vpages, books.num_vpages)
    return books.v2p.at[ids, 0].get(mode="fill", fill_value=pool.null_page)


def _take(pool: Pool, group: int, want: jax.Array, max_pages: int):
    """Pop both stacks and write the owners down: the books of a handout."""
    books = pool.groups[group]
    in_range = (want >= 0) & (want <= max_pages)
    asked = jnp.where(in_range, want, 0)
    ends = jnp.cumsum(asked)
    total = ends[-1] if want.size else jnp.int32(0)
    ok = in_range.all() & (total <= pool.num_free) & (total <= books.num_vfree)
    column = jnp.arange(max_pages, dtype=jnp.int32)[None, :]
    active = (column < asked[:, None]) & ok
    depth = (ends - asked)[:, None] + column + 1
    vpages = _pop(books.vfree, books.num_vfree, depth, active)
    lanes = _pad_one(vpages.reshape(-1), books.null_vpage)
    pages = _pop(pool.free, pool.num_free, depth, active)
    pages = _pad_one(pages.reshape(-1), pool.null_page)
    owners = jnp.stack([jnp.full_like(lanes, group), lanes], axis=1)
    taken = jnp.where(ok, total, 0)
    books = dataclasses.replace(
        books,
        v2p=books.v2p.at[lanes, 0].set(pages, mode="drop"),
        refs=books.refs.at[lanes].set(1, mode="drop"),
        num_vfree=books.num_vfree - taken,
    )
    pool = dataclasses.replace(
        pool,
        p2v=pool.p2v.at[pages].set(owners, mode="drop"),
        num_free=pool.num_free - taken,
    )
    return _with_group(pool, group, books), vpages, ok


def _give_back(
    pool: Pool, group: int, books: GroupBooks, ids: jax.Array, freed: jax.Array
) -> Pool:
    """Push the ids where `freed` on both stacks, in the order of their lanes."""
    null_vpage, null_page = books.null_vpage, pool.null_page
    ids = jnp.where(freed, ids, null_vpage)
    pages = books.v2p.at[ids, 0].get(mode="fill", fill_value=null_page)
    # The same ids, but known only after the map was read: without that order between
    # the read and the write below, XLA copies the whole map.
    unmapped = jnp.where(pages < null_page, ids, null_vpage)
    rank = jnp.cumsum(freed.astype(jnp.int32)) - 1
    vslots = jnp.where(freed, books.num_vfree + rank, null_vpage)
    slots = jnp.where(freed, pool.num_free + rank, null_page)
    count = freed.sum(dtype=jnp.int32)
    owner = jnp.array([pool.null_owner], jnp.int32)
    books = dataclasses.replace(
        books,
        v2p=books.v2p.at[unmapped, 0].set(null_page, mode="drop"),
        vfree=books.vfree.at[vslots].set(ids, mode="drop"),
        num_vfree=books.num_vfree + count,
    )
    pool = dataclasses.replace(
        pool,
        p2v=pool.p2v.at[pages].set(jnp.tile(owner, (ids.size, 1)), mode="drop"),
        free=pool.free.at[slots].set(pages, mode="drop"),
        num_free=pool.num_free + count,
    )
    return _with_group(pool, group, books)


def _with_group(pool: Pool, group: int, books: GroupBooks) -> Pool:
    groups = (*pool.groups[:group], books, *pool.groups[group + 1 :])
    return dataclasses.replace(pool, groups=groups)


def _pop(stack: jax.Array, top: jax.Array, depth: jax.Array, active: jax.Array):
    """Return what lies `depth` below `top`; null where not active."""
    slots = jnp.where(active, top - depth, stack.size)
    return stack.at[slots].get(mode="fill", fill_value=stack.size)


def _named(vpages: jax.Array, num_vpages: int) -> jax.Array:
    """Return the ids with every one outside [0, V) made null: -1 would wrap."""
    return jnp.where((vpages >= 0) & (vpages < num_vpages), vpages, num_vpages)


def _is_unheld(books: GroupBooks, vpages: jax.Array) -> jax.Array:
    """Return which lanes name a page that nobody holds; padding names none."""
    ids = _named(vpages, books.num_vpages)
    return (vpages < 0) | (books.refs.at[ids].get(mode="fill", fill_value=1) == 0)


def _is_first(ids: jax.Array) -> jax.Array:
    """Return which lanes are the first of their id: a sort of the short list."""
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros(ids.shape, bool).at[order].set(starts)


def _pad_one(ids: jax.Array, null: int) -> jax.Array:
    """Return `ids` with a null lane added when there is one only.

    XLA rewrites a scatter of a single row to a select and an update whose read of the
    old row copies the whole operand; it also folds the reductions that keep a read of
    a book before the write to it.
    """
    if ids.size != 1:
        return ids
    return jnp.concatenate([ids, jnp.full(1, null, np.int32)])
