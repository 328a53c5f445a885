"""Peers: the same moves as XLA does them best, where runs stand evenly.

A reference finds each byte by an index, for any table. Where run k of K begins at byte
k * page_step of a page and k * record_step of a record, XLA needs no index: a gather of
whole pages, a transpose, and a scatter of whole pages. That is what a kernel is timed
against; a table of such runs is the caller's word, and is not read.

    peer = peers.of("export_records", Even(32, 4096, 256))    # None: there is no better
    jax.jit(peer)(into, pages, ids, table, first)
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocked, gather_pages, lists, scatter_pages
from pallas_kernels.append_tokens import Run
from pallas_kernels.records import Layout
from pallas_kernels.rotation import Window

__all__ = ["Even", "of"]


class Even(NamedTuple):
    """Runs at equal distances: how many, and bytes from one to the next."""

    count: int
    page_step: int
    record_step: int


def of(operation: str, even: Even, **facts) -> Callable | None:
    """Return the program of an operation's even runs, None: its reference is one."""
    found = _PEERS.get(operation)
    return None if found is None else functools.partial(found, even=even, **facts)


def _runs(picked, even: Even, layout: Layout) -> jax.Array:
    """View pages u8[n, E] as u8[n, K, T, nbytes]."""
    steps = picked.reshape(picked.shape[0], even.count, even.page_step)
    held = steps[:, :, : layout.slots * layout.nbytes]
    return held.reshape(*held.shape[:2], layout.slots, layout.nbytes)


def _put_runs(pages, ids, old, new, even: Even) -> jax.Array:
    """Return the pool with runs u8[n, K, T, nbytes] in the old pages of a list."""
    steps = old.reshape(old.shape[0], even.count, even.page_step)
    flat = new.reshape(*new.shape[:2], -1)
    steps = steps.at[:, :, : flat.shape[-1]].set(flat)
    return scatter_pages.reference(pages, ids, steps.reshape(old.shape))


def _export(into, pages, ids, table, first, *, layout: Layout, even: Even):
    picked = gather_pages.reference(pages, ids)
    tokens = _runs(picked, even, layout).transpose(0, 2, 1, 3)
    tokens = tokens.reshape(-1, even.count, layout.nbytes)
    named = jnp.repeat(lists.inside(ids, pages.shape[0]), layout.slots)
    count = into.shape[0]
    tokens = lax.dynamic_slice_in_dim(tokens, first, count)
    named = lax.dynamic_slice_in_dim(named, first, count)
    runs = into.reshape(count, even.count, even.record_step)
    kept = runs[:, :, : layout.nbytes]
    new = jnp.where(named[:, None, None], tokens, kept)
    return runs.at[:, :, : layout.nbytes].set(new).reshape(into.shape)


def _import(pages, ids, table, rows, first, *, layout: Layout, even: Even):
    runs = rows.reshape(rows.shape[0], even.count, even.record_step)
    return _import_runs(pages, ids, runs[:, :, : layout.nbytes], first, layout, even)


def _import_runs(pages, ids, runs, first, layout: Layout, even: Even):
    """Put runs u8[tokens, K, nbytes] into the slots of their tokens."""
    whole = jnp.zeros((ids.shape[0] * layout.slots, *runs.shape[1:]), jnp.uint8)
    whole = lax.dynamic_update_slice_in_dim(whole, runs, first, axis=0)
    token = jnp.arange(whole.shape[0], dtype=jnp.int32)
    has_row = (token >= first) & (token < first + runs.shape[0])
    split = ids.shape[0], layout.slots
    new = whole.reshape(*split, *whole.shape[1:]).transpose(0, 2, 1, 3)
    old = gather_pages.reference(pages, ids)
    mask = has_row.reshape(*split)[:, None, :, None]
    new = jnp.where(mask, new, _runs(old, even, layout))
    return _put_runs(pages, ids, old, new, even)


def _import_turned(
    pages,
    ids,
    table,
    rows,
    first,
    cos,
    sin,
    *,
    layout: Layout,
    style: str,
    dtype: str,
    window_offset: int,
    even: Even,
):
    window = Window(style, dtype, cos.shape[-1])
    c, s = (
        lax.dynamic_slice_in_dim(t.reshape(-1, t.shape[-1]), first, rows.shape[0])
        for t in (cos, sin)
    )
    runs = rows.reshape(rows.shape[0], even.count, even.record_step)
    runs = runs[:, :, : layout.nbytes]
    part = slice(window_offset, window_offset + window.nbytes)
    new = window.turned_bytes(runs[:, :, part], c[:, None], s[:, None])
    runs = runs.at[:, :, part].set(new)
    return _import_runs(pages, ids, runs, first, layout, even)


def _rerope(pages, ids, offsets, cos, sin, *, style, dtype, slot_stride, even: Even):
    window = Window(style, dtype, cos.shape[-1])
    layout = Layout(slot_stride, slot_stride, cos.shape[1])
    old = gather_pages.reference(pages, ids)
    runs = _runs(old, even, layout)
    part = offsets[0] % slot_stride + jnp.arange(window.nbytes, dtype=jnp.int32)
    own = jnp.take(runs, part, axis=-1, unique_indices=True, indices_are_sorted=True)
    new = window.turned_bytes(own, cos[:, None], sin[:, None])
    return _put_runs(pages, ids, old, runs.at[..., part].set(new), even)


def _append(pages, ids, slots, rows, *, runs: tuple[Run, ...], page_slots, even: Even):
    """Put the first rows of a page, one layer's, of every token."""
    named = lists.inside(ids, pages.shape[0])
    wins = lists.last_of(pages.shape[0], ids, slots) & named
    kept = jnp.where(wins, ids, pages.shape[0])
    view = pages.reshape(pages.shape[0], even.count, page_slots, -1)
    new = rows.reshape(rows.shape[0], len(runs), -1)
    view = view.at[kept, : len(runs), slots].set(new, mode="drop")
    return view.reshape(pages.shape)


def _rows_of_blocks(pages, ids, offsets, *, shape: blocked.Shape, even: Even):
    picked = gather_pages.reference(pages, ids)
    return shape.rows_of(picked.reshape(ids.shape[0], even.count, -1))


def _blocks_of_rows(pages, ids, offsets, rows, *, shape: blocked.Shape, even: Even):
    blocks = shape.blocks_of(rows).reshape(ids.shape[0], -1)
    return scatter_pages.reference(pages, ids, blocks)


_PEERS = {
    "export_records": _export,
    "import_records": _import,
    "import_turned": _import_turned,
    "rerope": _rerope,
    "append_tokens": _append,
    "rows_of_blocks": _rows_of_blocks,
    "blocks_of_rows": _blocks_of_rows,
}
