"""Chains: a draft model's own tokens, one after the other, without a look at them.

Each step feeds the likeliest token of the one before it, so the host waits once a
chain and not once a token. The law: a chain writes the rows of the tokens that it
feeds, behind those its feeds name, and no others; and a token that came of logits that
are no numbers is told apart from one that was chosen.

    pool, chains = draw(stepper, pool, feeds, buckets.decode, counts=[4, 2])
    chains[1].tokens      # (17, 3)
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
from kvmem.serve.step import Batch, Stepper
from kvmem.serve.work import Feed

__all__ = ["NO_NUMBERS", "Chain", "draw"]

NO_NUMBERS = "the draft's logits are no numbers"

BucketFn = Callable[[int, int], Bucket]
"""The bucket of one new token for so many rows, up to a length."""


class Chain(NamedTuple):
    """Tokens of one row; `is_sound` says that all of them were chosen by numbers."""

    tokens: tuple[int, ...]
    is_sound: bool


def draw(
    stepper: Stepper,
    pool: pools.Pool,
    feeds: ListLike[Feed],
    bucket_of: BucketFn,
    counts: ListLike[int],
    first: Bucket | None = None,
) -> tuple[pools.Pool, list[Chain]]:
    """Donates `pool`. Read what the rows feed, then draw `counts[i]` >= 1 tokens each.

    All but the last of a row's tokens are fed in turn: its pages need room for them.

    Args:
        stepper: the draft.
        pool: its pages.
        feeds: tokens not in them yet, one or more a row.
        bucket_of: for the steps behind the first.
        counts: tokens of each row.
        first: for what the rows feed; None: they feed one token each.
    """
    longest = max(feed.end for feed in feeds)
    bucket = first or bucket_of(len(feeds), longest)
    pool, logits = stepper(pool, stepper.pack(feeds, bucket))
    chosen = [_choose(logits)]
    for step in range(1, max(counts)):
        reading = [
            Feed((0,) if step < count else (), feed.end + step - 1, feed.held)
            for feed, count in zip(feeds, counts, strict=True)
        ]
        batch = stepper.pack(reading, bucket_of(len(feeds), longest + step))
        pool, logits = stepper(pool, _with_tokens(batch, chosen[-1][0]))
        chosen.append(_choose(logits))
    tokens, wrong = (np.asarray(jnp.stack(each)) for each in zip(*chosen, strict=True))
    return pool, [
        Chain(tuple(tokens[:count, at].tolist()), not wrong[:count, at].any())
        for at, count in enumerate(counts)
    ]


@jax.jit
def _choose(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return i32[S] the likeliest tokens, and bool[S] where logits are NaN."""
    return sampler.greedy(logits), sampler.has_nan(logits)


def _with_tokens(batch: Batch, tokens: jax.Array) -> Batch:
    """Return the batch with what each row feeds, which the host has not seen."""
    rows = batch.num_new.shape[0]
    return dataclasses.replace(batch, tokens=_column(tokens, rows))


def _column(tokens: jax.Array, rows: int) -> jax.Array:
    """Return i32[rows, 1]; rows of another bucket begin with those of this one."""
    tokens = tokens[:rows]
    return jnp.pad(tokens, (0, rows - tokens.shape[0]))[:, None]
