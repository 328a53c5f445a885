"""Device executor: pages to records and back as array programs, for any backend.

In units (the largest blocks that nothing cuts) a plan is two index tables, so an export
is a gather of pages and a gather of units, and an import the same two turned round and
one donated scatter. Ranks on a mesh work alone under `shard_map`: an export adds up
disjoint contributions, an import communicates nothing. Null page ids (one past the end)
fill with zeros and drop.

    export_pages(pages, page_ids, plan, window, records)    # fills u8[tokens, record]

Where a page is spread over planes, its parts are gathered end to end: one page again.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from kvmem import errors
from kvmem.canonical.plan import CopyPlan, Who
from kvmem.canonical.units import index
from kvmem.transfer import plane_rows
from kvmem.transfer.arrays import Pages, as_given, listed, num_pages, parts
from kvmem.transfer.plane_rows import Planes
from kvmem.transfer.window import Window

__all__ = ["export_pages", "import_pages"]


class _Facts(NamedTuple):
    """Static sizes of one program."""

    unit_nbytes: int
    planes: Planes
    units_per_record: int
    page_tokens: int
    of_pages: Sharding | tuple[Sharding, ...]  # as the pool came, and goes
    over_ranks: NamedSharding | None  # None: each device holds all ranks


def export_pages(
    pages: Pages,
    page_ids: np.ndarray,
    plan: CopyPlan,
    window: Window,
    records: np.ndarray,
    rank: int | None = None,
) -> None:
    """Fill u8[num_tokens, record] from the elected writers, or from `rank` alone.

    Bytes that none of them holds are zero.
    """
    facts = _facts(pages, plan)
    turns = plan.turns(len(window.pages)) if rank is None else (rank,)
    table = _table(plan, turns, facts, to_records=True)
    padded = _export(
        pages, _bucket(page_ids, window, facts.planes.num_pages), table, facts
    )
    first = window.first_token - window.pages.start * window.page_tokens
    records[...] = np.asarray(padded)[first : first + window.num_tokens]


def import_pages(
    pages: Pages,
    page_ids: np.ndarray,
    plan: CopyPlan,
    window: Window,
    records: np.ndarray,
) -> Pages:
    """Return pages whose every holder holds the records. Donates `pages`."""
    facts = _facts(pages, plan)
    table = _table(plan, ("holders",), facts, to_records=False)
    ids = _bucket(page_ids, window, facts.planes.num_pages)
    first = window.first_token - window.pages.start * window.page_tokens
    padded = np.zeros((len(ids) * window.page_tokens, records.shape[1]), np.uint8)
    padded[first : first + window.num_tokens] = records
    bounds = np.asarray([first, first + window.num_tokens], np.int32)
    return _importer(facts)(pages, ids, padded, bounds, table)


def _bucket(page_ids: np.ndarray, window: Window, null_page: int) -> np.ndarray:
    """Pad the window's pages with null pages to a power of two: few programs."""
    touched = page_ids[window.pages.start : window.pages.stop]
    bucket = 1 << (len(touched) - 1).bit_length()
    ids = np.full(bucket, null_page, np.int32)
    ids[: len(touched)] = touched
    return ids


def _facts(pages: Pages, plan: CopyPlan) -> _Facts:
    unit = plan.unit_nbytes
    shardings = [array.sharding for array in listed(pages)]
    return _Facts(
        unit,
        Planes(parts(pages, plan), num_pages(pages, plan)),
        plan.record_nbytes // unit,
        plan.page_tokens,
        as_given(shardings, pages),
        _over_ranks(shardings[0]),
    )


def _over_ranks(sharding: Sharding) -> NamedSharding | None:
    """Return the sharding of a pool over mesh axes, None when nothing is split."""
    if sharding.is_fully_replicated:
        return None
    if not isinstance(sharding, NamedSharding):
        raise errors.IncompatiblePlan(
            errors.say(
                f"pages sharded by {sharding}",
                "a program over ranks needs the name of their mesh axis",
                'Shard pages with NamedSharding(mesh, PartitionSpec("tp"))',
            )
        )
    return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))


@functools.lru_cache(maxsize=64)
def _table(
    plan: CopyPlan, turns: tuple[Who, ...], facts: _Facts, to_records: bool
) -> jax.Array:
    """Return i32[R, W, units]: where a unit of the target comes from, turn by turn.

    One past the end of the source where it comes from nowhere.
    """
    unit = plan.unit_nbytes
    local_units = plan.page_nbytes // unit
    canonical_units = plan.page_tokens * plan.record_nbytes // unit
    tables = np.empty(
        (
            plan.topology.ranks,
            len(turns),
            canonical_units if to_records else local_units,
        ),
        np.int32,
    )
    for turn, who in enumerate(turns):
        for rank, runs in enumerate(plan.lists(who)):
            local, canonical = plan.units_of(runs)
            if to_records:
                found = index(canonical, local, canonical_units, local_units)
            else:
                found = index(local, canonical, local_units, canonical_units)
            tables[rank, turn] = found
    return jax.device_put(tables, facts.over_ranks)


def _map_ranks(body: Callable, facts: _Facts, in_ranks: str, out_ranks: bool):
    """Run `body` on each device's ranks; "r" marks arguments split over them."""
    if facts.over_ranks is None:
        return body
    split, whole = facts.over_ranks.spec, PartitionSpec()
    return jax.shard_map(
        body,
        mesh=facts.over_ranks.mesh,
        in_specs=tuple(split if mark == "r" else whole for mark in in_ranks),
        out_specs=split if out_ranks else whole,
    )


@functools.partial(jax.jit, static_argnames="facts")
def _export(pages: Pages, ids: jax.Array, table: jax.Array, facts: _Facts) -> jax.Array:
    def body(pages, ids, table):  # u8[r, P, E] or a tuple, i32[n], i32[r, W, C]
        rows = plane_rows.gather(pages, ids, facts.planes)
        page = plane_rows.join(rows, facts.planes)
        words = _words(page, facts.unit_nbytes)  # [r, n, U, w]
        ranks, n, units, width = words.shape
        # Each canonical unit has one writer: its place in the ranks' units end to end.
        base = units * jnp.arange(ranks, dtype=jnp.int32)[:, None, None]
        place = jnp.where(table < units, table + base, ranks * units).min(axis=0)
        lined_up = jnp.moveaxis(words, 0, 1).reshape(n, ranks * units, width)
        records = _dealt(lined_up, place)
        if facts.over_ranks is not None:
            records = jax.lax.psum(records, facts.over_ranks.spec[0])
        return _bytes(records).reshape(n * facts.page_tokens, -1)

    return _map_ranks(body, facts, "r.r", out_ranks=False)(pages, ids, table)


def _dealt(lined_up: jax.Array, place: jax.Array) -> jax.Array:
    """Take units [n, C, w] out of [n, U, w]: page i by the places of turn i % W."""
    take = functools.partial(jnp.take, mode="fill", fill_value=0)
    if place.shape[0] == 1:
        return take(lined_up, place[0], axis=1)
    turn = jnp.arange(lined_up.shape[0], dtype=jnp.int32) % place.shape[0]
    return jax.vmap(functools.partial(take, axis=0))(lined_up, place[turn])


@functools.lru_cache(maxsize=64)
def _importer(facts: _Facts) -> Callable:
    run = functools.partial(_import, facts=facts)
    return jax.jit(run, donate_argnums=0, out_shardings=facts.of_pages)


def _import(
    pages: Pages,
    ids: jax.Array,
    records: jax.Array,
    bounds: jax.Array,
    table: jax.Array,
    facts: _Facts,
) -> Pages:
    def body(pages, ids, records, bounds, table):  # table: i32[r, 1, U]
        table = table[:, 0]
        rows = plane_rows.gather(pages, ids, facts.planes)  # u8[r, n, E] a plane
        page = plane_rows.join(rows, facts.planes)
        old = _words(page, facts.unit_nbytes)  # [r, n, U, w]
        source = _words(records.reshape(ids.size, -1), facts.unit_nbytes)  # [n, C, w]
        new = jnp.take(source, table.reshape(-1), axis=1, mode="fill", fill_value=0)
        new = jnp.moveaxis(new.reshape(ids.size, *table.shape, -1), 1, 0)
        taken = jnp.moveaxis(_taken(table, ids.size, bounds, facts), 1, 0)
        mixed = _bytes(jnp.where(taken[..., None], new, old))
        joined = mixed.reshape(*rows[0].shape[:2], -1)
        parted = plane_rows.part_again(joined, rows, facts.planes)
        return plane_rows.scatter(pages, ids, parted, facts.planes)

    run = _map_ranks(body, facts, "r...r", out_ranks=True)
    return run(pages, ids, records, bounds, table)


def _taken(
    table: jax.Array, num_pages: int, bounds: jax.Array, facts: _Facts
) -> jax.Array:
    """Return bool[n, r, U]: units whose token lies in the window, padding never."""
    token = table // facts.units_per_record  # a null unit is past the page's tokens
    start = facts.page_tokens * jnp.arange(num_pages, dtype=jnp.int32)
    at = start[:, None, None] + token[None]
    inside = (at >= bounds[0]) & (at < bounds[1])
    return inside & (token < facts.page_tokens)[None]


def _words(rows: jax.Array, unit_nbytes: int) -> jax.Array:
    """View u8[..., bytes] as units of the widest word that divides them."""
    units = rows.reshape(*rows.shape[:-1], -1, unit_nbytes)
    if unit_nbytes % 4:
        return units
    words = units.reshape(*units.shape[:-1], -1, 4)
    return jax.lax.bitcast_convert_type(words, jnp.uint32)


def _bytes(words: jax.Array) -> jax.Array:
    """View units as u8[..., bytes of a unit]."""
    if words.dtype == jnp.uint8:
        return words
    parts = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return parts.reshape(*words.shape[:-1], -1)
