"""Blended pages, against a dense reference that keeps no pages and turns no keys.

The reference computes each text alone, encodes its keys afresh at the places where it
stands in the prompt, and does what CacheBlend does over whole arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.blend import recompute, walk
from kvmem.model.decoder import Decoder
from kvmem.model.rotate import angles
from kvmem.serve import SamplingParams

LAYERS, HEADS, DIM = 5, 4, 8
GOING = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = pytest.mark.long


class Dense:
    """Blending over whole arrays."""

    def __init__(self, model):
        self.decoder = Decoder.from_params(model.spec, model.params)
        self.rope = model.spec.rope

    def layer(self, index, x, places, keep=None):
        """Return q, k, v and what x becomes behind the layer, over `keep`'s k, v."""
        layer = self.decoder.layers[index]
        cos, sin = angles(self.rope, DIM, jnp.asarray(places, jnp.int32)[None])
        q, k, v = layer.heads(x, cos, sin)
        whole = (k, v) if keep is None else keep(k, v)
        seen = np.arange(whole[0].shape[1])[None, :] <= np.asarray(places)[:, None]
        mask = jnp.asarray(seen)[None, None]
        mixed = jax.nn.dot_product_attention(q, *whole, mask=mask)
        return k, v, layer.mix(x, mixed, None)

    def embedded(self, tokens):
        return self.decoder.embed[...][jnp.asarray(tokens)][None].astype(jnp.float32)

    def alone(self, tokens, first):
        """Return k, v of a text alone, [L, n, H, D], its keys as if it began at
        `first`."""
        x, found = self.embedded(tokens), []
        for index in range(LAYERS):
            k, v, behind = self.layer(index, x, range(len(tokens)))
            cos, sin = angles(self.rope, DIM, first + jnp.arange(len(tokens))[None])
            k = self.decoder.layers[index].heads(x, cos, sin)[1]
            found.append((k[0], v[0]))
            x = behind
        return found

    def blended(self, tokens, old, is_reused, count, check):
        """Return k, v [n, H, D] of every layer, and the chosen tokens."""
        n, x, found = len(tokens), self.embedded(tokens), []
        rows, chosen = np.arange(n), None
        for index in range(LAYERS):
            if index <= check and count:
                k, v, behind = self.layer(index, x, rows)
                found.append((k[0], v[0]))
                if index == check:
                    score = np.square(np.asarray(k[0]) - old[index][0]).sum((1, 2))
                    score[~is_reused] = np.inf
                    count_all = int((~is_reused).sum()) + count
                    chosen = np.sort(np.argsort(-score, kind="stable")[:count_all])
                    rows, behind = chosen, behind[:, chosen]
                x = behind
                continue
            if chosen is None:
                chosen = rows = np.flatnonzero(~is_reused)
                x = x[:, chosen]
            held = [jnp.asarray(part) for part in old[index]]

            def keep(k, v, held=held, rows=rows):
                held[0] = held[0].at[rows].set(k[0])
                held[1] = held[1].at[rows].set(v[0])
                return held[0][None], held[1][None]

            _, _, x = self.layer(index, x, rows, keep)
            found.append(tuple(held))
        return found, chosen


@pytest.fixture(scope="session")
def dense(deep_model):
    return Dense(deep_model())


def parts(text, prompt):
    """Return the tokens of a prompt of (text's seed or gap, length) and its runs."""
    tokens, runs = [], []
    for seed, length, is_found in prompt:
        if is_found:
            runs.append((len(tokens), seed, length))
        tokens += text(length, seed)
    return tokens, runs


def pages_of(engine, tokens):
    """Return f32[n, L, H, 2, D] of all tokens but the last, and the request's id."""
    request_id = engine.add(tokens, GOING)
    engine.step()
    records = np.ascontiguousarray(engine.records(request_id)[: len(tokens) - 1])
    return records.view(np.float32).reshape(-1, LAYERS, HEADS, 2, DIM), request_id


def expected(dense, tokens, runs, text, ratio, check):
    n = len(tokens) - 1
    old = [
        (np.zeros((n, HEADS, DIM)), np.zeros((n, HEADS, DIM))) for _ in range(LAYERS)
    ]
    is_reused = np.zeros(n, bool)
    for start, seed, length in runs:
        for index, kv in enumerate(dense.alone(text(length, seed), start)):
            for field in (0, 1):
                old[index][field][start : start + length] = kv[field]
        is_reused[start : start + length] = True
    count = int(is_reused.sum() * ratio + 1e-9)
    found, chosen = dense.blended(tokens[:n], old, is_reused, count, check)
    return np.stack([np.stack([k, v], axis=2) for k, v in found], 1), chosen


PROMPT = ((9, 5, False), (2, 24, True), (8, 3, False), (1, 20, True), (7, 6, False))


@pytest.mark.parametrize(
    "ratio, check",
    [
        (0.0, 1),
        (0.5, 1),
        (0.15, 4),
        pytest.param(0.15, 1, marks=LONG),
        pytest.param(0.3, 2, marks=LONG),
    ],
)
def test_pages_are_those_of_a_dense_blend(blending_engine, dense, text, ratio, check):
    engine = blending_engine(ratio=ratio, check_layer=check)
    for seed, length in ((1, 20), (2, 24)):
        engine.register(text(length, seed))
    tokens, runs = parts(text, PROMPT)
    wanted, chosen = expected(dense, tokens, runs, text, ratio, check)
    found, _ = pages_of(engine, tokens)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    assert len(chosen) == 13 + int(44 * ratio)


def test_another_share_is_told_apart(blending_engine, dense, text):
    engine = blending_engine(ratio=0.5)
    for seed, length in ((1, 20), (2, 24)):
        engine.register(text(length, seed))
    tokens, runs = parts(text, PROMPT)
    wanted, _ = expected(dense, tokens, runs, text, 0.0, 1)
    found, _ = pages_of(engine, tokens)
    assert np.abs(found - wanted).max() > 1e-2


def test_with_every_token_chosen_pages_are_those_of_a_prefill(
    blending_engine, text, monkeypatch
):
    tokens, _ = parts(text, PROMPT)
    engine = blending_engine(ratio=1.0)
    for seed, length in ((1, 20), (2, 24)):
        engine.register(text(length, seed))
    plain, request_id = pages_of(engine, tokens)
    engine.abort(request_id)
    assert engine.take_output(request_id).reused_tokens == 0, "ratio 1 is a prefill"
    engine.table.clear_cache()
    # The pass itself, made to run where an engine would not.
    monkeypatch.setattr(type(engine.blender.config), "recomputes_all", False)
    found, request_id = pages_of(engine, tokens)
    engine.abort(request_id)
    assert engine.take_output(request_id).recomputed_tokens == 44
    np.testing.assert_allclose(found, plain, atol=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tp": 2, "executor": "vmap"}, marks=LONG),
        {"tp": 2},
        pytest.param({"order": "token_major"}, marks=LONG),
        {"page_size": 8, "order": "slot_major"},
    ],
    ids=str,
)
def test_every_topology_and_page_order_blends_alike(blending_engine, text, changes):
    tokens, _ = parts(text, PROMPT)
    found = []
    for each in ({}, changes):
        engine = blending_engine(**each)
        for seed, length in ((1, 20), (2, 24)):
            engine.register(text(length, seed))
        found.append(pages_of(engine, tokens)[0])
    np.testing.assert_allclose(found[0], found[1], atol=2e-5)


def test_a_shape_is_compiled_once(blending_engine, text):
    engine = blending_engine()
    engine.register(text(20, 1))
    traces = []
    for gap in (3, 4, 5, 60):
        engine.generate([text(gap, 8) + text(20, 1) + [5]], GOING)
        traces.append(engine.blender.num_traces)
    assert traces[0] == traces[1] == traces[2] < traces[3]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 225, 255, 257, 1_454, 2_048])
def test_sizes_are_rounded_up_by_a_quarter_at_most(count):
    size = recompute.rounded(count)
    assert count <= size <= max(32, count * 5 / 4)
    assert recompute.rounded(size) == size
    sizes = {recompute.rounded(n) for n in range(1, 2_049)}
    assert len(sizes) == 4 * 6 + 1


def test_rows_past_the_end_are_zeros():
    rows = jnp.arange(6.0).reshape(1, 3, 2)
    found = walk.taken(rows, jnp.asarray([2, 0, 3]))
    np.testing.assert_array_equal(found, [[[4, 5], [0, 1], [0, 0]]])


def test_blocks_of_queries_attend_alike(blending_engine, text, monkeypatch):
    tokens, _ = parts(text, PROMPT)
    found = []
    for block in (256, 8):
        monkeypatch.setattr(walk, "_BLOCK", block)
        engine = blending_engine()
        engine.register(text(24, 2))
        found.append(pages_of(engine, tokens)[0])
    np.testing.assert_allclose(found[0], found[1], atol=2e-5)
