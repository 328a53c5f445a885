"""The tiny configs that ship compute what they would without a cache."""

import jax
import numpy as np
import pytest

from kvmem import config
from kvmem.model.hybrid.decoder import HybridDecoder

TINY = [
    "gemma3",  # five windows to a full attention
    *(
        pytest.param(name, marks=pytest.mark.long)  # in test_decoder.py by kind
        for name in ("gpt_oss", "deepseek_v32", "qwen3_next")
    ),
]
LENGTH, CUTS = 80, (40, 33, 71)  # windows of 32 and the best 64 of an indexer bite


@pytest.mark.parametrize("name", TINY)
def test_logits_over_pages_are_those_of_the_dense_pass(name, repo_root, make_texts):
    path = repo_root / "configs" / "models" / f"{name}_tiny.toml"
    loaded = config.load(path, env={})
    model = loaded.model.load()
    decoder = HybridDecoder.from_params(model.spec, model.params)
    texts = np.random.default_rng(9).integers(0, 256, (3, LENGTH)).astype(np.int32)
    dense = np.asarray(jax.jit(decoder.dense)(texts))
    run = make_texts(model, loaded.pool.page_size, longest=LENGTH)
    for begin, end in (([0, 0, 0], CUTS), (CUTS, [LENGTH] * 3)):
        tokens = np.full((3, LENGTH), 256, np.int32)
        for row, (a, b) in enumerate(zip(begin, end, strict=True)):
            tokens[row, : b - a] = texts[row, a:b]
        found = run.read(tokens, np.subtract(end, begin))
        expected = dense[range(3), np.subtract(end, 1)]
        np.testing.assert_allclose(found, expected, atol=5e-4)
    assert np.abs(expected).max() > 0.1
