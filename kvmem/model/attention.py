"""Attention over pages: write the new tokens' keys and values, then attend.

One public call, `attend`, serves prefill in chunks and decode in batches of mixed
lengths, for any page order, page size and cache dtype, on one rank's pages: over the
whole text, or a sliding window of it with kept first tokens. The law: a byte that no
token of the sequence wrote, or that no query sees any more, never reaches an output,
whatever it is (NaN included); a null page (id >= P) drops writes and reads as zeros.
Where a table's tokens are spread over ranks, each writes and reads those it keeps, and
the ranks' shares are merged: every rank returns attention to all tokens.

    pages, out = attend(pages, envelope, "layers.0", q, k, v, table, starts, num_new)

Letters: S sequences, Q new tokens of each (padded), M table width, T slots a page,
J = M * T slots of the table, H local KV heads, G query heads a KV head, D head_dim,
P pages, E page bytes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Envelope, Spread
from kvmem.model import merge
from kvmem.model.page_rows import ReadPlan, WritePlan, read_plan, write_plan
from kvmem.pool.table import GroupTable
from kvmem.pool.tokens import WriteFn

__all__ = ["ALL", "Table", "View"]
__all__ += ["attend", "attend_written", "read_rows", "write_rows", "writer"]

Table = jax.Array | GroupTable
"""Physical pages of each sequence: a group's table, or i32[S, M] from page 0 on."""


@dataclasses.dataclass(frozen=True)
class View:
    """What a query at position n sees: max(0, n - window + 1) .. n, and [0, sinks)."""

    window: int | None = None  # tokens; None: all of them
    sinks: int = 0  # first tokens that stay in sight

    def sink_pages(self, page_size: int) -> int:
        """Return the columns of a table that hold sink tokens."""
        return -(-self.sinks // page_size)

    def keeps(self, places: jax.Array, positions: jax.Array) -> jax.Array | bool:
        """Say which places before a query's position it still sees; broadcasts."""
        if self.window is None:
            return True
        return (places > positions - self.window) | (places < self.sinks)


ALL = View()


def attend(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: Table,
    starts: jax.Array,
    num_new: jax.Array,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_logits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write `k` and `v` into their pages and attend causally.

    Donate `pages` where you jit: they are updated in place. Query i of a sequence
    stands at position n = starts + i; it sees positions max(0, n - window + 1) .. n and
    the first `sinks` tokens of those before it.

    Args:
        pages: u8[P, E], the pages of one rank; where layers have arrays of their own,
            the pages of this layer.
        envelope: what the bytes of a page mean on this rank.
        layer: the layer's name in the envelope.
        q: [S, Q, H * G, D] queries, rotated; the G queries of a KV head adjacent.
        k: [S, Q, H, D] keys of the new tokens, rotated.
        v: [S, Q, H, Dv] values of the new tokens.
        table: i32[S, M] physical pages in the order of the text; null: >= P. Or a
            `GroupTable`, whose columns begin at a later page, sink pages excepted.
        starts: i32[S] tokens already in the pages.
        num_new: i32[S] how many of the Q rows are real; the rest is dropped.
        scale: factor on the scores; None: D ** -0.5.
        window: tokens that a query sees, itself included; None: all.
        sinks: first tokens that every query sees beside its window.
        sink_logits: [H * G] learned scores that take part in each softmax and carry no
            value (GPT-OSS); None: none.

    Returns:
        The pages, and [S, Q, H * G, Dv] in the dtype of `q`. Rows >= num_new hold
        finite numbers of no meaning.
    """
    view = View(window, sinks)
    pages = write_rows(pages, envelope, layer, k, v, table, starts, num_new, view)
    positions = starts[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    out = attend_written(
        pages,
        envelope,
        layer,
        q,
        positions,
        table,
        starts + num_new,
        scale,
        view,
        sink_logits,
    )
    return pages, out


def attend_written(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    q: jax.Array,
    positions: jax.Array,
    table: Table,
    lengths: jax.Array,
    scale: float | None = None,
    view: View = ALL,
    sink_logits: jax.Array | None = None,
    gaps: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Attend to what the pages hold already; they are only read.

    Args:
        pages, envelope, layer, q, table, scale, sink_logits: as in `attend`.
        positions: i32[S, Q] the place of each query, which sees none after it.
        lengths: i32[S] tokens in the pages; no position beyond is seen.
        view: what a query sees of the positions before it.
        gaps: i32[S, Q] twice: each query sees no position from the first to before the
            second; None: no gaps.
    """
    seqs, steps, q_heads, width = q.shape
    table = _as_table(table)
    keys = read_rows(pages, envelope, layer, "k", table.pages)
    values = read_rows(pages, envelope, layer, "v", table.pages)
    heads = keys.shape[1]
    _require_heads(layer, q_heads, heads)

    places = table.places(envelope.page_size, view.sink_pages(envelope.page_size))
    last = jnp.minimum(positions, lengths[:, None] - 1)
    sees = places[:, None, :] <= last[:, :, None]  # [S, Q, J]
    sees &= view.keeps(places[:, None, :], positions[:, :, None])
    if gaps is not None:
        first, end = (each[:, :, None] for each in gaps)
        sees &= (places[:, None, :] < first) | (places[:, None, :] >= end)
    first = positions.min(axis=1, keepdims=True)
    readable = (places < lengths[:, None]) & view.keeps(places, first)
    values = jnp.where(readable[:, None, :, None], values, 0.0)

    scaled = q.astype(jnp.float32) * (width**-0.5 if scale is None else scale)
    grouped = scaled.reshape(seqs, steps, heads, q_heads // heads, width)
    grouped = grouped.transpose(0, 2, 1, 3, 4)  # [S, H, Q, G, D]
    scores = jnp.einsum("shqgd,shtd->shqgt", grouped, keys)
    scores = jnp.where(sees[:, None, :, None, :], scores, merge.MASKED)
    share = merge.partial(scores, values, "shqgt,shtd->shqgd")
    share = merge.merge_ranks(share, table.spread)
    out = merge.finish(share, _sinks(sink_logits, heads))
    out = out.transpose(0, 2, 1, 3, 4).reshape(seqs, steps, q_heads, -1)
    return out.astype(q.dtype)


def write_rows(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    k: jax.Array,
    v: jax.Array,
    table: Table,
    starts: jax.Array,
    num_new: jax.Array,
    view: View = ALL,
) -> jax.Array:
    """Write the keys and values of one layer's new tokens; shapes as in `attend`.

    `starts` may be i32[S, Q]: where each token stands, if not one behind the other.
    """
    plans = [write_plan(envelope, layer, name) for name in ("k", "v")]
    for plan, rows in zip(plans, (k, v), strict=True):
        plan.require(rows.shape[2:], layer)
    step = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
    sink_pages = view.sink_pages(envelope.page_size)
    at = starts if starts.ndim == 2 else starts[:, None] + step
    page, slot = _as_table(table).locate(at, envelope.page_size, sink_pages)
    page = jnp.where(step < num_new[:, None], page, pages.shape[0])
    if plans[0].granule == plans[1].granule:
        parts = [
            _updates(plan, page, slot, rows)
            for plan, rows in zip(plans, (k, v), strict=True)
        ]
        joined = [jnp.concatenate(part) for part in zip(*parts, strict=True)]
        return _scatter(pages, plans[0].granule, *joined)
    for plan, rows in zip(plans, (k, v), strict=True):
        pages = _scatter(pages, plan.granule, *_updates(plan, page, slot, rows))
    return pages


def writer(spread: Spread) -> WriteFn:
    """Return `write_rows` with plain tables, of sequences that lie as `spread` says."""

    def write(pages, envelope, layer, k, v, table, starts, num_new):
        table = GroupTable(table, jnp.zeros_like(starts), spread)
        return write_rows(pages, envelope, layer, k, v, table, starts, num_new)

    return write


def read_rows(
    pages: jax.Array, envelope: Envelope, layer: str, name: str, table: jax.Array
) -> jax.Array:
    """Gather the pages of `table` [S, M] as f32[S, H, M * T, D] rows of one field.

    Null pages read as zeros. Slots that no token wrote come as they lie.
    """
    plan = read_plan(envelope, layer, name)
    view = pages.reshape(pages.shape[0], -1, plan.granule)
    seqs = table.shape[0]
    got = view.at[table[:, None, :, None], plan.rows[None, :, None, :]].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )  # [S, H or 1, M, n, g]
    if plan.head_first:
        rows = _as_rows(got, (seqs, plan.heads, -1, plan.head_dim), plan)
    else:
        rows = _as_rows(got, (seqs, -1, plan.heads, plan.head_dim), plan)
        rows = rows.transpose(0, 2, 1, 3)
    # Without the barrier XLA's CPU backend puts words together from bytes in the order
    # that the product wants, at a stride: three times slower.
    return lax.optimization_barrier(rows.astype(jnp.float32))


def _as_table(table: Table) -> GroupTable:
    """Return the table of a group; an array's columns are the pages from 0 on."""
    if isinstance(table, GroupTable):
        return table
    return GroupTable(table, jnp.zeros(table.shape[0], jnp.int32))


def _sinks(sink_logits: jax.Array | None, heads: int) -> jax.Array | None:
    """Return learned scores as f32[1, H, 1, G, 1]."""
    if sink_logits is None:
        return None
    return sink_logits.astype(jnp.float32).reshape(1, heads, 1, -1, 1)


def _as_rows(got: jax.Array, shape: tuple[int, ...], plan: ReadPlan) -> jax.Array:
    """Give gathered bytes their dtype and shape."""
    item = plan.dtype.itemsize
    return lax.bitcast_convert_type(got.reshape(*shape, item), plan.dtype)


def _updates(
    plan: WritePlan, page: jax.Array, slot: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """List the rows to write: page i32[N], row i32[N], bytes u8[N, g]."""
    raw = lax.bitcast_convert_type(rows.astype(plan.dtype), jnp.uint8)
    at = plan.first[:, None] + np.arange(plan.width, dtype=np.int32)  # [H, w]
    row = slot[:, :, None, None] * plan.stride + at[None, None]
    pages = jnp.broadcast_to(page[:, :, None, None], row.shape)
    return pages.reshape(-1), row.reshape(-1), raw.reshape(-1, plan.granule)


def _scatter(
    pages: jax.Array, granule: int, page: jax.Array, row: jax.Array, raw: jax.Array
) -> jax.Array:
    """Write rows in place; pages outside [0, P) are dropped.

    One lone row is padded with a null one: XLA's CPU backend turns a scatter of exactly
    one row into a slice update that copies the whole pool.
    """
    if page.shape[0] == 1:
        page = jnp.concatenate([page, jnp.full_like(page, pages.shape[0])])
        row, raw = jnp.concatenate([row, row]), jnp.concatenate([raw, raw])
    view = pages.reshape(pages.shape[0], -1, granule)
    view = view.at[page, row].set(raw, mode="drop", wrap_negative_indices=False)
    return view.reshape(pages.shape)


def _require_heads(layer: str, q_heads: int, heads: int) -> None:
    """Refuse query heads that do not share the held KV heads evenly."""
    if q_heads % heads:
        raise IncompatiblePlan(
            say(
                f"{q_heads} query heads on layer {layer!r}",
                f"its pages hold {heads} KV heads, each for equally many query heads",
                f"Give a multiple of {heads} query heads",
            )
        )
