"""Latent attention of a hybrid's layer: one row a token, of which some are selected.

The index keys stand in a group of their own; both are written before either is read.
The published model turns index queries and keys by a Hadamard matrix before it rounds
them to fp8; scores of unrounded rows are the same without, and none is used here. The
law of `kvmem.model.hybrid.mixing` holds.

Letters: S sequences, Q new tokens, G heads of a rank, I index heads, D index elements.
"""

import jax
import jax.numpy as jnp

from kvmem.model.hybrid.mixing import Caches, Kept, Mixing, places
from kvmem.model.hybrid.step import Step, as_kept
from kvmem.model.mixers import indexer, latent
from kvmem.model.rotate import angles, rotate

__all__ = ["LatentLayer"]


class LatentLayer(Mixing):
    """Latent attention; `facts` is a `Latent`."""

    @property
    def index_name(self) -> str:
        """The layer of the index keys."""
        return self.facts.index_name(self.name)

    def paged(
        self, pages: jax.Array, step: Step, x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new rows and index keys, select, then attend to the selected."""
        envelope, table = step.group(self.name)
        compressed = self._compressed(x)
        latents, ropes = self._new_rows(x, step.positions)
        new = latents, ropes, table, step.starts, step.num_new
        pages = latent.write_rows(pages, envelope, self.name, *new)
        pages, selected = self._select_paged(pages, step, x, compressed)
        seen = latent.attend_written(
            pages,
            envelope,
            self.name,
            self._queries(compressed, step.positions),
            table,
            step.lengths,
            self.facts.scale,
            selected=selected,
        )
        return pages, seen.reshape(*x.shape[:2], -1)

    def dense(self, x: jax.Array, caches: Caches, kept: Kept) -> jax.Array:
        """Attend over whole texts; every head's keys and values are made."""
        positions, compressed = places(x), self._compressed(x)
        latents, ropes = self._new_rows(x, positions)
        cache = caches[self.name]
        rope_field = "rope" if len(cache.fields) > 1 else "latent"
        seen = latent.dense(
            self._queries(compressed, positions),
            as_kept(latents, cache, "latent"),
            as_kept(ropes, cache, rope_field),
            self.facts.scale,
            selected=self._select_dense(x, compressed, caches),
        )
        return seen.reshape(*x.shape[:2], -1)

    def _select_paged(
        self, pages: jax.Array, step: Step, x: jax.Array, compressed: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Write the new index keys; return the pages and each query's selection."""
        if self.facts.indexer is None:
            return pages, None
        envelope, table = step.group(self.index_name)
        q, weights, keys = self._index(x, compressed, step.positions)
        new = keys, table, step.starts, step.num_new
        pages = indexer.write_keys(pages, envelope, self.index_name, *new)
        asked = q, weights, table, step.lengths
        scored = indexer.scores(pages, envelope, self.index_name, *asked)
        scored, at = indexer.of_all_ranks(scored, table, envelope.page_size)
        top_k = self.facts.indexer.top_k
        return pages, indexer.select(scored, at, step.positions, step.lengths, top_k)

    def _select_dense(
        self, x: jax.Array, compressed: jax.Array, caches: Caches
    ) -> jax.Array | None:
        """Return each query's selection among the tokens of whole texts."""
        if self.facts.indexer is None:
            return None
        positions = places(x)
        q, weights, keys = self._index(x, compressed, positions)
        keys = as_kept(keys, caches[self.index_name], "key")
        scored = indexer.dense_scores(q, weights, keys)
        lengths = jnp.full(x.shape[0], x.shape[1], jnp.int32)
        top_k = self.facts.indexer.top_k
        return indexer.select(scored, positions, positions, lengths, top_k)

    def _compressed(self, x: jax.Array) -> jax.Array:
        """Return the compressed query, [S, Q, q_rank]."""
        return self.normed("q_a_layernorm", self.rows("q_a_proj", x))

    def _queries(self, compressed: jax.Array, positions: jax.Array) -> latent.Queries:
        """Return the queries of the rank's heads, and their matrices."""
        facts, lead = self.facts, compressed.shape[:2]
        q = self.rows("q_b_proj", compressed)
        q = q.reshape(*lead, -1, facts.nope_dim + facts.rope_dim)
        cos, sin = angles(facts.rope, facts.rope_dim, positions)
        up = self.weights["kv_b_proj.weight"][...]
        up = up.reshape(-1, facts.nope_dim + facts.v_dim, facts.rank)
        return latent.Queries(
            nope=q[..., : facts.nope_dim],
            rope=rotate(q[..., facts.nope_dim :], cos, sin, facts.rope),
            positions=positions,
            w_uk=up[:, : facts.nope_dim],
            w_uv=up[:, facts.nope_dim :],
        )

    def _new_rows(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the latents and the rotated shared keys of new tokens."""
        facts = self.facts
        row = self.rows("kv_a_proj", x)
        latents = self.normed("kv_a_layernorm", row[..., : facts.rank])
        cos, sin = angles(facts.rope, facts.rope_dim, positions)
        shared = rotate(row[:, :, None, facts.rank :], cos, sin, facts.rope)
        return latents, shared[:, :, 0]

    def _index(
        self, x: jax.Array, compressed: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return index queries [S, Q, I, D], weights [S, Q, I] and keys [S, Q, D]."""
        facts = self.facts.indexer
        cos, sin = angles(facts.rope, facts.dim, positions)
        q = self.rows("indexer.wq_b", compressed)
        q = rotate(q.reshape(*x.shape[:2], -1, facts.dim), cos, sin, facts.rope)
        keys = self._layer_norm("indexer.k_norm", self.rows("indexer.wk", x))
        keys = rotate(keys[:, :, None], cos, sin, facts.rope)[:, :, 0]
        scale = (facts.heads * facts.dim) ** -0.5
        return q, self.rows("indexer.weights_proj", x) * scale, keys

    def _layer_norm(self, name: str, rows: jax.Array) -> jax.Array:
        """Scale rows to mean zero and unit variance; by a weight and a bias."""
        weight, bias = (self.weights[f"{name}.{each}"] for each in ("weight", "bias"))
        weight, bias = (w[...].astype(rows.dtype)[None, None] for w in (weight, bias))
        return jax.nn.standardize(rows, axis=-1, epsilon=self.eps) * weight + bias
