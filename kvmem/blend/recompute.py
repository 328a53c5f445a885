"""Recompute: the tokens that matter, over the pages of those that are reused.

The pages hold keys and values of reused tokens, turned to their new places; what lies
at the other tokens' places is not looked at. Up to the check layer every token is
computed; there the keys are compared with those in the pages, and from there on only
the chosen tokens are, in attention over the blended pages. All tokens keep the keys and
values of the layers up to the check layer, which are exact. The law: with every token
chosen the pages are those of a full prefill; with none reused too.

    recompute = Recompute(weights, envelopes, check, mesh)
    pages = recompute(pages, Shape(...), batch)            # donates the pages

No logits: the text's last token is left to a step. Letters: R ranks, P pages, E bytes
of a page, N tokens of the span, M chosen ones, W columns of a table.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from kvmem.blend import select
from kvmem.blend.walk import Rows, Walk, taken, walk_of
from kvmem.geometry import Envelope, LayerSpec
from kvmem.model import attention, parallel
from kvmem.model.mixers import rows as stored
from kvmem.model.mixers import scaled
from kvmem.pool import dispatch
from kvmem.pool.table import GroupTable

__all__ = ["Batch", "Recompute", "Shape", "rounded"]


class Shape(NamedTuple):
    """What one program is compiled for."""

    tokens: int  # N
    chosen: int  # M
    checks: bool  # whether keys are compared; else only unfound tokens are chosen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A span of one text: tokens [start, start + num)."""

    tokens: jax.Array  # i32[N] padded
    is_reused: jax.Array  # bool[N] whose keys and values the pages hold
    start: jax.Array  # i32 tokens before the span, which the pages hold
    num: jax.Array  # i32 real tokens of the N
    num_chosen: jax.Array  # i32 tokens that are computed behind the check layer
    tables: tuple[jax.Array, ...]  # i32[W] a group: physical pages, null beyond


def rounded(count: int, least: int = 32) -> int:
    """Return the size that a program is compiled for: four an octave."""
    if count <= least:
        return least
    step = max(least // 4, 1 << ((count - 1).bit_length() - 3))
    return -(-count // step) * step


class Recompute:
    """The pass of one model on one topology; compiled once a shape.

    Args:
        weights: of all ranks.
        envelopes: rank 0's page of each group, cut to the pool's.
        check: the layer whose keys are compared.
        mesh: where the ranks live; None: one device.
    """

    def __init__(
        self,
        weights: parallel.Weights,
        envelopes: tuple[Envelope, ...],
        check: LayerSpec,
        mesh: Mesh | None = None,
    ):
        self.weights = weights
        self.num_traces = 0
        run = functools.partial(_everywhere, mesh, envelopes, check)
        self._jitted = jax.jit(
            functools.partial(self._count, run), static_argnums=1, donate_argnums=0
        )

    def __call__(self, pages: jax.Array, shape: Shape, batch: Batch) -> jax.Array:
        """Donates `pages` u8[R, P, E]. Write what the span's tokens leave."""
        return dispatch.call(
            lambda *given: self._jitted(given[0], shape, *given[1:]),
            pages,
            self.weights,
            batch,
        )

    def _count(self, run, pages, shape, weights, batch):
        self.num_traces += 1
        return run(shape, weights, pages, batch)


def _everywhere(mesh, envelopes, check, shape, weights, pages, batch):
    """Run every rank: on its own device, or stacked on one."""
    if mesh is not None:
        ranks, everywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
        run = jax.shard_map(
            functools.partial(_held, envelopes, check, shape, parallel.AXIS),
            mesh=mesh,
            in_specs=(
                parallel.Weights(ranks, everywhere, weights.graph),
                ranks,
                everywhere,
            ),
            out_specs=ranks,
        )
        return run(weights, pages, batch)
    if weights.ranks > 1:
        run = jax.vmap(
            functools.partial(_rank, envelopes, check, shape, parallel.AXIS),
            in_axes=(parallel.Weights(0, None, weights.graph), 0, None),
            axis_name=parallel.AXIS,
        )
        return run(weights, pages, batch)
    return _held(envelopes, check, shape, None, weights, pages, batch)


def _held(envelopes, check, shape, axis_name, weights, pages, batch):
    """Run the one rank that this device holds, under its rank axis of length 1."""
    split = jax.tree.map(lambda leaf: leaf.squeeze(0), weights.split)
    own = dataclasses.replace(weights, split=split)
    return _rank(envelopes, check, shape, axis_name, own, pages.squeeze(0), batch)[None]


def _rank(envelopes, check, shape, axis_name, weights, pages, batch):
    """Run one rank; no rank axis."""
    decoder = nnx.merge(weights.graph, weights.split, weights.shared)
    length = (batch.start + batch.num)[None]
    zero = jnp.zeros(1, jnp.int32)
    tables = tuple(GroupTable(table[None], zero) for table in batch.tables)
    walk = walk_of(decoder, envelopes, tables, length, axis_name)
    return blend(walk, check, shape, pages, batch)


def blend(
    walk: Walk, check: LayerSpec, shape: Shape, pages: jax.Array, batch: Batch
) -> jax.Array:
    """Return one rank's pages u8[P, E] with the span in them."""
    place = jnp.arange(shape.tokens, dtype=jnp.int32)
    is_real = place < batch.num
    must = is_real & ~batch.is_reused
    rows = Rows((batch.start + place)[None], batch.num[None])
    x = walk.enter(batch.tokens[None])
    scored = jnp.where(is_real, 0.0, -jnp.inf)
    first = 0
    if shape.checks:
        first = check.index
        for index in range(first):
            pages, held = walk.meet(index, pages, x, rows)
            x = walk.leave(index, pages, x, held, rows)
        old = _keys(walk, check, pages, rows)
        pages, held = walk.meet(first, pages, x, rows)
        deviates = select.scores(_keys(walk, check, pages, rows), old)
        if walk.axis_name is not None:
            deviates = jax.lax.psum(deviates, walk.axis_name)
        scored = jnp.where(is_real, deviates, -jnp.inf)
    chosen = select.choose(scored, must, batch.num_chosen, shape.chosen)
    x, rows = taken(x, chosen), rows.take(chosen, batch.num_chosen[None])
    if shape.checks:
        x = walk.leave(first, pages, x, taken(held, chosen), rows)
        first += 1
    for index in range(first, walk.num_layers):
        pages, held = walk.meet(index, pages, x, rows)
        if index + 1 < walk.num_layers:  # behind the last one nothing is asked for
            x = walk.leave(index, pages, x, held, rows)
    return pages


def _keys(walk: Walk, check: LayerSpec, pages: jax.Array, rows: Rows) -> jax.Array:
    """Return f32[N, K]: what the check layer's pages hold as keys of the span."""
    groups = zip(walk.envelopes, walk.tables, strict=True)
    envelope, table = next(
        (envelope, table)
        for envelope, table in groups
        if any(entry.field.layer == check.name for entry in envelope.entries)
    )
    if check.kind == "gqa":
        found = attention.read_rows(pages, envelope, check.name, "k", table.pages)
        found = found[0].transpose(1, 0, 2)  # [J, H, D]
    else:
        ids = table.pages[0, :, None]
        parts = {
            field.name: stored.read(
                pages, stored.plan_of(envelope, check.name, field.name), ids
            ).reshape(ids.shape[0] * envelope.page_size, -1)
            for field in check.fields
        }
        if "scale" in parts:
            scales = parts.pop("scale")
            parts["latent"] = scaled.dequantize(parts["latent"], scales)
        found = jnp.concatenate(
            [part.astype(jnp.float32) for part in parts.values()], axis=1
        )
    found = found.reshape(found.shape[0], -1)
    return found.at[rows.positions[0]].get(mode="fill", fill_value=0)


def null_table(width: int) -> np.ndarray:
    """Return i32[width] of ids that are null to every pool."""
    return np.full(width, np.iinfo(np.int32).max, np.int32)
