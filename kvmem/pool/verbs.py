"""The verbs of a pool: handout, release, retain, fork, pin, unpin, translate.

The law: `handout` is the only door off the free stack, and it zeroes what passes
through, all parts of it, on every rank (`fork` fills its one fresh virtual page with a
copy instead). Every verb is total: when it cannot do the job, the state comes back
unchanged, with null ids and a flag. One trace serves all values, and none costs more in
a larger pool.

All but the translations donate their pool. Called on arrays, a verb runs outside any
mesh context, so warming up under one and serving under another compiles nothing twice;
inside jit it is traced into the caller's program.

    pool, vpages, ok = handout(pool, 0, want=[3, 1], max_pages=4)   # i32[2, 4]
    pool, rejected = release(pool, 0, vpages)
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from kvmem.pool import books as kept
from kvmem.pool import dispatch, moves
from kvmem.pool.ids import as_group, as_ids, as_size, require_one_part
from kvmem.pool.state import POISON, Pool

__all__ = [
    "fork",
    "handout",
    "pin",
    "release",
    "retain",
    "translate",
    "translate_parts",
    "unpin",
]


def handout(
    pool: Pool, group: int, want: jax.typing.ArrayLike, max_pages: int
) -> tuple[Pool, jax.Array, jax.Array]:
    """Donates `pool`. Give each of S sequences `want` fresh pages, all zero, or none.

    A virtual page of K parts takes K physical pages, wherever they are.

    Args:
        want: i32[S] virtual pages for each sequence, from 0 to `max_pages`.
        max_pages: width of the answer.

    Returns:
        The pool; vpages i32[S, max_pages], null beyond `want`; ok bool[]: False when
        pages ran short for any, or a `want` is out of range: then all are null and the
        pool is unchanged.

    Raises:
        InvalidId: no such group, or a `want` that is not i32[S].
        ConfigError: a width that is no integer >= 0.
    """
    group = as_group(group, len(pool.groups))
    want, max_pages = as_ids(want, "want", 1), as_size(max_pages, "max_pages")
    return dispatch.call(_handout, pool, group, want, max_pages)


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
    group = as_group(group, len(pool.groups))
    return dispatch.call(_release, pool, group, as_ids(vpages, "vpages"))


def retain(
    pool: Pool, group: int, vpages: jax.typing.ArrayLike
) -> tuple[Pool, jax.Array]:
    """Donates `pool`. Add one reference for each lane; reject ids that nobody holds.

    Ids beyond the end are padding, negative ones rejected.
    """
    group = as_group(group, len(pool.groups))
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
            (every byte of all parts, on every rank); M or more when the last page is
            full. A snapshot of a recurrent state is a fork of its one page, column 0.

    Returns:
        The pool; vpages i32[M] of the second sequence; ok bool[]: False when no page is
        left for the copy, or an id is not held: then all are null, the pool unchanged.
    """
    group = as_group(group, len(pool.groups))
    vpages, copied = as_ids(vpages, "vpages", 1), as_ids(copied, "copied", 0)
    return dispatch.call(_fork, pool, group, vpages, copied)


def pin(pool: Pool, group: int, vpages: jax.typing.ArrayLike) -> tuple[Pool, jax.Array]:
    """Donates `pool`. Keep pages where they are: one pin more for each lane.

    For bytes that are read or written outside the order of the pool's own programs: an
    export, a put, a kernel call not yet waited for. A pinned page does not move in
    `compact`, and its last reference is not released; who must outlive the sequence
    that owns the page holds a reference too (`retain`).

    Ids beyond the end are padding; negative ids, and those that nobody holds, are
    rejected.

    Returns:
        The pool; rejected bool, of the shape of `vpages`.
    """
    group = as_group(group, len(pool.groups))
    return dispatch.call(_pin, pool, group, as_ids(vpages, "vpages"))


def unpin(
    pool: Pool, group: int, vpages: jax.typing.ArrayLike
) -> tuple[Pool, jax.Array]:
    """Donates `pool`. Take back one pin for each lane.

    Ids beyond the end are padding. An id is rejected in all its lanes, and nothing
    changes for it, when it is negative or is listed more often than it is pinned.

    Returns:
        The pool; rejected bool, of the shape of `vpages`.
    """
    group = as_group(group, len(pool.groups))
    return dispatch.call(_unpin, pool, group, as_ids(vpages, "vpages"))


def translate(pool: Pool, group: int, vpages: jax.typing.ArrayLike) -> jax.Array:
    """Return the physical page of each virtual page; null_page for all other ids.

    Raises:
        IncompatiblePlan: a virtual page of this group has more than one part.
    """
    group = as_group(group, len(pool.groups))
    require_one_part(pool.groups[group].extent, group)
    return dispatch.call(_translate, pool, group, as_ids(vpages, "vpages"))


def translate_parts(pool: Pool, group: int, vpages: jax.typing.ArrayLike) -> jax.Array:
    """Return i32[..., K]: the physical page of each part of each virtual page.

    null_page in all parts for all other ids.
    """
    group = as_group(group, len(pool.groups))
    return dispatch.call(_translate_parts, pool, group, as_ids(vpages, "vpages"))


@functools.partial(jax.jit, static_argnums=(1, 3), donate_argnums=0)
def _handout(pool: Pool, group: int, want: jax.Array, max_pages: int):
    before = pool.num_free
    pool, vpages, ok = kept.take(pool, group, want, max_pages)
    taken = before - pool.num_free
    pages = moves.zero(pool.pages, pool.free, pool.num_free, taken)
    return dataclasses.replace(pool, pages=pages), vpages, ok


@functools.partial(jax.jit, static_argnums=(1, 3), donate_argnums=0)
def _handout_books(pool: Pool, group: int, want: jax.Array, max_pages: int):
    """Hand out without zeroing: half a verb, so that a benchmark can time it alone."""
    return kept.take(pool, group, want, max_pages)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _release(pool: Pool, group: int, vpages: jax.Array):
    books, shape = pool.groups[group], vpages.shape
    vpages = kept.pad_one(vpages.reshape(-1), books.null_vpage)
    ids = kept.named(vpages, books.num_vpages)
    refs = books.refs.at[ids].add(-1, mode="drop")
    left = refs.at[ids].get(mode="fill", fill_value=1)
    pinned = books.pins.at[ids].get(mode="fill", fill_value=0) > 0
    rejected = (vpages < 0) | (left < 0) | ((left == 0) & pinned)
    refs = refs.at[ids].add(rejected.astype(jnp.int32), mode="drop")
    freed = (left == 0) & ~rejected & kept.is_first(ids)
    books = dataclasses.replace(books, refs=refs)
    before = pool.num_free
    pool = kept.give_back(pool, group, books, ids, freed)
    if pool.is_poisoned:
        freed = pool.num_free - before
        pages = moves.fill(pool.pages, pool.free, before, freed, POISON)
        pool = dataclasses.replace(pool, pages=pages)
    return pool, _of_shape(rejected, shape)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _retain(pool: Pool, group: int, vpages: jax.Array):
    books, ids, rejected = _held_lanes(pool, group, vpages)
    refs = books.refs.at[ids].add(1, mode="drop")
    books = dataclasses.replace(books, refs=refs)
    return kept.with_group(pool, group, books), _of_shape(rejected, vpages.shape)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _pin(pool: Pool, group: int, vpages: jax.Array):
    books, ids, rejected = _held_lanes(pool, group, vpages)
    pins = books.pins.at[ids].add(1, mode="drop")
    books = dataclasses.replace(books, pins=pins)
    return kept.with_group(pool, group, books), _of_shape(rejected, vpages.shape)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _unpin(pool: Pool, group: int, vpages: jax.Array):
    books, shape = pool.groups[group], vpages.shape
    vpages = kept.pad_one(vpages.reshape(-1), books.null_vpage)
    ids = kept.named(vpages, books.num_vpages)
    pins = books.pins.at[ids].add(-1, mode="drop")
    rejected = (vpages < 0) | (pins.at[ids].get(mode="fill", fill_value=0) < 0)
    pins = pins.at[ids].add(rejected.astype(jnp.int32), mode="drop")
    books = dataclasses.replace(books, pins=pins)
    return kept.with_group(pool, group, books), _of_shape(rejected, shape)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _fork(pool: Pool, group: int, vpages: jax.Array, copied: jax.Array):
    books, (num_lanes,) = pool.groups[group], vpages.shape
    if not num_lanes:
        vpages = jnp.full(1, books.null_vpage, jnp.int32)
    vpages = kept.pad_one(vpages, books.null_vpage)
    is_copy = jnp.arange(vpages.size, dtype=jnp.int32) == copied
    source = jnp.min(jnp.where(is_copy, vpages, books.null_vpage))
    source_is_held = (copied >= num_lanes) | (source < books.num_vpages)
    askable = source_is_held & ~kept.is_unheld(books, vpages).any()
    want = (askable & (copied < num_lanes)).astype(jnp.int32)
    pool, fresh, has_room = kept.take(pool, group, want[None], 1)
    ok = askable & has_room
    shared = jnp.where(ok & ~is_copy, vpages, books.null_vpage)
    pool, _ = _retain(pool, group, shared)
    child = jnp.where(ok & is_copy, fresh[0], kept.named(shared, books.num_vpages))
    pages = moves.move(
        pool.pages,
        kept.parts_of(pool, group, source[None])[0],
        kept.parts_of(pool, group, fresh[0])[0],
        jnp.where(has_room, want, 0) * books.extent,
    )
    return dataclasses.replace(pool, pages=pages), child[:num_lanes], ok


@functools.partial(jax.jit, static_argnums=1)
def _translate(pool: Pool, group: int, vpages: jax.Array):
    return kept.parts_of(pool, group, vpages)[..., 0]


@functools.partial(jax.jit, static_argnums=1)
def _translate_parts(pool: Pool, group: int, vpages: jax.Array):
    return kept.parts_of(pool, group, vpages)


def _held_lanes(pool: Pool, group: int, vpages: jax.Array):
    """Return the group's books, the lanes that name a held page, and the rejected."""
    books = pool.groups[group]
    vpages = kept.pad_one(vpages.reshape(-1), books.null_vpage)
    rejected = kept.is_unheld(books, vpages)
    ids = jnp.where(rejected, books.null_vpage, kept.named(vpages, books.num_vpages))
    return books, ids, rejected


def _of_shape(lanes: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the lanes that were asked about, without the one that was padded."""
    return lanes[: math.prod(shape)].reshape(shape)
