"""Sampling: the stated distribution, by each row's own key."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.serve import sampler
from kvmem.serve.request import SamplingParams

V = 50


def logits(seed, rows=1):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 2, (rows, V)), jnp.float32)


def draw(row, sampling, count, width=256):
    """Draw `count` tokens from one row of logits at positions 0 .. count - 1."""
    keys = [sampler.RowKey(sampling, 0, position) for position in range(count)]
    tiled = jnp.broadcast_to(row, (width, V))
    drawn = []
    for at in range(0, count, width):
        rows = sampler.pack_rows(keys[at : at + width], width)
        drawn.append(np.asarray(sampler.sample(tiled, rows))[: count - at])
    return np.concatenate(drawn)


def frequencies(tokens):
    return np.bincount(tokens, minlength=V) / len(tokens)


def softmax(values):
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def test_greedy_takes_the_likeliest_and_temperature_zero_is_greedy():
    rows = logits(0, rows=8)
    want = np.asarray(rows).argmax(-1)
    np.testing.assert_array_equal(sampler.greedy(rows), want)
    packed = sampler.pack_rows([sampler.RowKey(SamplingParams(), 0, 0)] * 8, 8)
    np.testing.assert_array_equal(sampler.sample(rows, packed), want)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_tempered_distribution(temperature):
    row = logits(1)
    tokens = draw(row, SamplingParams(temperature=temperature), 4096)
    want = softmax(np.asarray(row[0], np.float64) / temperature)
    # 4,096 draws: the total variation of a right sampler stays below 0.1 here, and a
    # sampler at the neighbouring temperature stands beyond 0.15.
    assert np.abs(frequencies(tokens) - want).sum() / 2 < 0.1
    wrong = softmax(np.asarray(row[0], np.float64) / (temperature * 2))
    assert np.abs(frequencies(tokens) - wrong).sum() / 2 > 0.15


def test_top_k_keeps_the_k_likeliest_tokens_only():
    row = logits(2)
    tokens = draw(row, SamplingParams(temperature=1.5, top_k=5), 1024)
    allowed = np.argsort(-np.asarray(row[0]))[:5]
    assert set(tokens) == set(allowed)


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    row = logits(3)
    order = np.argsort(-np.asarray(row[0]))
    mass = np.cumsum(softmax(np.asarray(row[0], np.float64))[order])
    keep = int(np.searchsorted(mass, 0.8)) + 1
    tokens = draw(row, SamplingParams(temperature=1.0, top_p=0.8), 4096)
    assert set(tokens) <= set(order[:keep])
    assert len(set(tokens)) >= keep - 1


def test_a_tiny_top_p_is_greedy():
    row = logits(4)
    tokens = draw(row, SamplingParams(temperature=1.0, top_p=1e-6), 64)
    assert set(tokens) == {int(np.asarray(row[0]).argmax())}


def test_a_row_depends_on_its_own_key_and_not_on_its_mates():
    rows = logits(5, rows=8)
    mine = sampler.RowKey(SamplingParams(temperature=1.0, seed=3), 1, 17)
    alone = sampler.sample(rows[:1], sampler.pack_rows([mine], 1))[0]
    others = [
        sampler.RowKey(SamplingParams(temperature=0.7, seed=i), 0, i) for i in range(7)
    ]
    together = sampler.sample(rows, sampler.pack_rows([mine, *others], 8))[0]
    assert alone == together


@pytest.mark.parametrize("change", ["seed", "sample", "position"])
def test_seed_sample_and_position_each_change_the_draw(change):
    row = jnp.broadcast_to(logits(6), (64, V))
    seeds = range(64) if change == "seed" else [0] * 64
    samples = range(64) if change == "sample" else [0] * 64
    positions = range(64) if change == "position" else [0] * 64
    keys = [
        sampler.RowKey(SamplingParams(temperature=2.0, seed=s), n, p)
        for s, n, p in zip(seeds, samples, positions, strict=True)
    ]
    drawn = np.asarray(sampler.sample(row, sampler.pack_rows(keys, 64)))
    assert len(set(drawn)) > 8


def test_log_probabilities_are_those_of_the_untempered_logits():
    rows = logits(7, rows=2)
    chosen, ids, top = sampler.log_probabilities(rows, jnp.asarray([3, 9], jnp.int32))
    want = np.log(softmax(np.asarray(rows[0], np.float64)))
    np.testing.assert_allclose(chosen[0], want[3], atol=1e-5)
    np.testing.assert_array_equal(ids[0], np.argsort(-want)[:20])
    np.testing.assert_allclose(top[0], np.sort(want)[::-1][:20], atol=1e-5)
