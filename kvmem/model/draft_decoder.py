"""What the decoders of all draft layers share: the two ends, which are the target's.

A head over the whole vocabulary is most of what one draft layer computes, and nearly
all that a model says is a few thousand words; so a draft may have rows of the head for
some words alone (as FR-Spec has it, arXiv:2502.14856). The law: a token's embedding is
the row that the target's first layer reads of it, and a row's logits are those that the
target's head gives for it; of words that are never proposed they are -inf.

    class MyDecoder(DraftDecoder): ...
    x = decoder.embedded(tokens, axis_name)
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvmem.model.decoder import Decoder
from kvmem.model.draft_spec import DraftPartition
from kvmem.model.ops import embedded, first_id, linear, rms_norm

__all__ = ["DraftDecoder"]


class DraftDecoder(Decoder):
    """One rank's draft layers; its partition is a `DraftPartition`."""

    prefix = "draft."

    def __init__(self, partition: DraftPartition, weights: Mapping[str, jax.Array]):
        super().__init__(partition, weights)
        said = weights.get("said")
        self.said = None if said is None else nnx.Param(said)

    def embedded(self, tokens: jax.Array, axis_name: str | None) -> jax.Array:
        """Return the target's embeddings f32[S, Q, D] of tokens i32[S, Q]."""
        x = embedded(self.embed, tokens, axis_name)
        scale = self.partition.spec.embed_scale
        return x if scale == 1 else x * scale

    def leave(self, x: jax.Array) -> jax.Array:
        """Norm rows x [S, Q, D] as the target's last norm does."""
        spec = self.partition.spec
        return rms_norm(x, self.norm, spec.norm_eps, spec.zero_norm)

    def head(self, x: jax.Array, axis_name: str | None = None) -> jax.Array:
        """Return the rank's logits of x [S, Q, D]; of what is never said -inf."""
        if self.said is None:
            return super().head(x, axis_name)
        part = self.partition
        own = np.asarray(part.spec.words, np.int32) - first_id(part.vocab, axis_name)
        none = jnp.full((*x.shape[:2], part.vocab), -jnp.inf, jnp.float32)
        said = linear(self.leave(x), self.said)
        return none.at[..., own].set(
            said,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
            wrap_negative_indices=False,
        )
