"""Acceptance: how many drafted tokens stand, and which token follows them.

The law: what is emitted is distributed as the target alone would have it. A drafted
token x is accepted with probability min(1, p(x) / q(x)), p the target's and q the
draft's; at the first that is not, a token of max(0, p - q) takes its place, and behind
a draft that stands whole one of p follows (speculative sampling: Leviathan et al.,
2023; Chen et al., 2023). A draft that names one token without probabilities has q = 1
there. Greedy rows accept what equals the target's choice.

A row whose probabilities are NaN, or sum to something else than one, is a fault and
never an accept rate of one: nothing is accepted, and its next token is V, no token.

    found = accept_sampled(target, draft, draft_ids, num_drafted, rows.keys)
    found.num_accepted, found.next_ids, found.faults

S sequences, k drafted tokens of a row at most, V tokens of the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvmem.serve import sampler

__all__ = ["Accepted", "accept_greedy", "accept_sampled", "is_distribution", "nan_rows"]

_SUM_ERROR = 1e-3  # of float32 probabilities over a large vocabulary
_JUDGED, _REPLACED = 1, 2  # what a key is drawn for, beside the sampler's own use of it


class Accepted(NamedTuple):
    """What one verification found, a row a sequence."""

    num_accepted: jax.Array  # i32[S] drafted tokens that stand
    next_ids: jax.Array  # i32[S] the token behind them; V where the row is a fault
    faults: jax.Array  # bool[S] rows with probabilities that are none


@jax.jit
def accept_greedy(
    target_ids: jax.Array, draft_ids: jax.Array, num_drafted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accept the drafted tokens that the target chose too, up to the first other one.

    Ids of NaN logits look like any; ask `nan_rows` for target and draft.

    Args:
        target_ids: i32[S, k + 1], the target's choice for each place.
        draft_ids: i32[S, k].
        num_drafted: i32[S], how many of them were drafted; the others are padding.

    Returns:
        i32[S] accepted tokens, i32[S] the target's choice behind them.
    """
    places = jnp.arange(draft_ids.shape[1])[None]
    equal = target_ids[:, :-1] == draft_ids
    taken = _leading(equal & (places < num_drafted[:, None]))
    return taken, jnp.take_along_axis(target_ids, taken[:, None], axis=1)[:, 0]


@jax.jit
def accept_sampled(
    target_probs: jax.Array,
    draft_probs: jax.Array | None,
    draft_ids: jax.Array,
    num_drafted: jax.Array,
    keys: jax.Array,
) -> Accepted:
    """Accept by exact rejection sampling; `sampler.probabilities` makes the arguments.

    The draws that judge and replace have keys of their own, so a draft may draw with
    the sampler's. A row without drafts draws what `sampler.sample` would.

    Args:
        target_probs: f32[S, k + 1, V].
        draft_probs: f32[S, k, V], what each drafted token was drawn from; None where
            it was named without chance.
        draft_ids: i32[S, k].
        num_drafted: i32[S], how many of them were drafted; the others are padding.
        keys: u32[S, 3] seed, sample and position of the first drafted token.
    """
    if draft_probs is None:
        vocab = target_probs.shape[-1]
        draft_probs = jax.nn.one_hot(draft_ids, vocab, dtype=target_probs.dtype)
    return jax.vmap(_accept_row)(
        target_probs, draft_probs, draft_ids, num_drafted, keys
    )


@jax.jit
def nan_rows(logits: jax.Array, num_used: jax.Array) -> jax.Array:
    """Return bool[S]: rows with NaN among the first i32[S] places of f32[S, n, V]."""
    used = jnp.arange(logits.shape[1])[None] < num_used[:, None]
    return (jnp.isnan(logits).any(-1) & used).any(-1)


def is_distribution(probs: jax.Array) -> jax.Array:
    """Say which rows of f32[n, V] are probabilities; NaN and infinity are none."""
    sums = jnp.abs(probs.sum(axis=1) - 1.0) <= _SUM_ERROR
    return sums & (probs >= 0).all(axis=1)


def _accept_row(
    target: jax.Array,
    draft: jax.Array,
    ids: jax.Array,
    count: jax.Array,
    key: jax.Array,
) -> Accepted:
    """Judge one row: f32[k + 1, V], f32[k, V], i32[k], i32[], u32[3]."""
    vocab, width = target.shape[1], ids.shape[0]
    places = jnp.arange(width)
    p_drafted = jnp.take_along_axis(target[:-1], ids[:, None], axis=1)[:, 0]
    q_drafted = jnp.take_along_axis(draft, ids[:, None], axis=1)[:, 0]
    own_keys = jax.vmap(lambda at: sampler.row_key(key, at))(jnp.arange(width + 1))
    chance = jax.vmap(_uniform)(own_keys[:-1])
    stands = chance * q_drafted < p_drafted
    taken = _leading((stands & (places < count))[None])[0]

    is_whole = taken == count
    p = target[taken]
    q = jnp.where(is_whole, 0.0, draft[jnp.minimum(taken, width - 1)])
    follows = _draw(p, q, is_whole, own_keys[taken])

    drafted_at_all = jnp.where(places < count, q_drafted > 0, True)
    used = jnp.arange(width + 1) <= count
    is_sound = (
        jnp.where(used, is_distribution(target), True).all()
        & jnp.where(used[1:], is_distribution(draft), True).all()
        & drafted_at_all.all()
    )
    return Accepted(
        jnp.where(is_sound, taken, 0).astype(jnp.int32),
        jnp.where(is_sound, follows, vocab).astype(jnp.int32),
        ~is_sound,
    )


def _draw(p: jax.Array, q: jax.Array, is_whole: jax.Array, key: jax.Array) -> jax.Array:
    """Draw of max(0, p - q), or of p behind a whole draft, by the Gumbel trick.

    It needs no division by the sum. Where rounding leaves nothing of p - q, p and q are
    equal but for rounding, and p serves.
    """
    rest = jnp.maximum(p - q, 0.0)
    rest = jnp.where(rest.sum() > 0, rest, p)
    replacing = jax.random.fold_in(key, _REPLACED)
    data = jnp.where(is_whole, jax.random.key_data(key), jax.random.key_data(replacing))
    noise = jax.random.gumbel(jax.random.wrap_key_data(data), p.shape, jnp.float32)
    return jnp.argmax(jnp.where(rest > 0, jnp.log(rest) + noise, -jnp.inf))


def _uniform(key: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, _JUDGED))


def _leading(accepted: jax.Array) -> jax.Array:
    """Return i32[S], how many of bool[S, k] are true before the first that is not."""
    return jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1)
