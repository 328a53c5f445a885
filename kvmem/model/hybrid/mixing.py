"""What the modules of all mixers share: their weights, and two ways to read tokens.

A module is one layer's mixer on one rank. `paged` reads new tokens over the pages of
its group, `dense` whole texts without a cache. The law: both give the same rows
[S, Q, heads * D], for any cut of a text into steps; `output` multiplies them, and ranks
are summed by its axis.

    pages, rows = module.paged(pages, step, x)
    x = x + module.output(rows, axis_name)
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvmem.geometry import LayerSpec
from kvmem.model.hybrid.step import Step
from kvmem.model.ops import linear, rms_norm, sum_ranks

__all__ = ["Caches", "Kept", "Mixing", "places"]

Caches = dict[str, LayerSpec]
"""What each layer keeps, by name: a dense pass rounds as the pages would."""

Kept = dict[str, tuple[jax.Array, jax.Array]]
"""Keys and values of a dense pass by layer, for the layers that share them."""


class Mixing(nnx.Module):
    """A mixer's weights on one rank.

    Args:
        facts: the mixer.
        name: of the layer in its envelope.
        eps: what a norm adds to the mean square.
        around_zero: norms' weights are what they add to one.
        weights: of the mixer alone, by their names in it.
    """

    def __init__(
        self,
        facts: Any,
        name: str,
        eps: float,
        around_zero: bool,
        weights: dict[str, nnx.Param],
    ):
        self.facts, self.name, self.eps = facts, name, eps
        self.around_zero = around_zero
        self.weights = nnx.Dict(weights)

    def paged(
        self, pages: jax.Array, step: Step, x: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Read new tokens x [S, Q, hidden] over the pages; donate `pages`."""
        raise NotImplementedError

    def dense(self, x: jax.Array, caches: Caches, kept: Kept) -> jax.Array:
        """Read whole texts x [S, Q, hidden], rounding what a cache would keep."""
        raise NotImplementedError

    def output(self, rows: jax.Array, axis_name: str | None) -> jax.Array:
        """Multiply by the output projection, sum over ranks, add its bias."""
        out = sum_ranks(linear(rows, self.weights["o_proj.weight"]), axis_name)
        bias = self.weights.get("o_proj.bias")
        return out if bias is None else out + bias[...].astype(out.dtype)[None, None]

    def rows(self, name: str, x: jax.Array) -> jax.Array:
        """Multiply by a projection and add its bias, if it has one."""
        out = linear(x, self.weights[f"{name}.weight"])
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias[...].astype(out.dtype)[None, None]

    def normed(self, name: str, rows: jax.Array) -> jax.Array:
        """Norm rows by the weight of one of the mixer's norms."""
        return rms_norm(
            rows, self.weights[f"{name}.weight"], self.eps, self.around_zero
        )


def places(x: jax.Array) -> jax.Array:
    """Return i32[S, Q]: the positions of whole texts."""
    seqs, length = x.shape[:2]
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (seqs, length))
