"""Dense logits equal those of the published modelling code, weight for weight."""

import importlib.util
import json

import numpy as np
import pytest

from kvmem.model.hybrid import latent_layer
from kvmem.model.hybrid.decoder import HybridDecoder


@pytest.fixture(scope="module")
def golden(repo_root):
    """The generator, as a module, and what it found."""
    path = repo_root / "tests" / "golden" / "hybrids.py"
    spec = importlib.util.spec_from_file_location("golden_hybrids", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, json.loads(path.with_suffix(".json").read_text())


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "deepseek_v32", "qwen3_next"])
def test_logits_are_those_of_transformers(family, golden, model_of, texts, monkeypatch):
    module, found = golden
    if family == "deepseek_v32":  # transformers keeps index keys unrounded
        monkeypatch.setattr(latent_layer, "as_kept", lambda rows, *_: rows)
    model = model_of(family)
    logits = HybridDecoder.from_params(model.spec, model.params).dense(texts)
    some = np.asarray(logits)[:, module.AT, : module.NUM_IDS]
    expected = np.array(found[family])
    assert expected.std() > 0.5
    np.testing.assert_allclose(some, expected, atol=2e-4)
