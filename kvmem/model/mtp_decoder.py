"""Draft layers on one rank, flax nnx: a decoder that begins from two rows a token.

The law of `Decoder` holds, with the hidden rows of the tokens before as a further
input of each step.

    pages, logits, hidden = decoder.paged(pages, ..., num_features=1, hidden=rows)
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvmem.model.draft_decoder import DraftDecoder
from kvmem.model.mtp import MtpPartition
from kvmem.model.ops import linear, rms_norm

__all__ = ["MtpDecoder"]


class MtpDecoder(DraftDecoder):
    """One rank's draft layers."""

    def __init__(self, partition: MtpPartition, weights: Mapping[str, jax.Array]):
        super().__init__(partition, weights)
        self.fuse = nnx.Param(weights["fuse"])
        self.hidden_norm = nnx.Param(weights["hidden_norm"])
        self.embed_norm = nnx.Param(weights["embed_norm"])

    def enter(
        self, tokens: jax.Array, axis_name: str | None, hidden: jax.Array | None
    ) -> jax.Array:
        """Fuse the rows [S, Q, D] of the tokens before with the embeddings."""
        eps = self.partition.spec.norm_eps
        x = rms_norm(self.embedded(tokens, axis_name), self.embed_norm, eps)
        before = rms_norm(hidden, self.hidden_norm, eps)
        return linear(jnp.concatenate([before, x], axis=-1), self.fuse)
