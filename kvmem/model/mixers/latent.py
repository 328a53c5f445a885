"""Latent attention (MLA) over pages: one compressed row a token, absorbed products.

A token keeps its latent and, behind it, the rotated key that all heads share. The keys
and values of a head are products of the latent and are never made: the query goes
through the key's matrix, the output through the value's. The law: a byte that no token
wrote never reaches an output; a null page drops writes and reads as zeros; each rank's
heads are computed alone, from the same rows.

    pages = write_rows(pages, envelope, "layers.0", latents, ropes, table, starts, new)
    out = attend_written(pages, envelope, "layers.0", queries, table, lengths, scale)

Letters: S sequences, Q new tokens, G query heads of a rank, N nope, C latent, O rope
and V value elements; J = M * T slots of the table, B selected positions a query.
Source of the absorbed form: DeepSeek-V2's paper, section 2.1 (arXiv:2405.04434).
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvmem.geometry import Envelope
from kvmem.model import merge
from kvmem.model.mixers import rows, scaled
from kvmem.pool.table import GroupTable

__all__ = ["Queries", "attend_written", "dense", "write_rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """One step's queries, and the matrices of the rank's heads."""

    nope: jax.Array  # [S, Q, G, N] the part that is not rotated
    rope: jax.Array  # [S, Q, G, O] the rotated part
    positions: jax.Array  # i32[S, Q] the place of each query
    w_uk: jax.Array  # [G, N, C] a head's key is w_uk @ latent
    w_uv: jax.Array  # [G, V, C] a head's value is w_uv @ latent


def write_rows(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    latents: jax.Array,
    ropes: jax.Array,
    table: GroupTable,
    starts: jax.Array,
    num_new: jax.Array,
) -> jax.Array:
    """Write the latents and shared keys of new tokens. Donates `pages`.

    Args:
        pages: u8[P, E], the pages of one rank.
        envelope: of the latents' group, cut to the pool's pages.
        layer: the layer's name in the envelope.
        latents: [S, Q, C], after their norm.
        ropes: [S, Q, O], rotated.
        table: the group's pages in the order of the text.
        starts: i32[S] tokens already in the pages.
        num_new: i32[S] how many of the Q rows are real; the rest is dropped.
    """
    if rows.has_field(envelope, layer, "scale"):
        dtype = rows.plan_of(envelope, layer, "latent").dtype.name
        count = rows.plan_of(envelope, layer, "scale").head_dim
        values, scales = scaled.quantize(latents, dtype, count)
        parts = {"latent": values, "scale": scales, "rope": ropes}
    else:
        parts = {"latent": jnp.concatenate([latents, ropes], axis=-1)}
    return rows.append(pages, envelope, layer, parts, table, starts, num_new)


def attend_written(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    queries: Queries,
    table: GroupTable,
    lengths: jax.Array,
    scale: float,
    window: int | None = None,
    selected: jax.Array | None = None,
) -> jax.Array:
    """Attend to what the pages hold already; they are only read.

    One query a sequence with selected positions reads those rows alone; several read
    the pages of the table once and mask.

    Args:
        pages, envelope, layer, table: as in `write_rows`.
        queries: one rank's.
        lengths: i32[S] tokens in the pages; no position beyond is seen.
        scale: factor on the scores, of the whole query: (N + O) ** -0.5 or the model's.
        window: a query at n sees no position below n - window + 1; None: all.
        selected: i32[S, Q, B] the positions that each query reads
            (`kvmem.model.mixers.indexer.select`); None: all it sees.

    Returns:
        f32[S, Q, G, V]. A query that sees nothing gives zeros; what queries of padded
        rows give has no meaning.
    """
    seqs, steps = queries.positions.shape
    page_size = envelope.page_size
    if selected is not None and steps == 1:
        at = selected[:, 0]
        ids, slots = table.locate(at, page_size)
        kept = [
            rows.read_slots(pages, plan, ids[..., None], slots)
            for plan in _plans(envelope, layer)
        ]
    else:
        at = table.places(page_size)
        kept = [
            rows.read(pages, plan, table.pages[..., None])
            for plan in _plans(envelope, layer)
        ]
    kept = [part.reshape(seqs, -1, part.shape[-1]) for part in kept]
    latents, ropes = _as_floats(kept, queries.w_uk.shape[-1])

    sees = _sees(queries.positions, at, lengths, window)
    if selected is not None and steps > 1:
        sees &= _chosen(table.rows(selected, page_size), at.shape[-1])
    elif selected is not None and table.spread.shards > 1:
        sees &= (ids < pages.shape[0])[:, None]  # the others are on other ranks
    written = (at < lengths[:, None])[..., None]
    latents, ropes = (jnp.where(written, part, 0.0) for part in (latents, ropes))

    nope = jnp.einsum("sqgn,gnc->sqgc", _f32(queries.nope), _f32(queries.w_uk))
    scores = jnp.einsum("sqgc,sjc->sqgj", nope, latents)
    scores += jnp.einsum("sqgo,sjo->sqgj", _f32(queries.rope), ropes)
    scores = jnp.where(sees[:, :, None], scores * scale, merge.MASKED)
    share = merge.partial(scores, latents, "sqgj,sjc->sqgc")
    seen = merge.finish(merge.merge_ranks(share, table.spread))
    return jnp.einsum("sqgc,gvc->sqgv", seen, _f32(queries.w_uv))


def dense(
    queries: Queries,
    latents: jax.Array,
    ropes: jax.Array,
    scale: float,
    window: int | None = None,
    selected: jax.Array | None = None,
) -> jax.Array:
    """Attend over whole texts without a cache, with every head's keys and values made.

    Args:
        queries: Q = J, positions 0 to J - 1.
        latents, ropes: [S, J, C] and [S, J, O].
        scale, window, selected: as in `attend_written`.
    """
    seqs, length = queries.positions.shape
    at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (seqs, length))
    sees = _sees(queries.positions, at, jnp.full(seqs, length, jnp.int32), window)
    if selected is not None:
        sees &= _chosen(selected, length)
    keys = jnp.einsum("sjc,gnc->sjgn", _f32(latents), _f32(queries.w_uk))
    values = jnp.einsum("sjc,gvc->sjgv", _f32(latents), _f32(queries.w_uv))
    scores = jnp.einsum("sqgn,sjgn->sqgj", _f32(queries.nope), keys)
    scores += jnp.einsum("sqgo,sjo->sqgj", _f32(queries.rope), _f32(ropes))
    return jnp.einsum("sqgj,sjgv->sqgv", _softmax(scores * scale, sees), values)


def _plans(envelope: Envelope, layer: str) -> list[rows.FieldPlan]:
    """Plan the fields that make a row: it alone, or latent, scale and rope."""
    scaled_ = rows.has_field(envelope, layer, "scale")
    names = ("latent", "scale", "rope") if scaled_ else ("latent",)
    return [rows.plan_of(envelope, layer, name) for name in names]


def _as_floats(kept: list[jax.Array], rank: int) -> tuple[jax.Array, jax.Array]:
    """Return latents f32[S, J, C] and shared keys f32[S, J, O] of stored fields."""
    if len(kept) == 1:
        row = _f32(kept[0])
        return row[..., :rank], row[..., rank:]
    values, scales, ropes = kept
    return scaled.dequantize(values, scales), _f32(ropes)


def _sees(positions, at, lengths, window: int | None) -> jax.Array:
    """Return bool[S, Q, J]: which slots at positions i32[S, J] a query may read."""
    last = jnp.minimum(positions, lengths[:, None] - 1)[..., None]
    sees = at[:, None, :] <= last
    if window is not None:
        sees &= at[:, None, :] > positions[..., None] - window
    return sees


def _chosen(selected: jax.Array, num_slots: int) -> jax.Array:
    """Return bool[S, Q, J]: which slots of the table i32[S, Q, B] names.

    What lies outside is dropped.
    """
    chosen = jnp.zeros((*selected.shape[:2], num_slots), bool)
    seq, step = jnp.ogrid[: selected.shape[0], : selected.shape[1]]
    return chosen.at[seq[..., None], step[..., None], selected].set(
        True, mode="drop", wrap_negative_indices=False
    )


def _softmax(scores: jax.Array, sees: jax.Array) -> jax.Array:
    """Return the weights of scores [S, Q, G, J]; zeros where nothing is seen."""
    sees = sees[:, :, None, :]
    # Finite, so that a query which sees nothing gives zeros rather than NaN.
    scores = jnp.where(sees, scores, -1e30)
    weights = jnp.where(sees, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
