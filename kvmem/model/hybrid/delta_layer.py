"""The gated delta net of a hybrid's layer: one state a sequence, updated in place.

The law of `kvmem.model.hybrid.mixing` holds; after a step the state stands after
exactly starts + num_new tokens.

Letters: S sequences, Q new tokens, W value heads of a rank, V elements of a value.
"""

import jax

from kvmem.model.hybrid.mixing import Caches, Kept, Mixing
from kvmem.model.hybrid.step import Step
from kvmem.model.mixers import gated_delta
from kvmem.model.ops import rms_norm

__all__ = ["DeltaLayer"]


class DeltaLayer(Mixing):
    """A gated delta net; `facts` is a `DeltaNet`."""

    def paged(
        self, pages: jax.Array, step: Step, x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Read the new tokens into the live states."""
        envelope, table = step.group(self.name)
        new = self._inputs(x), table, step.starts, step.num_new
        pages, out = gated_delta.mix(pages, envelope, self.name, *new)
        return pages, self._gated(x, out)

    def dense(self, x: jax.Array, caches: Caches, kept: Kept) -> jax.Array:
        """Read whole texts without a state."""
        dtypes = {field.name: field.dtype for field in caches[self.name].fields}
        conv_dtype = dtypes.get("conv_v", "float32")  # one tap keeps no tail
        return self._gated(x, gated_delta.dense(self._inputs(x), conv_dtype))

    def _inputs(self, x: jax.Array) -> gated_delta.Inputs:
        """Project the new tokens, and shape the convolutions by heads."""
        facts, made = self.facts, {}
        widths = {"q": facts.key_dim, "k": facts.key_dim, "v": facts.value_dim}
        for each, width in widths.items():
            made[each] = self.rows(f"{each}_proj", x).reshape(*x.shape[:2], -1, width)
            taps = self.weights[f"conv_{each}.weight"][...]
            made[f"conv_{each}"] = taps.reshape(-1, width, facts.conv_kernel)
        made["g"], made["beta"] = gated_delta.gates(
            self.rows("a_proj", x),
            self.rows("b_proj", x),
            self.weights["a_log"][...],
            self.weights["dt_bias"][...],
        )
        return gated_delta.Inputs(**made)

    def _gated(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """Norm each head [S, Q, W, V] and multiply by the gate."""
        gate = jax.nn.silu(self.rows("z_proj", x)).reshape(out.shape)
        out = rms_norm(out, self.weights["norm.weight"], self.eps) * gate
        return out.reshape(*x.shape[:2], -1)
