"""Acceptance: the target's distribution whatever the draft says, and faults as faults.

A vocabulary of eight tokens and 20,000 rows a question: each frequency of a right
sampler lies within 4.5 standard errors, and each wrong sampler is beyond them by far.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.serve import sampler
from kvmem.serve.draft.accept import accept_greedy, accept_sampled, nan_rows
from kvmem.serve.request import SamplingParams

V, K, ROWS = 8, 3, 20_000
FEW = 64  # rows of questions without chance: one shape, one program
SIGMAS = 4.5


def distributions(seed, places, sharpness=1.5):
    """Return f32[places, V] of unequal probabilities."""
    noise = np.random.default_rng(seed).normal(0, sharpness, (places, V))
    weights = np.exp(noise - noise.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def keys(count, position=0, seed=11):
    """Return u32[count, 3], a sample a row."""
    found = np.zeros((count, 3), np.uint32)
    found[:, 0], found[:, 1], found[:, 2] = seed, np.arange(count), position
    return jnp.asarray(found)


@jax.jit
def drafted(draft, row_keys):
    """Draw i32[count, K] from f32[K, V] with the sampler's own keys, as a draft may."""

    def of_row(key):
        def of_place(at, probs):
            noise = jax.random.gumbel(sampler.row_key(key, at), (V,))
            return jnp.argmax(jnp.log(probs) + noise).astype(jnp.int32)

        return jax.vmap(of_place)(jnp.arange(K), draft)

    return jax.vmap(of_row)(row_keys)


def tiled(probs, count=ROWS):
    return jnp.broadcast_to(jnp.asarray(probs)[None], (count, *probs.shape))


def full(count, value=K):
    return jnp.full(count, value, jnp.int32)


def emitted(found, ids):
    """Return i64[rows, K + 1]: what each row emits, -1 behind its end."""
    taken, after = np.asarray(found.num_accepted), np.asarray(found.next_ids)
    out = np.full((len(taken), K + 1), -1)
    out[:, :K] = np.where(np.arange(K) < taken[:, None], np.asarray(ids), -1)
    out[np.arange(len(taken)), taken] = after
    return out


def deviation(tokens, probs):
    """Return the largest distance of a frequency from its probability, in sigmas."""
    tokens = tokens[tokens >= 0]
    seen = np.bincount(tokens, minlength=V)[:V] / len(tokens)
    probs = np.asarray(probs, np.float64)
    sigma = np.sqrt(probs * (1 - probs) / len(tokens))
    return np.max(np.abs(seen - probs) / np.maximum(sigma, 1e-9))


def worst(found, ids, target):
    """Return the deviation at each place of the rows that reach it, the largest."""
    out = emitted(found, ids)
    return max(deviation(out[:, at], target[at]) for at in range(K + 1))


@pytest.mark.parametrize("seeds", [(1, 2), (3, 4), (5, 5)])
def test_what_is_emitted_follows_the_target_at_every_place(seeds):
    target, draft = distributions(seeds[0], K + 1), distributions(seeds[1], K)
    row_keys = keys(ROWS)
    ids = drafted(draft, row_keys)
    found = accept_sampled(tiled(target), tiled(draft), ids, full(ROWS), row_keys)
    assert not np.asarray(found.faults).any()
    assert worst(found, ids, target) < SIGMAS
    # The accept rate is the overlap of the two distributions, at each place.
    overlap = np.minimum(target[:K], draft).sum(-1)
    rate = (np.asarray(found.num_accepted) > 0).mean()
    assert abs(rate - overlap[0]) < SIGMAS * 0.5 / np.sqrt(ROWS)


def test_tokens_at_two_places_are_independent():
    """A first token that is kept for what follows would show in the pairs."""
    target, draft = distributions(1, K + 1), distributions(2, K)
    row_keys = keys(ROWS)
    ids = drafted(draft, row_keys)
    found = accept_sampled(tiled(target), tiled(draft), ids, full(ROWS), row_keys)
    out = emitted(found, ids)
    both = out[out[:, 1] >= 0]
    accepted_first = np.minimum(target[0], draft[0])
    accepted_first = accepted_first / accepted_first.sum()
    pairs = np.bincount(both[:, 0] * V + both[:, 1], minlength=V * V) / len(both)
    want = np.outer(accepted_first, target[1]).ravel().astype(np.float64)
    sigma = np.sqrt(want * (1 - want) / len(both))
    assert np.max(np.abs(pairs - want) / np.maximum(sigma, 1e-9)) < 5.0


def test_named_tokens_are_judged_by_the_targets_probability():
    target = distributions(7, K + 1)
    ids = tiled(np.asarray([2, 5, 0], np.int32))
    found = accept_sampled(tiled(target), None, ids, full(ROWS), keys(ROWS))
    assert worst(found, ids, target) < SIGMAS
    rate = (np.asarray(found.num_accepted) > 0).mean()
    assert abs(rate - target[0, 2]) < SIGMAS * 0.5 / np.sqrt(ROWS)


def _cut(rest):
    """Return a sampler that draws of `rest` by its running sum, undivided."""

    def draw(key):
        place = jax.random.uniform(key)
        return jnp.minimum((jnp.cumsum(rest, axis=-1) < place).sum(-1), V - 1)

    return draw


def wrong_sampler(name, target, draft, ids, row_keys):
    """Accept and replace as samplers do that are nearly right."""

    def of_row(ids, key):
        base = jax.random.fold_in(sampler.row_key(key), 99)
        u = jax.random.uniform(jax.random.fold_in(base, 0), (K,))
        p = jnp.take_along_axis(target[:K], ids[:, None], 1)[:, 0]
        q = jnp.take_along_axis(draft, ids[:, None], 1)[:, 0]
        stands = {
            "argmax accepts": ids == target[:K].argmax(-1),
            "all accepted": jnp.ones(K, bool),
            "rejected once, drawn from the target": u * q < p,
            "residual not renormalised": u * q < p,
            "residual of the next place": u * q < p,
            "accepts by q over p": u * p < q,
        }[name]
        taken = jnp.cumprod(stands.astype(jnp.int32)).sum()
        key = jax.random.fold_in(base, 1)
        behind = draft[jnp.minimum(taken, K - 1)]
        rest = jnp.maximum(target[taken] - behind, 0.0)
        if name == "residual of the next place":
            rest = jnp.maximum(target[jnp.minimum(taken + 1, K)] - behind, 0.0)
        whole = taken == K
        drawn = jax.random.categorical(key, jnp.log(target[taken]))
        if name.startswith("residual"):
            again = jax.random.categorical(key, jnp.log(rest))
            if name == "residual not renormalised":
                again = _cut(rest)(key)
            drawn = jnp.where(whole, drawn, again)
        return taken, drawn

    return jax.jit(jax.vmap(of_row))(ids, row_keys)


@pytest.mark.parametrize(
    "name",
    [
        "argmax accepts",
        "all accepted",
        "rejected once, drawn from the target",
        "residual not renormalised",
        "residual of the next place",
        "accepts by q over p",
    ],
)
def test_a_sampler_that_is_nearly_right_would_be_seen(name):
    target, draft = distributions(1, K + 1), distributions(2, K)
    row_keys = keys(ROWS)
    ids = drafted(draft, row_keys)
    taken, after = wrong_sampler(
        name, jnp.asarray(target), jnp.asarray(draft), ids, row_keys
    )

    class Found:
        num_accepted, next_ids = taken, after

    assert worst(Found, ids, target) > 2 * SIGMAS


def test_a_draft_that_is_the_target_is_accepted_whole():
    target = distributions(3, K + 1)
    row_keys = keys(FEW)
    ids = drafted(target[:K], row_keys)
    found = accept_sampled(
        tiled(target, FEW), tiled(target[:K], FEW), ids, full(FEW), row_keys
    )
    assert (np.asarray(found.num_accepted) == K).all()


def test_a_row_without_drafts_draws_what_the_sampler_would():
    logits = jnp.asarray(np.random.default_rng(5).normal(0, 2, (FEW, V)), jnp.float32)
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, seed=3)
    rows = sampler.pack_rows([sampler.RowKey(params, 0, at) for at in range(FEW)], FEW)
    want = sampler.sample(logits, rows)
    probs = sampler.probabilities(jnp.repeat(logits[:, None], K + 1, axis=1), rows)
    ids = jnp.zeros((FEW, K), jnp.int32)
    found = accept_sampled(probs, None, ids, full(FEW, 0), rows.keys)
    np.testing.assert_array_equal(found.next_ids, want)
    assert not np.asarray(found.num_accepted).any()


def test_a_greedy_row_accepts_what_the_target_chooses():
    logits = np.random.default_rng(9).normal(0, 2, (1, K + 1, V)).astype(np.float32)
    logits = tiled(logits[0], FEW)
    rows = sampler.pack_rows([sampler.RowKey(SamplingParams(), 0, 0)], FEW)
    probs = sampler.probabilities(logits, rows)
    best = np.asarray(logits).argmax(-1)
    for wrong_at in range(K + 1):
        ids = best[:, :K].copy()
        ids[:, wrong_at:] = (ids[:, wrong_at:] + 1) % V
        found = accept_sampled(probs, None, jnp.asarray(ids), full(FEW), rows.keys)
        taken, after = accept_greedy(jnp.asarray(best), jnp.asarray(ids), full(FEW))
        assert found.num_accepted[5] == taken[5] == wrong_at
        assert found.next_ids[5] == after[5] == best[5, wrong_at]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_padding_behind_the_drafts_of_a_row_is_never_accepted(count):
    best = jnp.asarray([[4, 5, 6, 7]])
    taken, after = accept_greedy(best, best[:, :K], full(1, count))
    assert (taken[0], after[0]) == (count, best[0, count])
    target = distributions(3, K + 1)
    row_keys = keys(FEW)
    ids = drafted(target[:K], row_keys)
    draft = tiled(target[:K], FEW).at[:, count:].set(jnp.nan)  # padding is not read
    found = accept_sampled(tiled(target, FEW), draft, ids, full(FEW, count), row_keys)
    assert (np.asarray(found.num_accepted) == count).all()
    assert not np.asarray(found.faults).any()


def test_a_rows_answer_depends_on_its_own_key_alone():
    target, draft = distributions(1, K + 1), distributions(2, K)
    row_keys = keys(FEW)
    ids = drafted(draft, row_keys)
    whole = accept_sampled(
        tiled(target, FEW), tiled(draft, FEW), ids, full(FEW), row_keys
    )
    turned = accept_sampled(
        tiled(target, FEW), tiled(draft, FEW), ids[::-1], full(FEW), row_keys[::-1]
    )
    assert len(set(np.asarray(whole.next_ids).tolist())) > 1
    np.testing.assert_array_equal(whole.num_accepted, turned.num_accepted[::-1])
    np.testing.assert_array_equal(whole.next_ids, turned.next_ids[::-1])


@pytest.mark.case("NAN-02")
@pytest.mark.parametrize(
    "of", ["target", "draft", "unnormalised", "negative", "impossible"]
)
def test_what_is_no_probability_is_a_fault_and_no_accept_rate_of_one(of):
    target, draft = distributions(1, K + 1), distributions(2, K)
    rows = np.array(tiled(target, FEW)), np.array(tiled(draft, FEW))
    if of == "target":
        rows[0][2, 1] = np.nan
    elif of == "draft":
        rows[1][2, 0] = np.nan
    elif of == "unnormalised":
        rows[1][2, 0] *= 2
    elif of == "negative":
        rows[1][2, 0, :2] += (1, -1)
    row_keys = keys(FEW)
    ids = drafted(draft, row_keys)
    if of == "impossible":
        ids = ids.at[2, 0].set(0)
        rows[1][2, 0] = np.eye(V)[1]  # a token that the draft could not have drawn
    found = accept_sampled(*map(jnp.asarray, rows), ids, full(FEW), row_keys)
    np.testing.assert_array_equal(found.faults, np.arange(FEW) == 2)
    assert (found.num_accepted[2], found.next_ids[2]) == (0, V)
    assert (np.delete(np.asarray(found.next_ids), 2) < V).all()


@pytest.mark.case("NAN-02")
def test_nan_logits_are_seen_though_their_choice_is_token_zero():
    logits = np.zeros((3, 2, V), np.float32)
    logits[1, 1, 3] = np.nan
    assert int(jnp.argmax(jnp.asarray(logits)[1, 1])) == 3  # as good as any other
    np.testing.assert_array_equal(
        nan_rows(jnp.asarray(logits), full(3, 2)), [False, True, False]
    )
    assert not np.asarray(nan_rows(jnp.asarray(logits), full(3, 1))).any()
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_k=2)):
        packed = sampler.pack_rows([sampler.RowKey(sampling, 0, 0)] * 3, 3)
        probs = np.asarray(sampler.probabilities(jnp.asarray(logits), packed))
        assert np.isnan(probs[1, 1]).all()
        assert np.isfinite(probs[[0, 2]]).all()


def test_one_trace_serves_every_batch_of_a_shape():
    target, draft = distributions(1, K + 1), distributions(2, K)
    before = accept_sampled._cache_size()
    for seed in range(3):
        row_keys = keys(FEW, seed=seed)
        ids = drafted(draft, row_keys)
        accept_sampled(
            tiled(target, FEW), tiled(draft, FEW), ids, full(FEW, seed), row_keys
        )
    assert accept_sampled._cache_size() <= before + 1
