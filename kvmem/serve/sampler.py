"""The choice of tokens from logits: greedy, temperature, top-k, top-p,
log-probabilities.

The law: the token of a row depends on its logits, its parameters and its own key (seed,
sample, position), and on nothing else in the batch. Noise belongs to token ids, never
to ranks in a sorted list, so equal logits give equal choices however they are sorted.

    tokens = greedy(logits)                         # i32[S]
    tokens = sample(logits, pack_rows(rows, width=8))
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvmem.serve.request import MAX_LOGPROBS, SamplingParams

__all__ = [
    "RowKey",
    "Rows",
    "greedy",
    "has_nan",
    "log_probabilities",
    "pack_rows",
    "probabilities",
    "row_key",
    "sample",
    "take_rows",
]


class RowKey(NamedTuple):
    """What decides one row's choice: its parameters and where its token stands."""

    sampling: SamplingParams
    sample: int
    position: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Sampling parameters of a batch."""

    temperature: jax.Array  # f32[S] 0: greedy
    top_k: jax.Array  # i32[S] 0: all
    top_p: jax.Array  # f32[S]
    keys: jax.Array  # u32[S, 3] seed, sample, position


def pack_rows(rows: Sequence[RowKey], width: int) -> Rows:
    """Pack the rows of a batch, padded to `width` with greedy ones."""
    spare = RowKey(SamplingParams(), 0, 0)
    padded = [*rows, *[spare] * (width - len(rows))]
    asked = [row.sampling for row in padded]
    keys = [(row.sampling.seed, row.sample, row.position) for row in padded]
    return Rows(
        temperature=jnp.asarray([s.temperature for s in asked], jnp.float32),
        top_k=jnp.asarray([s.top_k for s in asked], jnp.int32),
        top_p=jnp.asarray([s.top_p for s in asked], jnp.float32),
        keys=jnp.asarray(np.asarray(keys, np.uint32)),
    )


def take_rows(logits: jax.Array, rows: np.ndarray, width: int) -> jax.Array:
    """Return f32[width, V]: the named rows of f32[..., V], then repeats of the first.

    Rows are counted through all axes but the last.
    """
    padded = np.zeros(width, np.int32)
    padded[: len(rows)] = rows
    return _take_rows(logits, padded)


@jax.jit
def greedy(logits: jax.Array) -> jax.Array:
    """Return i32[...], the most likely token of each row of f32[..., V]."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.jit
def has_nan(logits: jax.Array) -> jax.Array:
    """Return bool[...]: which rows of f32[..., V] hold NaN."""
    return jnp.isnan(logits.max(axis=-1))


@jax.jit
def sample(logits: jax.Array, rows: Rows) -> jax.Array:
    """Return i32[S], one token a row of f32[S, V] by its own parameters and key."""
    return jax.vmap(_sample_row)(logits, rows)


@jax.jit
def probabilities(logits: jax.Array, rows: Rows) -> jax.Array:
    """Return f32[S, n, V], what `sample` draws from: n places a row, its parameters.

    A greedy row has one token. A place with NaN among its logits is all NaN, since a
    cut by top-k would hide it.
    """

    def of_place(place: jax.Array, row: Rows) -> jax.Array:
        scaled = place / jnp.maximum(row.temperature, 1e-6)
        kept = jax.nn.softmax(jnp.where(_kept(scaled, row), scaled, -jnp.inf))
        only = jax.nn.one_hot(jnp.argmax(place), place.shape[0], dtype=kept.dtype)
        chosen = jnp.where(row.temperature > 0, kept, only)
        return jnp.where(jnp.isnan(place).any(), jnp.nan, chosen)

    return jax.vmap(jax.vmap(of_place, in_axes=(0, None)))(logits, rows)


def row_key(key: jax.Array, ahead: int | jax.Array = 0) -> jax.Array:
    """Return the random key of a token `ahead` of u32[3] seed, sample, position."""
    made = jax.random.fold_in(jax.random.key(key[0]), key[1])
    return jax.random.fold_in(made, key[2] + jnp.asarray(ahead, key.dtype))


@jax.jit
def log_probabilities(
    logits: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each token's log-probability and the most likely tokens beside it.

    Returns:
        f32[S], i32[S, MAX_LOGPROBS] most likely first, f32[S, MAX_LOGPROBS].
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    top, ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return chosen, ids.astype(jnp.int32), top


@jax.jit
def _take_rows(logits: jax.Array, rows: jax.Array) -> jax.Array:
    flat = logits.reshape(-1, logits.shape[-1])
    return jnp.take(flat, rows, axis=0, mode="clip")


def _sample_row(logits: jax.Array, row: Rows) -> jax.Array:
    """Draw one token of f32[V] by the Gumbel trick over the kept tokens."""
    scaled = logits / jnp.maximum(row.temperature, 1e-6)
    noise = jax.random.gumbel(row_key(row.keys), logits.shape, jnp.float32)
    drawn = jnp.argmax(jnp.where(_kept(scaled, row), scaled + noise, -jnp.inf))
    chosen = jnp.where(row.temperature > 0, drawn, jnp.argmax(logits))
    return chosen.astype(jnp.int32)


def _kept(scaled: jax.Array, row: Rows) -> jax.Array:
    """Mark the tokens that top-k and top-p leave, bool[V]; the likeliest stays."""
    order = jnp.argsort(-scaled, stable=True)
    likely = jax.nn.softmax(scaled[order])
    rank = jnp.arange(scaled.shape[0])
    within_k = (row.top_k == 0) | (rank < row.top_k)
    # Top-p counts over what top-k left, renormalised, as users of both expect.
    likely = jnp.where(within_k, likely, 0.0)
    before = jnp.cumsum(likely) - likely
    within_p = (before < row.top_p * likely.sum()) | (row.top_p >= 1)
    kept = within_k & (within_p | (rank == 0))
    return jnp.zeros(scaled.shape, bool).at[order].set(kept)
