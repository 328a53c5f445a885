"""A decoder whose layers differ, flax nnx: mixers over pages of several groups.

One `HybridDecoder` holds one rank's weights; MLPs are dense. The law: `paged`, in any
chunks and batches, gives the logits of `dense`, which keeps no cache; with `axis_name`
the ranks together give those of a single one.

    decoder = HybridDecoder.from_params(spec, params)
    pages, logits = decoder.paged(pages, envelopes, tokens, starts, num_new, tables)

Letters: S sequences, Q new tokens, D hidden, V vocabulary rows of a rank.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvmem.geometry import Envelope, Topology
from kvmem.model.hybrid.attention_layer import AttentionLayer
from kvmem.model.hybrid.delta_layer import DeltaLayer
from kvmem.model.hybrid.latent_layer import LatentLayer
from kvmem.model.hybrid.mixers import Attention, DeltaNet, Latent
from kvmem.model.hybrid.mixing import Mixing
from kvmem.model.hybrid.partition import HybridPartition
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.model.hybrid.step import Step
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
from kvmem.pool.table import GroupTable

__all__ = ["HybridDecoder", "HybridLayer"]

_MODULES = {Attention: AttentionLayer, Latent: LatentLayer, DeltaNet: DeltaLayer}
_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}  # gelu by tanh


class HybridLayer(nnx.Module):
    """One layer on one rank: its mixer, its MLP, and the norms around them."""

    def __init__(self, spec: HybridSpec, index: int, weights: dict[str, nnx.Param]):
        self.family = spec.family
        mixer = spec.mixers[index]
        self.mixer: Mixing = _MODULES[type(mixer)](
            mixer,
            f"layers.{index}",
            spec.norm_eps,
            spec.family.zero_norms,
            of_layer(weights, "mixer."),
        )
        self.norms = nnx.Dict({k: w for k, w in weights.items() if "layernorm" in k})
        self.gate, self.up, self.down = (
            weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )

    def enter(self, x: jax.Array) -> jax.Array:
        """Norm the residual stream x [S, Q, D] for the mixer."""
        return self._normed("input", x)

    def leave(self, x: jax.Array, mixed: jax.Array, axis_name: str | None) -> jax.Array:
        """Add the mixer's rows [S, Q, heads * D] and the MLP to the stream x."""
        mixed = self.mixer.output(mixed, axis_name)
        if not self.family.sandwich_norms:
            x = x + mixed
            return x + self._mlp(self._normed("post_attention", x), axis_name)
        x = x + self._normed("post_attention", mixed)
        added = self._mlp(self._normed("pre_feedforward", x), axis_name)
        return x + self._normed("post_feedforward", added)

    def _mlp(self, x: jax.Array, axis_name: str | None) -> jax.Array:
        act = _ACTIVATIONS[self.family.activation]
        inner = act(linear(x, self.gate)) * linear(x, self.up)
        return sum_ranks(linear(inner, self.down), axis_name)

    def _normed(self, name: str, x: jax.Array) -> jax.Array:
        weight = self.norms[f"{name}_layernorm.weight"]
        return rms_norm(x, weight, self.family.rms_norm_eps, self.family.zero_norms)


class HybridDecoder(nnx.Module):
    """One rank's decoder; see `kvmem.model.parallel` for all ranks together."""

    def __init__(self, partition: HybridPartition, weights: Mapping[str, jax.Array]):
        spec = partition.spec
        held = {
            name: (Split if partition.is_split(name) else nnx.Param)(array)
            for name, array in weights.items()
        }
        self.partition = partition
        self.embed = held["model.embed_tokens.weight"]
        self.layers = nnx.List(
            HybridLayer(spec, index, of_layer(held, f"model.layers.{index}."))
            for index in range(len(spec.mixers))
        )
        self.norm = held["model.norm.weight"]
        self.lm_head = held.get("lm_head.weight")

    @classmethod
    def from_params(
        cls,
        spec: HybridSpec,
        params: Mapping[str, np.ndarray],
        topology: Topology | None = None,
        rank: int = 0,
        dtype: str = "float32",
    ) -> "HybridDecoder":
        """Cut one rank's decoder out of a whole model's tensors.

        Args:
            spec: the model's facts.
            params: the tensors of `spec.parameters()`.
            topology: ranks; None: one.
            rank: whose share.
            dtype: of the weights and of the products' inputs; sums are float32.

        Raises:
            IncompatiblePlan: heads that the topology cannot divide or replicate.
        """
        partition = HybridPartition(spec, topology or Topology())
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
    ) -> tuple[jax.Array, ...]:
        """Read new tokens after those in the pages; logits of the last ones of each.

        Donate `pages` where you jit: they are updated in place.

        Args:
            pages: u8[P, E], this rank's pages.
            envelopes: what their bytes mean in each group, cut to E.
            tokens: i32[S, Q] new token ids, padded.
            starts: i32[S] tokens already in the pages.
            num_new: i32[S] how many of the Q are real; 0: the row takes no part.
            tables: the physical pages of each group, in the order of groups.
            axis_name: the mesh axis that sums over ranks; None: one rank.
            num_logits: of how many of the last new tokens, n; row n - 1 is that of
                token num_new - 1. Where fewer are new, rows of token 0 stand in front.
            num_features: of how many of them the rows before the last norm are
                returned too, m; 0: of none.

        Returns:
            The pages, and f32[S, n, V] logits, this rank's rows of the vocabulary; of
            one token f32[S, V]. With features f32[S, m, D] after them.
        """
        step = Step.of(envelopes, tables, starts, num_new, tokens.shape[1])
        x = self._embedded(tokens, axis_name)
        for layer in self.layers:
            pages, mixed = layer.mixer.paged(pages, step, layer.enter(x))
            x = layer.leave(x, mixed, axis_name)
        asked = max(num_logits, num_features)
        x = at_last(x, num_new, asked)
        rows = self._logits(x[:, asked - num_logits :], axis_name)
        return pages, *answers(rows, x, num_features)

    def dense(
        self,
        tokens: jax.Array,
        axis_name: str | None = None,
        kv_dtype: str = "float32",
    ) -> jax.Array:
        """Read whole texts i32[S, Q] without a cache; f32[S, Q, V] logits of all.

        Args: as of `rows`.
        """
        return self._logits(self.rows(tokens, axis_name, kv_dtype), axis_name)

    def rows(
        self,
        tokens: jax.Array,
        axis_name: str | None = None,
        kv_dtype: str = "float32",
    ) -> jax.Array:
        """Return rows f32[S, Q, D] of whole texts i32[S, Q] before the last norm.

        Args:
            tokens: token ids.
            axis_name: as in `paged`.
            kv_dtype: what a cache of this dtype would keep is rounded to it.
        """
        caches = {each.name: each for each in self._spec.layer_specs(kv_dtype)}
        x, kept = self._embedded(tokens, axis_name), {}
        for layer in self.layers:
            mixed = layer.mixer.dense(layer.enter(x), caches, kept)
            x = layer.leave(x, mixed, axis_name)
        return x

    @property
    def _spec(self) -> HybridSpec:
        return self.partition.spec

    def _embedded(self, tokens: jax.Array, axis_name: str | None) -> jax.Array:
        x = embedded(self.embed, tokens, axis_name)
        return x * self._spec.hidden**0.5 if self._spec.family.scaled_embeddings else x

    def _logits(self, x: jax.Array, axis_name: str | None) -> jax.Array:
        """Return the rank's logits of x [S, Q, D], padded rows -inf."""
        spec = self._spec
        x = rms_norm(x, self.norm, spec.norm_eps, spec.family.zero_norms)
        head = self.embed if self.lm_head is None else self.lm_head
        padded = any(padding.name == "vocab" for padding in self.partition.paddings)
        return logits(x, head, spec.vocab, padded, axis_name)
