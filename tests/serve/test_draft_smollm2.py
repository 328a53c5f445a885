"""The real model with every draft: greedy tokens are those of transformers."""

import json

import pytest

from experiments import greedy
from kvmem import config as configs
from kvmem.serve import SamplingParams

DRAFTS = {
    "ngram": ["speculative.draft_tokens=4"],
    "frozen_kv": ["speculative.layers=6", "speculative.steps=3"],
    "two_engine": ["speculative.layers=6", "speculative.steps=3"],
    "mtp": ["speculative.steps=3"],
    "dspark": ["speculative.steps=3"],
    "dflash": ["speculative.draft_tokens=3"],
    "tree": ["speculative.layers=6", "speculative.topk=2", "speculative.steps=2"],
}
UNTRAINED = ("mtp", "dspark", "dflash")  # drawn from a seed: right by chance alone


@pytest.fixture(scope="session")
def drafted_engine():
    def make(mode, tp):
        settings = [
            "model.source=smollm2-135m-instruct",
            "model.kv_dtype=float32",
            "pool.memory=400MB",
            "pool.poison=true",
            "pool.checked=true",
            "serve.max_batch=8",
            "serve.batches=[8]",
            "serve.prefill_chunk=64",
            "serve.chunks=[64]",
            "serve.max_length=192",
            "serve.widths=[192]",
            f"topology.tp={tp}",
            f"speculative.algorithm={'frozen_kv' if mode == 'tree' else mode}",
            f"pool.kind={'split' if mode == 'tree' else 'unified'}",
            *DRAFTS[mode],
        ]
        return configs.load(None, settings, env={}).engine()

    return make


@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("mode", DRAFTS)
def test_greedy_tokens_with_a_draft_equal_those_of_transformers(
    drafted_engine, repo_root, mode, tp
):
    path = repo_root / "tests" / "golden" / "smollm2_greedy.json"
    reference = json.loads(path.read_text())["sequences"]
    known = [greedy.Continuation(r["output_ids"], r["margins"]) for r in reference]
    sampling = SamplingParams(max_tokens=len(known[0].ids), ignore_eos=True)
    engine = drafted_engine(mode, tp)
    outputs = engine.generate([row["prompt_ids"] for row in reference], sampling)
    verdict = greedy.judge([output.output_ids for output in outputs], known)
    assert verdict.ok, str(verdict)
    stats = engine.stats().drafting
    assert stats.drafted > 0 and not stats.faults
    assert stats.accepted > 0 or mode in UNTRAINED
