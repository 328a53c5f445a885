"""A decoder of the Llama family: RMSNorm, rope, grouped heads, SwiGLU, flax nnx.

One `Decoder` holds one rank's weights. Its layers are unrolled and each weight is an
array of its own, because a scan over stacked weights copies them at every step on CPU.
The law: `paged`, in any chunks and batches, gives the logits of `dense`, which keeps no
cache; and with `axis_name` the ranks together give those of a single one.

    decoder = Decoder.from_params(spec, params)
    pages, logits = decoder.paged(pages, envelopes, tokens, starts, num_new, tables)

Letters: S sequences, Q new tokens, D hidden, H heads, V vocabulary rows of a rank.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvmem.geometry import Envelope, Topology
from kvmem.model.attention import attend_written, write_rows
from kvmem.model.branches import Branches
from kvmem.model.ops import (
    Split,
    answers,
    at_last,
    embedded,
    linear,
    logits,
    of_layer,
    rms_norm,
    sum_ranks,
)
from kvmem.model.partition import Partition
from kvmem.model.rotate import angles, rotate
from kvmem.model.spec import ModelSpec
from kvmem.pool.table import GroupTable

__all__ = ["Decoder", "DecoderLayer"]


class DecoderLayer(nnx.Module):
    """One layer's weights on one rank, and its two halves."""

    def __init__(self, partition: Partition, weights: Mapping[str, jax.Array]):
        self.partition = partition
        self.input_norm = nnx.Param(weights["input_norm"])
        self.qkv = Split(weights["qkv"])
        self.out = Split(weights["out"])
        self.post_norm = nnx.Param(weights["post_norm"])
        self.gate_up = Split(weights["gate_up"])
        self.down = Split(weights["down"])
        spec = partition.spec
        self.qkv_bias = Split(weights["qkv_bias"]) if spec.qkv_bias else None
        self.q_norm = nnx.Param(weights["q_norm"]) if spec.qk_norm else None
        self.k_norm = nnx.Param(weights["k_norm"]) if spec.qk_norm else None

    def heads(self, x, cos, sin):
        """Project x [S, Q, D] to rotated q and k and plain v, each [S, Q, H, Dh]."""
        part, spec = self.partition, self.partition.spec
        rows = linear(rms_norm(x, self.input_norm, spec.norm_eps), self.qkv)
        if self.qkv_bias is not None:
            rows = rows + self.qkv_bias[...].astype(rows.dtype)[None, None]
        rows = rows.reshape(*x.shape[:2], -1, spec.head_dim)
        cuts = (part.q_heads, part.q_heads + part.kv_heads)
        q, k, v = jnp.split(rows, cuts, axis=2)
        if self.q_norm is not None:
            q = rms_norm(q, self.q_norm, spec.norm_eps)
            k = rms_norm(k, self.k_norm, spec.norm_eps)
        return rotate(q, cos, sin, spec.rope), rotate(k, cos, sin, spec.rope), v

    def mix(self, x, attended, axis_name):
        """Add the attention's output and the MLP to the residual stream x."""
        flat = attended.reshape(*attended.shape[:2], -1)
        x = x + sum_ranks(linear(flat, self.out), axis_name)
        hidden = rms_norm(x, self.post_norm, self.partition.spec.norm_eps)
        gate, up = jnp.split(linear(hidden, self.gate_up), 2, axis=-1)
        return x + sum_ranks(linear(jax.nn.silu(gate) * up, self.down), axis_name)


class Decoder(nnx.Module):
    """One rank's decoder; see `kvmem.model.parallel` for all ranks together."""

    prefix = "layers."  # of its layers' names in an envelope

    def __init__(self, partition: Partition, weights: Mapping[str, jax.Array]):
        spec = partition.spec
        self.partition = partition
        self.embed = Split(weights["embed"])
        self.layers = nnx.List(
            DecoderLayer(partition, of_layer(weights, f"layers.{index}."))
            for index in range(spec.layers)
        )
        self.norm = nnx.Param(weights["norm"])
        self.lm_head = None if spec.tie_embeddings else Split(weights["lm_head"])

    @classmethod
    def from_params(
        cls,
        spec: ModelSpec,
        params: Mapping[str, np.ndarray],
        topology: Topology | None = None,
        rank: int = 0,
        dtype: str = "float32",
    ) -> "Decoder":
        """Cut one rank's decoder out of a whole model's tensors.

        Args:
            spec: the model's facts.
            params: the tensors of `spec.parameters()`, as a loader returns them.
            topology: ranks; None: one.
            rank: whose share.
            dtype: of the weights and of the products' inputs; sums are float32.

        Raises:
            IncompatiblePlan: heads that the topology cannot divide or replicate.
        """
        partition = Partition(spec, topology or Topology())
        own = partition.rank_params(params, rank)
        return cls(partition, {k: jnp.asarray(w, dtype) for k, w in own.items()})

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
        """Read new tokens after those in the pages; logits of the last ones of each.

        Donate `pages` where you jit: they are updated in place.

        Args:
            pages: u8[P, E], this rank's pages.
            envelopes: what their bytes mean, of the model's one group.
            tokens: i32[S, Q] new token ids, padded.
            starts: i32[S] tokens already in the pages.
            num_new: i32[S] how many of the Q are real; 0: the row takes no part.
            tables: the physical pages of that group.
            axis_name: the mesh axis that sums over ranks; None: one rank.
            num_logits: of how many of the last new tokens, n; row n - 1 is that of
                token num_new - 1. Where fewer are new, rows of token 0 stand in front.
                0, without features: the tokens are written, and f32[S, 0] comes back.
            num_features: of how many of them the rows before the last norm are
                returned too, m; 0: of none.
            branches: where new tokens stand that do not follow each other; None: they
                do.
            hidden: f32[S, Q, D] rows of the tokens before, which draft layers read.

        Returns:
            The pages, and f32[S, n, V] logits, this rank's rows of the vocabulary; of
            one token f32[S, V]. With features f32[S, m, D] after them.
        """
        spec = self.partition.spec
        (envelope,), (table,) = envelopes, tables
        x = self.enter(tokens, axis_name, hidden)
        places = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = places if branches is None else branches.positions
        gaps = branches and (branches.gap_firsts, branches.gap_ends)
        cos, sin = angles(spec.rope, spec.head_dim, positions)
        lengths, asked = starts + num_new, max(num_logits, num_features)
        for index, layer in enumerate(self.layers):
            name = f"{self.prefix}{index}"
            q, k, v = layer.heads(x, cos, sin)
            pages = write_rows(pages, envelope, name, k, v, table, starts, num_new)
            if index == spec.layers - 1:  # only the last tokens are asked for
                if not asked:
                    return pages, jnp.zeros((len(starts), 0), jnp.float32)
                x, q, places, gaps = jax.tree.map(
                    lambda rows: at_last(rows, num_new, asked), (x, q, places, gaps)
                )
            seen = attend_written(
                pages, envelope, name, q, places, table, lengths, gaps=gaps
            )
            x = layer.mix(x, seen, axis_name)
        rows = self.head(x[:, asked - num_logits :], axis_name)
        return pages, *answers(rows, x, num_features)

    def enter(
        self, tokens: jax.Array, axis_name: str | None, hidden: jax.Array | None
    ) -> jax.Array:
        """Return the rows [S, Q, D] that the first layer reads."""
        return embedded(self.embed, tokens, axis_name)

    def dense(self, tokens: jax.Array, axis_name: str | None = None) -> jax.Array:
        """Read whole texts i32[S, Q] without a cache; f32[S, Q, V] logits of all."""
        return self.head(self.rows(tokens, axis_name), axis_name)

    def rows(
        self,
        tokens: jax.Array,
        axis_name: str | None = None,
        hidden: jax.Array | None = None,
    ) -> jax.Array:
        """Return rows f32[S, Q, D] of whole texts i32[S, Q] before the last norm.

        Args:
            hidden: f32[S, Q, D] rows of the tokens before, which draft layers read.
        """
        spec = self.partition.spec
        x = self.enter(tokens, axis_name, hidden)
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        cos, sin = angles(spec.rope, spec.head_dim, places[None])
        for layer in self.layers:
            q, k, v = layer.heads(x, cos, sin)
            x = layer.mix(
                x, jax.nn.dot_product_attention(q, k, v, is_causal=True), axis_name
            )
        return x

    def leave(self, x: jax.Array) -> jax.Array:
        """Norm the rows x [S, Q, D] that the head reads."""
        return rms_norm(x, self.norm, self.partition.spec.norm_eps)

    def head(self, x: jax.Array, axis_name: str | None = None) -> jax.Array:
        """Return the rank's logits of x [S, Q, D], padded rows -inf."""
        part, x = self.partition, self.leave(x)
        head = self.embed if self.lm_head is None else self.lm_head
        padded = any(padding.name == "vocab" for padding in part.paddings)
        return logits(x, head, part.spec.vocab, padded, axis_name)
