"""Merging: attention over shares of the tokens is attention over all of them.

A softmax over all tokens is the softmaxes over parts of them, weighted by their sums of
exponentials (log-sum-exp). So ranks that keep different tokens of a sequence attend
each to its own, and exchange a row a query head in place of keys and values: a prefill
and a decode step alike. The laws: the merge of shares does not depend on their number
or order beyond rounding; a share that sees no token takes no part, whatever it holds;
a query that no share sees a token for gives zeros.

    share = partial(scores, values)                  # of this rank's tokens
    out = finish(merge_ranks(share, spread))         # of all

Letters: Q queries, J tokens, D elements of a value; other axes are carried along.
Source of the identity: "Online normalizer calculation for softmax" (Milakov and
Gimelshein, arXiv:1805.02867).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvmem.geometry import Spread
from kvmem.mesh import DCP

__all__ = ["MASKED", "Share", "finish", "merge", "merge_ranks", "partial"]

# Finite, so that a query which sees nothing gives finite numbers rather than NaN.
MASKED = -1e30


class Share(NamedTuple):
    """Attention of queries to some of their tokens, before the division.

    Where no token is seen `most` is MASKED, and the rest finite and without meaning.
    """

    out: jax.Array  # f32[..., Q, D] sum of exp(score - most) * value
    total: jax.Array  # f32[..., Q, 1] sum of exp(score - most)
    most: jax.Array  # f32[..., Q, 1] the largest score

    @property
    def lse(self) -> jax.Array:
        """Logarithm of the sum of the exponentials of all scores, f32[..., Q, 1]."""
        return self.most + jnp.log(self.total)


def partial(scores: jax.Array, values: jax.Array, product: str) -> Share:
    """Return the share of some tokens.

    Args:
        scores: f32[..., Q, J], MASKED where a query does not see a token.
        values: f32[..., J, D], finite where any query does not see them.
        product: the subscripts of weights times values, for `jnp.einsum`.
    """
    most = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - most)
    out = jnp.einsum(product, weights, values)
    return Share(out, weights.sum(axis=-1, keepdims=True), most)


def merge(shares: Sequence[Share]) -> Share:
    """Return the share of the tokens of all of several shares."""
    stacked = Share(*(jnp.stack(parts) for parts in zip(*shares, strict=True)))
    most = stacked.most.max(axis=0)
    scaled = _scaled(stacked, most[None])
    return Share(scaled.out.sum(axis=0), scaled.total.sum(axis=0), most)


def merge_ranks(share: Share, spread: Spread) -> Share:
    """Return the share of all tokens, from those of the ranks they are spread over."""
    if spread.shards == 1:
        return share
    most = lax.pmax(share.most, DCP)
    out, total = lax.psum(_scaled(share, most)[:2], DCP)
    return Share(out, total, most)


def finish(share: Share, sink: jax.Array | None = None) -> jax.Array:
    """Divide: f32[..., Q, D], zeros where no token is seen.

    Args:
        sink: learned scores that take part in each softmax, once and without a value;
            broadcasts to `most`. None: none.
    """
    if sink is None:
        return jnp.where(share.most == MASKED, 0.0, share.out / share.total)
    # A sink far above all scores makes the sum infinite and the row zero, as it should.
    return share.out / (share.total + jnp.exp(sink - share.most))


def _scaled(share: Share, most: jax.Array) -> Share:
    """Return a share whose exponentials are of scores - most, most >= its own.

    A share that sees nothing is scaled by exp(MASKED - most), which is zero.
    """
    factor = jnp.exp(share.most - most)
    return Share(share.out * factor, share.total * factor, most)
