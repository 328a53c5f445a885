"""The real model, through the engine: greedy tokens are those of transformers.

The reference stands in tests/golden/smollm2_greedy.json, with the versions that made
it; `python -m experiments run configs/bench_serve.toml --set reference=PATH` makes it
again.
"""

import json

import pytest

from experiments import greedy
from kvmem import config as configs
from kvmem.serve import SamplingParams


@pytest.fixture(scope="session")
def reference(repo_root):
    """What transformers generated in float32, with the margin of every token."""
    path = repo_root / "tests" / "golden" / "smollm2_greedy.json"
    return json.loads(path.read_text())["sequences"]


@pytest.fixture(scope="session")
def smollm2_engine():
    """An engine of the demo model that compiles two programs only."""
    settings = [
        "model.source=smollm2-135m-instruct",
        "model.kv_dtype=float32",
        "pool.pages=256",
        "pool.poison=true",
        "pool.checked=true",
        "serve.max_batch=8",
        "serve.batches=[8]",
        "serve.prefill_chunk=64",
        "serve.chunks=[64]",
        "serve.max_length=192",
        "serve.widths=[192]",
    ]
    return configs.load(None, settings, env={}).engine()


def test_greedy_tokens_equal_those_of_transformers(smollm2_engine, reference):
    prompts = [row["prompt_ids"] for row in reference]
    known = [greedy.Continuation(r["output_ids"], r["margins"]) for r in reference]
    sampling = SamplingParams(max_tokens=len(known[0].ids), ignore_eos=True)
    outputs = smollm2_engine.generate(prompts, sampling)
    verdict = greedy.judge([output.output_ids for output in outputs], known)
    assert verdict.ok, str(verdict)
    assert len(reference) == 20 and verdict.num_sequences == 20
    assert len(smollm2_engine.num_traces) == 2


def test_the_texts_have_the_ids_that_were_compared(smollm2_engine, reference):
    encode = smollm2_engine.tokenizer.encode
    for row in reference:
        assert encode(row["text"]) == row["prompt_ids"]
