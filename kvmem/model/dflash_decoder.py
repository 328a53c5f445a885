"""Block drafts on one rank, flax nnx: rows are kept, and blocks see them.

`keep` writes what each layer keeps of the model's rows; `propose` reads a last token
with masks behind it and writes nothing. `block_rows` and `block_logits` are both
without a cache, at many places of whole texts at once: what training needs. The laws: a
block on pages has the logits of `block_logits` at its place; a row that is not before
the block's first token is never seen, whatever lies there (on pages NaN included).

    pages, _ = decoder.paged(pages, ..., num_logits=0, hidden=rows)     # keep
    pages, logits = decoder.paged(pages, ..., num_logits=4)             # four proposed

Letters: S sequences, Q rows of the model, B tokens of a block (its first is known), J
slots of a table, H KV heads, G query heads a KV head, D hidden or head elements, V
vocabulary rows of a rank; N whole texts of T tokens, with A anchors each.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvmem.geometry import Envelope
from kvmem.model import merge
from kvmem.model.attention import read_rows, write_rows
from kvmem.model.branches import Branches
from kvmem.model.decoder import DecoderLayer
from kvmem.model.dflash import DFlashPartition
from kvmem.model.draft_decoder import DraftDecoder
from kvmem.model.merge import Share
from kvmem.model.ops import linear, rms_norm
from kvmem.model.rotate import angles
from kvmem.pool.table import GroupTable

__all__ = ["DFlashDecoder"]


class DFlashDecoder(DraftDecoder):
    """One rank's block draft."""

    def __init__(self, partition: DFlashPartition, weights: Mapping[str, jax.Array]):
        super().__init__(partition, weights)
        self.fuse = nnx.Param(weights["fuse"])
        self.hidden_norm = nnx.Param(weights["hidden_norm"])
        self.mask = nnx.Param(weights["mask"])

    def paged(
        self,
        pages: jax.Array,
        envelopes: tuple[Envelope, ...],
        tokens: jax.Array,
        starts: jax.Array,
        num_new: jax.Array,
        tables: tuple[GroupTable, ...],
        axis_name: str | None = None,
        num_logits: int = 1,
        num_features: int = 0,
        branches: Branches | None = None,
        hidden: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Keep the model's rows, or propose tokens behind those that are kept.

        Args:
            pages: u8[P, E], this rank's pages. Donate them where you jit.
            envelopes: what their bytes mean, of the draft's one group.
            tokens: i32[S, Q] of the rows to keep; i32[S, 1] the last token of each
                sequence, to propose.
            starts: i32[S] tokens whose rows are kept.
            num_new: i32[S] how many of the Q rows are real; 0: the row takes no part.
            tables: the physical pages of that group, kept whole by every token shard.
            axis_name: the mesh axis that sums over ranks; None: one rank.
            num_logits: tokens to propose behind the last one; not read with `hidden`.
            num_features: 0: a block has no rows to go on from.
            branches: None: a block is not a tree.
            hidden: f32[S, Q, D] the model's rows of the tokens, to keep; None: propose.

        Returns:
            The pages, and logits of the proposed tokens, f32[S, n, V] or of one token
            f32[S, V]; f32[S, 0] where rows were kept.
        """
        (envelope,), (table,) = envelopes, tables
        if hidden is not None:
            pages = self.keep(pages, envelope, table, hidden, starts, num_new)
            return pages, jnp.zeros((len(starts), 0), jnp.float32)
        logits = self.propose(
            pages, envelope, table, tokens[:, 0], starts, num_logits, axis_name
        )
        return pages, logits[:, 0] if num_logits == 1 else logits

    def keep(
        self,
        pages: jax.Array,
        envelope: Envelope,
        table: GroupTable,
        rows: jax.Array,
        starts: jax.Array,
        num_new: jax.Array,
    ) -> jax.Array:
        """Write the keys and values of rows f32[S, Q, D], behind `starts` of them."""
        places = starts[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
        for index, (k, v) in enumerate(self._context(rows, places)):
            name = f"{self.prefix}{index}"
            pages = write_rows(pages, envelope, name, k, v, table, starts, num_new)
        return pages

    def propose(
        self,
        pages: jax.Array,
        envelope: Envelope,
        table: GroupTable,
        last: jax.Array,
        starts: jax.Array,
        length: int,
        axis_name: str | None = None,
    ) -> jax.Array:
        """Return logits f32[S, length, V] behind the tokens `last` i32[S], which stand
        at `starts`: what lies there and behind is not read."""

        def kept(index: int, q: jax.Array) -> Share:
            name = f"{self.prefix}{index}"
            k, v = (read_rows(pages, envelope, name, f, table.pages) for f in "kv")
            sees = table.places(envelope.page_size) < starts[:, None]
            return _share(q, k, v, sees[:, None])

        rows = self._block(last, starts, length, kept, axis_name)
        return self.head(rows, axis_name)

    def block_logits(
        self,
        features: jax.Array,
        tokens: jax.Array,
        anchors: jax.Array,
        length: int,
        axis_name: str | None = None,
    ) -> jax.Array:
        """Return what blocks at many places of whole texts propose.

        Args: as of `block_rows`.

        Returns:
            f32[N, A, length, V], row j of an anchor that of the token j + 1 behind it.
        """
        rows = self.block_rows(features, tokens, anchors, length, axis_name)
        logits = self.head(rows.reshape(-1, *rows.shape[2:]), axis_name)
        return logits.reshape(*rows.shape[:3], -1)

    def block_rows(
        self,
        features: jax.Array,
        tokens: jax.Array,
        anchors: jax.Array,
        length: int,
        axis_name: str | None = None,
    ) -> jax.Array:
        """Return rows before the last norm of blocks at many places of whole texts.

        Args:
            features: f32[N, T, D] the model's rows before its last norm, finite up to
                the last anchor.
            tokens: i32[N, T] the texts.
            anchors: i32[N, A] places of blocks' first tokens, which are known. A block
                sees the rows of the tokens before, not that of its first.
            length: tokens proposed behind each anchor; they may reach beyond the text.
            axis_name: the mesh axis that sums over ranks; None: one rank.

        Returns:
            f32[N, A, length, D], row j of an anchor that of the token j + 1 behind it.
        """
        texts, count = anchors.shape
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        context = self._context(features, places[None])
        sees = places[None, None] < anchors[..., None]  # [N, A, T]
        sees = jnp.repeat(sees, length + 1, axis=1)  # of each token of each block

        def kept(index: int, q: jax.Array) -> Share:
            k, v = (rows.transpose(0, 2, 1, 3) for rows in context[index])
            share = _share(q.reshape(texts, -1, *q.shape[2:]), k, v, sees)
            return jax.tree.map(lambda rows: _parted(rows, count), share)

        last = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1)
        rows = self._block(last, anchors.reshape(-1), length, kept, axis_name)
        return rows.reshape(*anchors.shape, *rows.shape[1:])

    def _context(
        self, rows: jax.Array, places: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Return each layer's keys and values [S, Q, H, D] of the model's rows."""
        spec = self.partition.spec
        x = linear(rms_norm(rows, self.hidden_norm, spec.norm_eps), self.fuse)
        cos, sin = angles(spec.rope, spec.head_dim, places)
        return [layer.heads(x, cos, sin)[1:] for layer in self.layers]

    def _block(self, last, starts, length, kept, axis_name) -> jax.Array:
        """Return rows [S, length, D] of masks behind the tokens `last` i32[S].

        Args:
            kept: the share of the rows before a block, of a layer's queries.
        """
        spec = self.partition.spec
        first = self.embedded(last[:, None], axis_name)
        mask = self.mask[...].astype(first.dtype)[None, None]
        masks = jnp.broadcast_to(mask, (len(last), length, spec.hidden))
        x = jnp.concatenate([first, masks], axis=1)  # [S, B, D]
        places = starts[:, None] + jnp.arange(length + 1, dtype=jnp.int32)[None]
        cos, sin = angles(spec.rope, spec.head_dim, places)
        for index, layer in enumerate(self.layers):
            x = _through(layer, x, cos, sin, lambda q, at=index: kept(at, q), axis_name)
        return x[:, 1:]


def _through(layer: DecoderLayer, x, cos, sin, kept, axis_name) -> jax.Array:
    """Run one layer over a block x [S, B, D], which sees all of itself."""
    q, k, v = layer.heads(x, cos, sin)
    k, v = (rows.astype(jnp.float32).transpose(0, 2, 1, 3) for rows in (k, v))
    q = q.astype(jnp.float32)
    own = _share(q, k, v, jnp.ones((len(k), 1, k.shape[2]), bool))
    out = merge.finish(merge.merge([kept(q), own]))  # [S, H, B, G, D]
    out = out.transpose(0, 2, 1, 3, 4).reshape(*q.shape)
    return layer.mix(x, out, axis_name)


def _share(q: jax.Array, k: jax.Array, v: jax.Array, sees: jax.Array) -> Share:
    """Return the share of rows k and v f32[S, H, J, D] for queries [S, Q, H * G, D].

    Args:
        sees: bool[S, Q, J] or of one row for all queries. Rows that no query sees may
            hold anything.
    """
    seqs, queries, heads, width = q.shape
    grouped = q.reshape(seqs, queries, k.shape[1], heads // k.shape[1], width)
    grouped = grouped.transpose(0, 2, 1, 3, 4) * width**-0.5  # [S, H, Q, G, D]
    scores = jnp.einsum("shqgd,shtd->shqgt", grouped, k)
    scores = jnp.where(sees[:, None, :, None], scores, merge.MASKED)
    values = jnp.where(sees.any(axis=1)[:, None, :, None], v, 0.0)
    return merge.partial(scores, values, "shqgt,shtd->shqgd")


def _parted(rows: jax.Array, count: int) -> jax.Array:
    """Part the queries of texts [N, H, A * B, ...] into blocks [N * A, H, B, ...]."""
    rows = rows.reshape(*rows.shape[:2], count, -1, *rows.shape[3:])
    rows = jnp.moveaxis(rows, 2, 1)
    return rows.reshape(-1, *rows.shape[2:])
