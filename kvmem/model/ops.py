"""Norms, products, sums over ranks, and the two ends of a decoder.

The law: products take few rows or many and give float32; what ranks hold in parts is
summed by the axis that the caller names, and one rank alone sums nothing.

    x = embedded(decoder.embed, tokens, axis_name)
    x = x + sum_ranks(linear(rms_norm(x, layer.norm, 1e-6), layer.down), axis_name)
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

__all__ = [
    "Split",
    "answers",
    "at_last",
    "embedded",
    "first_id",
    "linear",
    "logits",
    "of_layer",
    "rms_norm",
    "sum_ranks",
]

# XLA's CPU products of few rows run up to twice as fast with the weight on the left.
_FEW_ROWS = 64


class Split(nnx.Param):
    """A parameter of which each rank holds its own part."""


def embedded(embed: nnx.Param, tokens: jax.Array, axis_name: str | None) -> jax.Array:
    """Look token ids up in the rank's rows of the vocabulary; sum over ranks."""
    rows = embed[...]
    own = tokens - first_id(rows.shape[0], axis_name)
    found = rows.at[own].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return sum_ranks(found.astype(jnp.float32), axis_name)


def logits(
    x: jax.Array, head: nnx.Param, vocab: int, padded: bool, axis_name: str | None
) -> jax.Array:
    """Return the rank's logits of normed x [S, Q, D].

    Args:
        head: the rank's rows of the vocabulary.
        vocab: token ids of the model; rows behind them are -inf.
        padded: whether there are any such rows, on any rank.
    """
    out = linear(x, head)
    if not padded:
        return out
    count = head[...].shape[0]
    ids = first_id(count, axis_name) + jnp.arange(count, dtype=jnp.int32)
    return jnp.where((ids < vocab)[None, None], out, -jnp.inf)


def rms_norm(
    x: jax.Array, weight: nnx.Param, eps: float, around_zero: bool = False
) -> jax.Array:
    """Scale rows to unit mean square, in float32, then by `weight`.

    Args:
        around_zero: the weight is what the scale adds to one (Gemma, Qwen3-Next).
    """
    x = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    weight = weight[...].astype(jnp.float32)
    weight = 1.0 + weight if around_zero else weight
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def linear(x: jax.Array, weight: nnx.Param) -> jax.Array:
    """Multiply rows x [S, Q, K] by a weight [N, K]; float32 out.

    Few rows are multiplied with the weight on the left. XLA would fold the transpose
    back into the product; the barrier keeps it apart.
    """
    w = weight[...]
    rows = x.reshape(-1, x.shape[-1]).astype(w.dtype)
    if rows.shape[0] > _FEW_ROWS:
        out = _product(rows, w)
    else:
        out = lax.optimization_barrier(_product(w, rows)).T
    return out.reshape(*x.shape[:-1], -1)


def at_last(rows: jax.Array, num_new: jax.Array, count: int = 1) -> jax.Array:
    """Take the last `count` of num_new rows: [S, Q, ...] to [S, count, ...].

    Where there are fewer, row 0 stands in front of them.
    """
    ahead = jnp.arange(-count, 0, dtype=jnp.int32)[None]
    last = jnp.maximum(num_new[:, None] + ahead, 0)
    return jnp.take_along_axis(
        rows, last.reshape(last.shape + (1,) * (rows.ndim - 2)), axis=1
    )


def answers(
    logits: jax.Array, x: jax.Array, num_features: int
) -> tuple[jax.Array, ...]:
    """Return what a step answers: logits [S, n, V] (n = 1: [S, V]), then features.

    Args:
        x: rows [S, m, D] before the last norm, m >= num_features.
        num_features: of how many of them; 0: of none.
    """
    logits = logits[:, 0] if logits.shape[1] == 1 else logits
    return (logits, x[:, -num_features:]) if num_features else (logits,)


def sum_ranks(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Sum what the ranks along an axis computed in parts."""
    return x if axis_name is None else lax.psum(x, axis_name)


def of_layer(weights: Mapping[str, jax.Array], prefix: str) -> dict[str, jax.Array]:
    """Return the weights whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in weights.items()
        if name.startswith(prefix)
    }


def first_id(count: int, axis_name: str | None) -> jax.Array | int:
    """Return the first token id of a rank that has `count` rows of the vocabulary."""
    return 0 if axis_name is None else lax.axis_index(axis_name) * count


def _product(a, b):
    """Contract the last axes of a [N, K] and b [M, K] to f32[N, M]."""
    axes = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
