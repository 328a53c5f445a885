"""The chosen tokens: those that were not found, and those that deviate most."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem.blend import BlendConfig, select


def chosen(scores, must, count, width):
    found = select.choose(
        jnp.asarray(scores, jnp.float32), jnp.asarray(must), jnp.int32(count), width
    )
    return np.asarray(found).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_unfound_tokens_and_the_highest_scores_are_chosen_in_order(seed):
    rng = np.random.default_rng(seed)
    scores, must = rng.integers(0, 5, 12), rng.random(12) < rng.random()
    count = int(rng.integers(must.sum(), 13))
    ranked = sorted(range(12), key=lambda at: (not must[at], -scores[at], at))
    expected = sorted(ranked[:count]) + [12] * (14 - count)
    assert chosen(scores, must, count, width=14) == expected


def test_what_is_no_number_counts_as_most():
    for sign in (1, -1):  # x86 makes a NaN with its sign set
        nan = np.copysign(np.nan, sign)
        assert chosen([5.0, nan, 9.0], [False] * 3, 1, 2) == [1, 3]


@pytest.mark.parametrize("score", [np.nan, np.inf, 3e38])
def test_no_score_whatever_it_is_takes_the_place_of_an_unfound_token(score):
    must = [False, False, True, False, True]
    assert chosen([score, score, 0.0, score, 0.0], must, 2, 2) == [2, 4]
    assert chosen([score, score, 0.0, score, 0.0], must, 3, 3) == [0, 2, 4]


def test_a_score_is_the_squared_distance_in_float32():
    new = jnp.asarray([[1.0, 2.0], [0.0, 0.0]], jnp.bfloat16)
    old = jnp.asarray([[1.0, 5.0], [3.0, 4.0]], jnp.bfloat16)
    found = select.scores(new, old)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [9.0, 25.0])


def test_the_share_is_the_whole_part_of_ratio_times_tokens():
    counts = {0.15: 216, 0.0: 0, 1.0: 1_440, 0.3: 432}
    for ratio, count in counts.items():
        assert BlendConfig(ratio=ratio).num_recomputed(1_440) == count
    assert BlendConfig(ratio=0.29).num_recomputed(100) == 29
    assert BlendConfig(ratio=0.15).num_recomputed(6) == 0, "of few tokens it is none"


def test_settings_out_of_range_are_refused_all_at_once():
    with pytest.raises(errors.ConfigError, match=r"ratio <= 1, check_layer >= 0"):
        BlendConfig(ratio=1.5, check_layer=-1)
