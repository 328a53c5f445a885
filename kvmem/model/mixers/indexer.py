"""The lightning indexer: which tokens a sparse attention layer reads (DeepSeek-V3.2).

A token keeps one small key on every rank, in fp8 with its scale at the page's tail. A
query scores every token before it, sum over index heads of w_h * relu(q_h . key), and
the best k are read. The law: a query that sees at most k tokens selects them all; of
equal scores the earlier token wins; what no token wrote is never selected.

    pages = write_keys(pages, envelope, "index.0", keys, table, starts, num_new)
    scored = scores(pages, envelope, "index.0", q, weights, table, lengths)
    chosen = select(*of_all_ranks(scored, table, page_size), positions, lengths, k=2048)

Letters: S sequences, Q new tokens, I index heads, D key elements, J = M * T slots of
the table, B = min(k, J) selected. Source: the technical report of DeepSeek-V3.2-Exp.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvmem.geometry import Envelope, Spread
from kvmem.mesh import DCP
from kvmem.model.mixers import rows, scaled
from kvmem.pool.table import GroupTable

__all__ = ["ABSENT", "dense_scores", "of_all_ranks", "scores", "select", "write_keys"]

ABSENT = int(np.iinfo(np.int32).max)
"""Stands where a query selects fewer than k tokens; no position is as large."""


def write_keys(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    keys: jax.Array,
    table: GroupTable,
    starts: jax.Array,
    num_new: jax.Array,
) -> jax.Array:
    """Write the index keys [S, Q, D] of new tokens. Donates `pages`.

    Args:
        pages: u8[P, E], the pages of one rank.
        envelope: of the indexers' group, cut to the pool's pages.
        layer: the indexer's name in the envelope.
        keys: after their norm and rotation.
        table: the indexers' group's pages in the order of the text.
        starts: i32[S] tokens already in the pages.
        num_new: i32[S] how many of the Q rows are real; the rest is dropped.
    """
    parts = {"key": keys}
    if count := _num_scales(envelope, layer):
        dtype = rows.plan_of(envelope, layer, "key").dtype.name
        values, scales = scaled.quantize(keys, dtype, count)
        parts = {"key": values, "scale": scales}
    return rows.append(pages, envelope, layer, parts, table, starts, num_new)


def scores(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    q: jax.Array,
    weights: jax.Array,
    table: GroupTable,
    lengths: jax.Array,
) -> jax.Array:
    """Score every slot of the table on this rank for each query: f32[S, Q, J].

    Slots that no token wrote score as zero keys do. A caller that splits index heads
    over ranks sums the scores over them before it selects.

    Args:
        pages, envelope, layer, table: as in `write_keys`; the pages are only read.
        q: [S, Q, I, D] index queries, rotated.
        weights: [S, Q, I] factor of each index head, every scale included.
        lengths: i32[S] tokens in the pages.
    """
    ids = table.pages[..., None]
    keys = rows.read(pages, rows.plan_of(envelope, layer, "key"), ids)
    if _num_scales(envelope, layer):
        scales = rows.read(pages, rows.plan_of(envelope, layer, "scale"), ids)
        keys = scaled.dequantize(keys, scales)
    keys = keys.astype(jnp.float32).reshape(len(lengths), -1, keys.shape[-1])
    written = table.places(envelope.page_size) < lengths[:, None]
    return dense_scores(q, weights, jnp.where(written[..., None], keys, 0.0))


def of_all_ranks(
    scored: jax.Array, table: GroupTable, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the scores of all tokens, f32[S, Q, J], and where each stands, i32[S, J].

    Ranks that keep different tokens exchange what they scored, and select alike.

    Args:
        scored: f32[S, Q, J] of the tokens of this rank.
        table, page_size: of the index keys.
    """
    spread = table.spread
    if spread.shards == 1:
        return scored, table.places(page_size)
    every = lax.all_gather(scored, DCP, axis=2)  # [S, Q, dcp, J]
    runs = every.reshape(*every.shape[:3], -1, spread.interleave)
    whole = dataclasses.replace(table, spread=Spread())
    at = whole.places(page_size * spread.shards)
    return jnp.swapaxes(runs, 2, 3).reshape(*scored.shape[:2], -1), at


def dense_scores(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Score keys [S, J, D] for queries [S, Q, I, D] and weights [S, Q, I]."""
    q, weights = q.astype(jnp.float32), weights.astype(jnp.float32)
    found = jnp.einsum("sqid,sjd->sqij", q, keys.astype(jnp.float32))
    return jnp.einsum("sqij,sqi->sqj", jax.nn.relu(found), weights)


def select(
    scored: jax.Array,
    at: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    k: int,
) -> jax.Array:
    """Return the positions that each query reads, i32[S, Q, B], ascending.

    Args:
        scored: f32[S, Q, J] scores of the table's slots.
        at: i32[S, J] position of each slot, ascending (`of_all_ranks`).
        positions: i32[S, Q] the place of each query, which sees none after it.
        lengths: i32[S] tokens in the pages; no position beyond is seen.
        k: tokens to select; where a query sees fewer, `ABSENT` stands behind them.
    """
    last = jnp.minimum(positions, lengths[:, None] - 1)
    sees = at[:, None, :] <= last[..., None]
    ranked = jnp.where(sees, scored, -jnp.inf)
    _, slot = lax.top_k(ranked, min(k, scored.shape[-1]))  # the earlier of equals first
    found = jnp.where(sees, at[:, None, :], ABSENT)
    return jnp.sort(jnp.take_along_axis(found, slot, axis=-1), axis=-1)


def _num_scales(envelope: Envelope, layer: str) -> int:
    """Return how many scales a key has, 0 where it is stored unscaled."""
    if not rows.has_field(envelope, layer, "scale"):
        return 0
    return rows.plan_of(envelope, layer, "scale").head_dim
