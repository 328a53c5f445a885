import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.geometry import Topology, envelope, group_layers, kinds
from kvmem.model.mixers import indexer

HEADS, D = 3, 128  # index heads, key elements


def page_of(lay, page_size=4, dim=D, **facts):
    """The indexers' envelope; they are tied to latents of the same layers."""
    sizes = dict(rank=128, rope_dim=8, scale=1.0)
    latents = [kinds.latent(f"m{i}", i, **sizes) for i in range(2)]
    layers = [kinds.indexer(f"i{i}", i, dim=dim, **facts) for i in range(2)]
    groups = group_layers([*latents, *layers], page_size)
    (group,) = [group for group in groups if group.name == "indexer"]
    return envelope.build(group, Topology(), 0)


def make_text(seqs=2, length=6, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((seqs, length, D)).astype(np.float32)
    q = rng.standard_normal((seqs, length, HEADS, D)).astype(np.float32)
    return keys, q, rng.random((seqs, length, HEADS)).astype(np.float32)


def reference(keys, q, weights):
    """The score of every pair of tokens, in float64."""
    seqs, length = keys.shape[:2]
    out = np.zeros((seqs, length, length))
    for s, n, m, head in np.ndindex(seqs, length, length, HEADS):
        score = q[s, n, head].astype(float) @ keys[s, m].astype(float)
        out[s, n, m] += weights[s, n, head] * max(score, 0.0)
    return out


def best(scores, k):
    """The positions a query reads, by sorting (-score, position)."""
    found = np.full((*scores.shape[:2], k), indexer.ABSENT, np.int64)
    for s, n in np.ndindex(*scores.shape[:2]):
        ranked = sorted(range(n + 1), key=lambda m: (-scores[s, n, m], m))
        found[s, n, : min(k, n + 1)] = sorted(ranked[:k])
    return found


@functools.partial(jax.jit, static_argnums=(1, 2, 9), donate_argnums=0)
def step(pages, env, layer, keys, q, weights, tab, starts, num_new, k=3):
    pages = indexer.write_keys(pages, env, layer, keys, tab, starts, num_new)
    end = starts + num_new
    scored = indexer.scores(pages, env, layer, q, weights, tab, end)
    positions = starts[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    at = tab.places(env.page_size)
    return pages, scored, indexer.select(scored, at, positions, end, k)


def run(lay, pages, env, text, tab, chunks, width=6, k=3):
    """Feed a text in chunks padded with NaN; scores and selections of all."""
    scored, chosen, at, seqs = [], [], 0, len(tab.pages)
    for chunk in chunks:
        part = [lay.padded(rows[:, at : at + chunk], width) for rows in text]
        args = (lay.ints(*[at] * seqs), lay.ints(*[chunk] * seqs), k)
        pages, scores, selected = step(pages, env, "i1", *part, tab, *args)
        scored.append(np.asarray(scores)[:, :chunk])
        chosen.append(np.asarray(selected)[:, :chunk])
        at += chunk
    return pages, np.concatenate(scored, 1), np.concatenate(chosen, 1)


@pytest.fixture(scope="module")
def env(lay):
    return page_of(lay)


@pytest.fixture
def tab(lay):
    return lay.table([[5, 2], [0, 7]])


def test_every_cut_of_a_text_selects_the_best_tokens(lay, env, tab):
    keys, q, weights = make_text()
    kept = lay.narrowed(keys, "float8_e4m3fn", 128)
    expected = reference(kept, q, weights)
    for chunks in lay.cuts(6):
        pages = lay.poisoned(8, env.nbytes)
        _, scored, chosen = run(lay, pages, env, (keys, q, weights), tab, chunks)
        np.testing.assert_array_equal(chosen, best(expected, 3), err_msg=str(chunks))
        causal = np.tril(np.ones((6, 6), bool))[None]
        np.testing.assert_allclose(
            scored[..., :6] * causal, expected * causal, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_keys_without_scales_are_kept_as_they_are(dtype, lay, tab):
    env = page_of(lay, dtype=dtype)
    keys, q, weights = make_text()
    expected = reference(lay.narrowed(keys, dtype), q, weights)
    args = (lay.poisoned(8, env.nbytes), env, (keys, q, weights), tab, (4, 2))
    np.testing.assert_array_equal(run(lay, *args)[2], best(expected, 3))


@pytest.mark.parametrize("k", [1, 6, 8, 100])
def test_a_query_that_sees_at_most_k_tokens_selects_them_all(k, lay, env, tab):
    text = make_text()
    args = (lay.poisoned(8, env.nbytes), env, text, tab, (4, 2))
    chosen = run(lay, *args, k=k)[2]
    assert chosen.shape[2] == min(k, 8)
    for n in range(6):
        if n < k:
            np.testing.assert_array_equal(chosen[0, n, : n + 1], np.arange(n + 1))
            assert (chosen[0, n, n + 1 :] == indexer.ABSENT).all()


def test_of_equal_scores_the_earlier_token_wins(lay, env, tab):
    keys, q, weights = make_text()
    keys[:], weights[:, 3:] = keys[:, :1], 0.0  # equal keys; then all scores zero
    args = (lay.poisoned(8, env.nbytes), env, (keys, q, weights), tab, (6,))
    chosen = run(lay, *args)[2]
    for n in range(2, 6):
        np.testing.assert_array_equal(chosen[:, n], [[0, 1, 2]] * 2)


def test_negative_weights_rank_below_zero_scores(lay, env, tab):
    keys, q, weights = make_text()
    expected = reference(lay.narrowed(keys, "float8_e4m3fn", 128), q, -weights)
    assert (expected < 0).any() and (expected[0, 5] == 0).sum() < 6
    args = (lay.poisoned(8, env.nbytes), env, (keys, q, -weights), tab, (3, 3))
    np.testing.assert_array_equal(run(lay, *args)[2], best(expected, 3))


@pytest.mark.parametrize("slot", [0, 1, 17, 63, 64, 65, 127, 128])
def test_a_key_stands_in_its_block_and_its_scale_at_the_tail(slot, lay):
    """The pages of 64 records of 128 + 4 bytes that other engines keep."""
    env = page_of(lay, page_size=64)
    assert env.nbytes == 2 * 8448  # two layers
    key = np.random.default_rng(1).standard_normal((1, 1, D)).astype(np.float32)
    before = np.random.default_rng(2).integers(0, 256, (3, env.nbytes), np.uint8)
    args = (key, lay.table([[0, 1, 2]]), lay.ints(slot), lay.ints(1))
    after = indexer.write_keys(jnp.asarray(before), env, "i0", *args)
    page, place = divmod(slot, 64)
    scale = np.abs(key).max() * np.float32(1 / 448)
    expected = before.copy()
    values = (key / scale).astype(jnp.float8_e4m3fn).tobytes()
    expected[page, 128 * place : 128 * place + 128] = np.frombuffer(values, np.uint8)
    at = 8192 + 4 * place
    expected[page, at : at + 4] = np.frombuffer(scale.tobytes(), np.uint8)
    np.testing.assert_array_equal(after, expected)


def test_a_row_without_tokens_writes_nothing_and_selects_nothing_unwritten(lay, env):
    before = np.random.default_rng(3).integers(0, 256, (8, env.nbytes), np.uint8)
    args = (*make_text(), lay.table([[5, 2], [8, -1]]), lay.ints(0, 0), lay.ints(0, 0))
    after, scored, chosen = step(jnp.asarray(before), env, "i1", *args)
    np.testing.assert_array_equal(after, before)
    assert np.isfinite(scored).all() and (chosen == indexer.ABSENT).all()


def test_a_page_outside_the_pool_drops_its_writes(lay, env):
    before = np.random.default_rng(3).integers(0, 256, (8, env.nbytes), np.uint8)
    tab = lay.table([[8, -1], [2**31 - 1, 9]])
    args = (*make_text(), tab, lay.ints(0, 0), lay.ints(6, 6))
    after, scored, _ = step(jnp.asarray(before), env, "i1", *args)
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(scored, np.zeros_like(scored))


def test_index_heads_split_over_ranks_sum_to_the_scores_of_all(lay, env, tab):
    keys, q, weights = make_text()
    pages = indexer.write_keys(
        lay.poisoned(8, env.nbytes),
        env,
        "i1",
        keys,
        tab,
        lay.ints(0, 0),
        lay.ints(6, 6),
    )
    args = (tab, lay.ints(6, 6))
    whole = indexer.scores(pages, env, "i1", q, weights, *args)

    def rank(q, weights):
        own = indexer.scores(pages, env, "i1", q, weights, *args)
        return jax.lax.psum(own, "tp")

    parts = [np.stack(np.split(rows, HEADS, 2)) for rows in (q, weights)]
    summed = jax.jit(jax.vmap(rank, axis_name="tp"))(*parts)
    np.testing.assert_allclose(summed[0], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seqs,length", [(1, 1), (8, 16)])
def test_keys_are_written_in_place(seqs, length, lay, env, pool_copies):
    pages = lay.poisoned(8192, env.nbytes)
    tab = lay.table(np.arange(8 * seqs).reshape(seqs, 8))
    ends = (lay.ints(*[3] * seqs), lay.ints(*[length] * seqs))
    args = (*make_text(seqs, length), tab, *ends)
    compiled = step.lower(pages, env, "i1", *args).compile()
    assert pool_copies(compiled, pages, spare_nbytes=1024 * 1024) == []
