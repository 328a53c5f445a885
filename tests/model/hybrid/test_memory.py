"""What a hybrid keeps matters, and nothing else does."""

import numpy as np
import pytest

from kvmem.geometry import group_layers
from kvmem.model import cache_facts
from kvmem.model.hybrid.decoder import HybridDecoder

FAMILIES = ["gpt_oss", "gemma3 shared", "deepseek_v32", "qwen3_next"]


def whole(run, texts):
    return run.read(texts, np.full(3, 24))


def dense(model, texts):
    return np.asarray(HybridDecoder.from_params(model.spec, model.params).dense(texts))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_bfloat16_rounds_as_the_dense_pass_does(
    family, texts, texts_of, dense_of
):
    run = texts_of(family, kv_dtype="bfloat16")
    run.read(texts, np.array([9, 16, 1]))
    tokens = np.stack([np.roll(t, -n) for t, n in zip(texts, (9, 16, 1), strict=True)])
    found = run.read(tokens, np.array([15, 8, 23]))
    rounded = dense_of(family, "bfloat16")[:, 23]
    # A key or an input near the middle of two bfloat16 may be rounded either way.
    np.testing.assert_allclose(found, rounded, atol=0.02)
    exact = dense_of(family)[:, 23]
    assert 1e-4 < np.abs(found - exact).max() < 0.3


def test_latents_in_fp8_round_as_the_dense_pass_does(texts, texts_of, dense_of):
    run = texts_of("deepseek_v32", kv_dtype="float8_e4m3fn")
    assert run.groups[0].record_nbytes == 2 * (128 + 4 + 2 * 4)
    found = whole(run, texts)
    rounded = dense_of("deepseek_v32", "float8_e4m3fn")[:, 23]
    np.testing.assert_allclose(found, rounded, atol=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_poison_in_a_page_that_is_read_shows_in_its_text_alone(
    family, texts, texts_of, dense_of
):
    run = texts_of(family)
    run.read(texts, np.full(3, 20))
    for group in range(len(run.groups)):
        kept = (
            run.pages.copy(),
            [[dict(held) for held in seqs] for seqs in run.held],
            list(run.free),
            run.lengths.copy(),
        )
        last = max(run.held[group][1])
        run.pages[:, run.held[group][1][last]] = 0xFF
        tokens = np.roll(texts, -20, axis=1)
        logits = run.read(tokens, np.full(3, 4))
        if run.groups[group].name != "indexer":  # a NaN score is merely not selected
            assert np.isnan(logits[1]).all(), run.groups[group].name
        np.testing.assert_allclose(
            logits[[0, 2]], dense_of(family)[[0, 2], 23], atol=2e-4
        )
        run.pages, run.held, run.free, run.lengths = kept


def test_a_text_in_the_pages_of_another_is_new(texts, texts_of, dense_of):
    run = texts_of("qwen3_next")
    whole(run, texts[[1, 2, 0]])
    for seq in range(3):
        run.give_back(seq)
    found = whole(run, texts)  # states and keys of other texts lie in every page
    np.testing.assert_allclose(found, dense_of("qwen3_next")[:, 23], atol=2e-4)


def test_a_state_that_stands_at_the_beginning_is_zeros_whatever_lies_there(
    texts, texts_of, dense_of
):
    run = texts_of("qwen3_next")
    whole(run, texts[[1, 2, 0]])
    run.lengths[:] = 0  # the same pages, nothing given back
    found = whole(run, texts)
    np.testing.assert_allclose(found, dense_of("qwen3_next")[:, 23], atol=2e-4)


def test_windows_hold_no_more_pages_than_the_rule_says(texts, texts_of):
    run = texts_of("gpt_oss", page_size=4)
    window = run.groups[1].lifecycle
    assert window.kind == "window"
    for n in range(24):
        run.read(texts[:, n : n + 1], np.ones(3, np.int32))
        assert run.num_held(1, 0) == window.resident(n + 1, n, 4)
        assert run.num_held(0, 0) == -(-(n + 1) // 4)


def test_a_window_longer_than_every_text_stands_in_the_pages_of_full_attention(
    model_of, texts, make_texts
):
    model = model_of("gpt_oss", sliding_window=24)
    run = make_texts(model, 4)
    assert [group.name for group in run.groups] == ["full"]
    run.read(texts, np.array([5, 17, 9]))
    tokens = np.stack([np.roll(t, -n) for t, n in zip(texts, (5, 17, 9), strict=True)])
    found = run.read(tokens, np.array([19, 7, 15]))
    np.testing.assert_allclose(found, dense(model, texts)[:, 23], atol=2e-4)


def test_learned_sinks_change_every_logit(model_of, texts):
    model = model_of("gpt_oss")
    decoder = HybridDecoder.from_params(model.spec, model.params)
    silent = {
        name: array - 100 if name.endswith("sinks") else array
        for name, array in model.params.items()
    }
    other = HybridDecoder.from_params(model.spec, silent)
    change = np.abs(np.asarray(decoder.dense(texts) - other.dense(texts)))
    assert (change.max(axis=-1) > 1e-2).all()


@pytest.mark.parametrize(
    "family,field,reach",
    [
        ("gpt_oss", "sliding_window", 6),
        ("gemma3", "sliding_window", 8),
        ("deepseek_v32", "index_topk", 7),
    ],
)
def test_what_is_out_of_sight_begins_where_the_config_says(
    family, field, reach, model_of, texts
):
    near = dense(model_of(family), texts)
    far = dense(model_of(family, **{field: 500}), texts)
    np.testing.assert_allclose(near[:, :reach], far[:, :reach], atol=1e-4)
    assert (np.abs(near - far)[:, reach:].max(axis=-1) > 1e-3).all()


def test_a_layer_that_shares_a_cache_keeps_none(model_of, texts_of):
    spec = model_of("gemma3 shared").spec
    shares = {each.name: each.shares for each in spec.layer_specs()}
    assert list(shares.values()) == [None, None, "layers.0", "layers.1"]
    run = texts_of("gemma3 shared")
    held = {entry.field.layer for env in run.envelopes for entry in env.entries}
    assert held == {"layers.0", "layers.1"}


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "deepseek_v32", "qwen3_next"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_plan_of_the_facts_keeps_the_rows_that_the_decoder_keeps(
    family, kv_dtype, facts_of, model_of
):
    planned = cache_facts.layers(facts_of(family).plain(), kv_dtype)
    computed = model_of(family).spec.layer_specs(kv_dtype)
    for plan, spec in zip(planned, computed, strict=True):
        assert plan.fields == spec.fields
        assert (plan.name, plan.index, plan.kind) == (spec.name, spec.index, spec.kind)
        assert plan.window == spec.window
    assert [g.name for g in group_layers(planned, 4)] == [
        g.name for g in group_layers(computed, 4)
    ]
