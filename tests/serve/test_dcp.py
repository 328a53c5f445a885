"""Engines whose ranks keep different tokens: the same tokens out, the same bytes kept.

Letters of a topology: (tp, dcp, interleave).
"""

import numpy as np
import pytest

from kvmem.serve import SamplingParams

PAGE = 4


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


PROMPTS = [text(seed, length) for seed, length in enumerate((1, 16, 17, 50))]


@pytest.fixture
def alone(engine):
    """Tokens of one rank."""
    outputs = engine().generate(PROMPTS, greedy(12))
    return [output.output_ids for output in outputs]


@pytest.mark.parametrize(
    "topology", [(1, 2, 1), (2, 2, 2), (1, 4, 4), (2, 4, 1), (4, 2, 2)]
)
def test_greedy_tokens_are_those_of_one_rank(engine, alone, topology):
    tp, dcp, interleave = topology
    made = engine(tp=tp, dcp=dcp, interleave=interleave)
    for cached in ((0,) * 4, (0, 8, 16, 48)):
        outputs = made.generate(PROMPTS, greedy(12))
        assert [output.output_ids for output in outputs] == alone
        found = [output.cached_tokens // (PAGE * dcp) for output in outputs]
        assert found == [tokens // (PAGE * dcp) for tokens in cached]


@pytest.mark.parametrize(
    ("kind", "topology"),
    [("window", (1, 2, 2)), ("indexer", (2, 2, 1)), ("state", (2, 2, 4))],
)
def test_a_hybrid_is_served_alike(hybrid_engine, hybrid_dense, kind, topology):
    tp, dcp, interleave = topology
    made = hybrid_engine(kind, tp=tp, dcp=dcp, interleave=interleave, pages=60)
    prompts = [text(seed, length) for seed, length in enumerate((1, 17, 50))]
    for _ in range(2):
        outputs = made.generate(prompts, greedy(14))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.output_ids == hybrid_dense(kind, prompt, 14)
    assert [output.cached_tokens for output in outputs] == [0, 16, 48]
