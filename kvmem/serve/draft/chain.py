"""Chains: a draft model's own tokens, one after the other, without a look at them.

Each step feeds the token that the one before it chose, so the host waits once a chain
and not once a token. A row that is sampled is drawn with the very noise that its target
will draw with, so the nearer two models are, the more often they draw alike. The law: a
chain writes the rows of the tokens that it feeds, behind those its feeds name, and no
others; and a token that came of logits that are no numbers is told apart from one that
was chosen.

    drawn = draw(stepper, pool, feeds, buckets.decode, [4, 2], keys_of(sequences))
    drawn.chains[1].tokens      # (17, 3)
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvmem import pool as pools
from kvmem.serve import sampler
from kvmem.serve.buckets import Bucket
from kvmem.serve.draft.accept import is_distribution
from kvmem.serve.draft.protocol import Proposal
from kvmem.serve.holding import Holding
from kvmem.serve.request import Sequence
from kvmem.serve.step import Batch, Stepper
from kvmem.serve.work import Feed

__all__ = ["NO_NUMBERS", "Chain", "Chooser", "Drawn", "after", "chains_of", "draw"]
__all__ += ["keys_of", "proposal_of"]

NO_NUMBERS = "the draft's logits are no numbers"

BucketFn = Callable[[int, int], Bucket]
"""The bucket of one new token for so many rows, up to a length."""


class Chain(NamedTuple):
    """Tokens of one row; `is_sound` says that all of them were chosen by numbers."""

    tokens: tuple[int, ...]
    is_sound: bool


class Drawn(NamedTuple):
    """The pool, a chain a row, and what the tokens were drawn from: f32[S, n, V], of a
    bucket of S rows and as many places as were asked for."""

    pool: pools.Pool
    chains: list[Chain]
    probs: jax.Array | None


def keys_of(sequences: ListLike[Sequence]) -> list[sampler.RowKey]:
    """Return what decides the first token behind those known of each."""
    return [sampler.RowKey(s.sampling, s.sample, len(s.tokens)) for s in sequences]


def draw(
    stepper: Stepper,
    pool: pools.Pool,
    feeds: ListLike[Feed],
    bucket_of: BucketFn,
    counts: ListLike[int],
    keys: ListLike[sampler.RowKey],
    first: Bucket | None = None,
    num_probs: int = 0,
) -> Drawn:
    """Donates `pool`. Read what the rows feed, then draw `counts[i]` >= 1 tokens each.

    All but the last of a row's tokens are fed in turn: its pages need room for them.

    Args:
        stepper: the draft.
        pool: its pages.
        feeds: tokens not in them yet, one or more a row.
        bucket_of: for the steps behind the first.
        counts: tokens of each row.
        keys: of each row's first token.
        first: for what the rows feed; None: they feed one token each.
        num_probs: places of what sampled tokens were drawn from, no fewer than any
            count; 0: that is not asked for.
    """
    choose = Chooser(keys, num_probs)
    bucket = first or bucket_of(len(feeds), max(feed.end for feed in feeds))
    pool, logits = stepper(pool, stepper.pack(feeds, bucket))
    chosen = [choose(logits, 0)]
    for step in range(1, max(counts)):
        reading = [
            after(feed.end, feed.held, step - 1, count - 1)
            for feed, count in zip(feeds, counts, strict=True)
        ]
        longest = max(feed.end for feed in reading)
        batch = stepper.pack(reading, bucket_of(len(feeds), longest))
        pool, logits = stepper(pool, _with_tokens(batch, chosen[-1][0]))
        chosen.append(choose(logits, step))
    found = [[np.asarray(each)[: len(feeds)] for each in step] for step in chosen]
    chains = chains_of(*zip(*found, strict=True), counts)
    return Drawn(pool, chains, choose.probs)


def after(length: int, held: Holding, step: int, count: int) -> Feed:
    """Return what a row feeds `step` tokens behind a text, of `count` that it feeds.

    A row that has fed all of its own stays where they end, so the longest row of a step
    is that of one which has tokens left, or had them.
    """
    return Feed((0,) if step < count else (), length + min(step, count), held)


def chains_of(
    tokens: ListLike[jax.Array], wrong: ListLike[jax.Array], counts: ListLike[int]
) -> list[Chain]:
    """Return the tokens of each row, as many as it was to draw; waits for the device.

    Args:
        tokens: i32[S] of each step; or i32[S, width], chains that stand one behind the
            other then.
        wrong: bool of the same shapes, tokens that no numbers chose.
        counts: steps of each of the first rows.
    """
    ids, faults = np.stack(tokens), np.stack(wrong)
    return [
        Chain(tuple(ids[:n, at].T.reshape(-1).tolist()), not faults[:n, at].any())
        for at, n in enumerate(counts)
    ]


def proposal_of(chains: ListLike[Chain]) -> Proposal:
    """Propose what was chosen by numbers; the rest are faults."""
    return Proposal(
        tuple(each.tokens if each.is_sound else () for each in chains),
        faults={at: NO_NUMBERS for at, each in enumerate(chains) if not each.is_sound},
    )


class Chooser:
    """Chooses the tokens of one chain's steps as each row's request asks."""

    def __init__(self, keys: ListLike[sampler.RowKey], num_probs: int = 0):
        self._keys = keys
        self._is_greedy = all(key.sampling.temperature == 0 for key in keys)
        self._num_probs = 0 if self._is_greedy else num_probs
        self._probs: list[jax.Array] = []

    def __call__(self, logits: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
        """Return i32[S] the tokens of a step, and bool[S] where no numbers chose them:
        logits with NaN, or ones whose probabilities are asked for and are none."""
        if self._is_greedy:
            return _likeliest(logits)
        keys = [key._replace(position=key.position + step) for key in self._keys]
        rows = sampler.pack_rows(keys, logits.shape[0])
        if not self._num_probs:
            return sampler.sample(logits, rows), sampler.has_nan(logits)
        probs, wrong = _probabilities(logits, rows)
        self._probs.append(probs)
        return sampler.sample(logits, rows), wrong

    @property
    def probs(self) -> jax.Array | None:
        """f32[S, num_probs, V] what the tokens were drawn from, if asked for.

        One shape whatever was drawn: places behind the last repeat it.
        """
        if not self._probs:
            return None
        missing = self._num_probs - len(self._probs)
        return jnp.stack([*self._probs, *self._probs[-1:] * missing], axis=1)


@jax.jit
def _likeliest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sampler.greedy(logits), sampler.has_nan(logits)


@jax.jit
def _probabilities(logits: jax.Array, rows: sampler.Rows) -> tuple[jax.Array, ...]:
    """Return f32[S, V] what rows draw from, and bool[S] where that is nothing to."""
    probs = sampler.probabilities(logits[:, None], rows)[:, 0]
    return probs, ~is_distribution(probs)


def _with_tokens(batch: Batch, tokens: jax.Array) -> Batch:
    """Return the batch with what each row feeds, which the host has not seen."""
    rows = batch.num_new.shape[0]
    return dataclasses.replace(batch, tokens=_column(tokens, rows))


def _column(tokens: jax.Array, rows: int) -> jax.Array:
    """Return i32[rows, 1]; rows of another bucket begin with those of this one."""
    tokens = tokens[:rows]
    return jnp.pad(tokens, (0, rows - tokens.shape[0]))[:, None]
