"""Walk: a decoder layer by layer, over rows of a text that need not be neighbours.

A step takes all new tokens through every layer; a blended text takes fewer of them from
some layer on. The law: a layer met and left by rows at their own places does to them
what the decoder's own step would, as the rows that are left out lie in the pages.

    walk = Walk(decoder, envelopes, tables, length, axis_name)
    x = walk.enter(tokens)
    pages, held = walk.meet(0, pages, x, rows)      # keys and values are written
    x = walk.leave(0, pages, x, held, rows)         # attention and MLP

Letters: Q rows, D hidden.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvmem.geometry import Envelope
from kvmem.model.attention import attend_written, write_rows
from kvmem.model.decoder import Decoder
from kvmem.model.hybrid.decoder import HybridDecoder
from kvmem.model.hybrid.step import Step
from kvmem.model.ops import embedded
from kvmem.model.rotate import angles
from kvmem.pool.table import GroupTable

__all__ = ["Rows", "Walk", "walk_of"]

_BLOCK = 256  # queries that attend at once: their scores stay in cache


class Rows(NamedTuple):
    """Tokens of one text, ascending; the first `num` of Q are real."""

    positions: jax.Array  # i32[1, Q]
    num: jax.Array  # i32[1]

    def take(self, chosen: jax.Array, num: jax.Array) -> "Rows":
        """Return the rows that `chosen` i32[M] names; null ones stand at place 0."""
        return Rows(taken(self.positions, chosen), num)


def taken(rows: jax.Array, chosen: jax.Array) -> jax.Array:
    """Take rows [1, Q, ...] to [1, M, ...]; zeros where `chosen` is past the end."""
    return rows.at[:, chosen].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """One rank's decoder and the pages of one text in every group."""

    decoder: Decoder | HybridDecoder
    envelopes: tuple[Envelope, ...]
    tables: tuple[GroupTable, ...]
    length: jax.Array  # i32[1] tokens in the pages once all rows are written
    axis_name: str | None

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return len(self.decoder.layers)

    def enter(self, tokens: jax.Array) -> jax.Array:
        """Embed i32[1, Q]."""
        raise NotImplementedError

    def meet(
        self, index: int, pages: jax.Array, x: jax.Array, rows: Rows
    ) -> tuple[jax.Array, jax.Array]:
        """Write what a layer keeps of rows x [1, Q, D]; return what it holds of them
        until it is left, [1, Q, ...]."""
        raise NotImplementedError

    def leave(
        self, index: int, pages: jax.Array, x: jax.Array, held: jax.Array, rows: Rows
    ) -> jax.Array:
        """Return rows x behind a layer."""
        raise NotImplementedError


class _Plain(Walk):
    """A decoder of one group; what a layer holds are its queries."""

    def enter(self, tokens):
        return embedded(self.decoder.embed, tokens, self.axis_name)

    def meet(self, index, pages, x, rows):
        spec = self.decoder.partition.spec
        (envelope,), (table,) = self.envelopes, self.tables
        cos, sin = angles(spec.rope, spec.head_dim, rows.positions)
        q, k, v = self.decoder.layers[index].heads(x, cos, sin)
        new = k, v, table, rows.positions, rows.num
        return write_rows(pages, envelope, f"layers.{index}", *new), q

    def leave(self, index, pages, x, held, rows):
        (envelope,), (table,) = self.envelopes, self.tables
        name, seen = f"layers.{index}", []
        for first in range(0, held.shape[1], _BLOCK):
            block = slice(first, first + _BLOCK)
            asked = held[:, block], rows.positions[:, block], table, self.length
            seen.append(attend_written(pages, envelope, name, *asked))
        seen = jnp.concatenate(seen, axis=1)
        return self.decoder.layers[index].mix(x, seen, self.axis_name)


@dataclasses.dataclass(frozen=True)
class _Scattered(Step):
    """A step whose new tokens stand at places of their own, `starts` i32[S, Q]."""

    length: jax.Array  # i32[S]

    @property
    def lengths(self) -> jax.Array:
        return self.length


class _Hybrid(Walk):
    """A decoder whose layers differ; what a layer holds are its mixer's rows."""

    def enter(self, tokens):
        spec = self.decoder.partition.spec
        x = embedded(self.decoder.embed, tokens, self.axis_name)
        return x * spec.hidden**0.5 if spec.family.scaled_embeddings else x

    def meet(self, index, pages, x, rows):
        layer = self.decoder.layers[index]
        step = Step.of(self.envelopes, self.tables, self.length, rows.num, 1)
        step = _Scattered(
            step.groups, rows.positions, rows.num, rows.positions, self.length
        )
        return layer.mixer.paged(pages, step, layer.enter(x))

    def leave(self, index, pages, x, held, rows):
        return self.decoder.layers[index].leave(x, held, self.axis_name)


def walk_of(
    decoder: Decoder | HybridDecoder,
    envelopes: tuple[Envelope, ...],
    tables: tuple[GroupTable, ...],
    length: jax.Array,
    axis_name: str | None,
) -> Walk:
    """Return the walk of a decoder of either family."""
    kind = _Plain if isinstance(decoder, Decoder) else _Hybrid
    return kind(decoder, envelopes, tables, length, axis_name)
