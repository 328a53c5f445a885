import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.geometry import Spread
from kvmem.model import merge

QUERIES, TOKENS, WIDTH = 3, 12, 5
PRODUCT = "qj,jd->qd"
RNG = np.random.default_rng(11)
SCORES = (6 * RNG.standard_normal((QUERIES, TOKENS))).astype(np.float32)
VALUES = RNG.standard_normal((TOKENS, WIDTH)).astype(np.float32)
CUTS = [(0, 12), (0, 5, 12), (0, 1, 2, 11, 12), (0, 4, 4, 4, 12)]


def softmaxed(scores, values, sink=None):
    """Attention in float64, a sink being one more score of a value of zeros."""
    scores, values = scores.astype(np.float64), values.astype(np.float64)
    if sink is not None:
        scores = np.concatenate([scores, np.full((len(scores), 1), sink)], 1)
        values = np.concatenate([values, np.zeros((1, values.shape[1]))])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights @ values / weights.sum(1, keepdims=True)


def shares(cuts, scores=SCORES, values=VALUES):
    """One share a run of tokens; a run without any sees one that nobody sees."""
    found = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        if a == b:
            seen = np.full((QUERIES, 1), merge.MASKED, np.float32)
            found.append(merge.partial(seen, np.zeros((1, WIDTH), np.float32), PRODUCT))
        else:
            found.append(merge.partial(scores[:, a:b], values[a:b], PRODUCT))
    return found


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("sink", [None, -1.5, 40.0, 300.0, -300.0])
def test_shares_of_any_cut_give_attention_to_all_tokens(cuts, sink):
    merged = merge.merge(shares(cuts))
    found = merge.finish(merged, None if sink is None else jnp.float32(sink))
    np.testing.assert_allclose(found, softmaxed(SCORES, VALUES, sink), atol=2e-6)
    whole = np.log(np.exp(SCORES.astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(merged.lse, whole, rtol=1e-6)


def test_the_order_of_shares_and_of_merging_is_free():
    parts = shares((0, 3, 4, 9, 12))
    found = merge.finish(merge.merge(parts))
    again = merge.finish(merge.merge(parts[::-1]))
    nested = merge.finish(merge.merge([parts[0], merge.merge(parts[1:])]))
    np.testing.assert_allclose(found, again, atol=1e-6)
    np.testing.assert_allclose(found, nested, atol=1e-6)


def test_scores_far_apart_neither_overflow_nor_vanish():
    scores = SCORES + np.float32([[3e4], [-3e4], [0]])
    found = merge.finish(merge.merge(shares((0, 6, 12), scores)))
    np.testing.assert_allclose(found, softmaxed(scores, VALUES), atol=2e-3)


def test_a_share_that_sees_nothing_takes_no_part_whatever_it_holds():
    parts = shares((0, 12))
    seen = np.full((QUERIES, 2), merge.MASKED, np.float32)
    wild = merge.partial(seen, np.full((2, WIDTH), 3e37, np.float32), PRODUCT)
    found = merge.finish(merge.merge([wild, *parts, wild]))
    np.testing.assert_array_equal(found, merge.finish(parts[0]))


def test_a_query_that_no_share_sees_a_token_for_gives_zeros():
    seen = np.full((QUERIES, 2), merge.MASKED, np.float32)
    blind = merge.partial(seen, np.ones((2, WIDTH), np.float32), PRODUCT)
    for sink in (None, jnp.float32(0.5)):
        assert (merge.finish(merge.merge([blind, blind]), sink) == 0).all()


def test_nan_in_any_share_shows():
    broken = np.where(np.arange(TOKENS) == 7, np.nan, SCORES).astype(np.float32)
    for sink in (None, jnp.float32(0.5)):
        found = merge.finish(merge.merge(shares((0, 4, 8, 12), broken)), sink)
        assert np.isnan(found).all()


@pytest.mark.parametrize("dcp", [2, 4])
def test_ranks_merge_as_shares_do(dcp):
    spread, cuts = Spread(dcp), range(0, TOKENS + 1, TOKENS // dcp)
    parts = shares(tuple(cuts))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    run = functools.partial(merge.merge_ranks, spread=spread)
    found = jax.vmap(run, axis_name="dcp")(stacked)
    for rank in range(dcp):
        mine = jax.tree.map(lambda leaf, rank=rank: leaf[rank], found)
        np.testing.assert_allclose(
            merge.finish(mine), softmaxed(SCORES, VALUES), atol=2e-6
        )


@pytest.mark.parametrize("spread", [Spread(), Spread(4, is_whole=True)])
def test_what_every_rank_has_whole_is_merged_with_nothing(spread):
    (share,) = shares((0, 12))
    assert merge.merge_ranks(share, spread) is share  # no axis is asked for
