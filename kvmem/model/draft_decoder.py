"""What the decoders of all draft layers share: the two ends, which are the target's.

The law: a token's embedding is the row that the target's first layer reads of it, and a
row's logits are those that the target's head gives for it.

    class MyDecoder(DraftDecoder): ...
    x = decoder.embedded(tokens, axis_name)
"""

import jax

from kvmem.model.decoder import Decoder
from kvmem.model.ops import embedded, rms_norm

__all__ = ["DraftDecoder"]


class DraftDecoder(Decoder):
    """One rank's draft layers; its partition is a `DraftPartition`."""

    prefix = "draft."

    def embedded(self, tokens: jax.Array, axis_name: str | None) -> jax.Array:
        """Return the target's embeddings f32[S, Q, D] of tokens i32[S, Q]."""
        x = embedded(self.embed, tokens, axis_name)
        scale = self.partition.spec.embed_scale
        return x if scale == 1 else x * scale

    def leave(self, x: jax.Array) -> jax.Array:
        """Norm rows x [S, Q, D] as the target's last norm does."""
        spec = self.partition.spec
        return rms_norm(x, self.norm, spec.norm_eps, spec.zero_norm)
