"""Drafting on head shards and token shards: the tokens of one rank without a draft."""

import numpy as np
import pytest

from kvmem.geometry import Topology
from kvmem.serve import SamplingParams
from kvmem.serve.draft import FrozenKV, NGram

CASES = [
    pytest.param("ngram", "full", Topology(2), marks=pytest.mark.long),
    ("frozen_kv", "full", Topology(1, 2)),
    pytest.param("two_engine", "full", Topology(2, 2), marks=pytest.mark.long),
    pytest.param("ngram", "window", Topology(1, 2), marks=pytest.mark.long),
    pytest.param("ngram", "state", Topology(2), marks=pytest.mark.long),
    pytest.param("frozen_kv", "window", Topology(1, 2), marks=pytest.mark.long),
    pytest.param("two_engine", "indexer", Topology(2), marks=pytest.mark.long),
    pytest.param("two_engine", "full", Topology(1, 2, 2), marks=pytest.mark.long),
    pytest.param("frozen_kv", "full", Topology(4), marks=pytest.mark.long),
]


def repeating(seed, length):
    """A text of a stem that comes again, so that something is looked up."""
    stem = np.random.default_rng(seed).integers(0, 256, 5).tolist()
    return (stem * length)[:length]


@pytest.mark.parametrize(("name", "kind", "topology"), CASES)
def test_drafted_tokens_of_shards_are_those_of_one_rank(
    made, draft_of, name, kind, topology
):
    prompts = [repeating(seed, 11 + 3 * seed) for seed in range(3)]
    greedy = SamplingParams(max_tokens=14, ignore_eos=True)
    plain = made(kind).generate(prompts, greedy)
    draft = {
        "ngram": lambda: NGram(3),
        "frozen_kv": lambda: FrozenKV(1, 3),
        "two_engine": lambda: draft_of(topology=topology),
    }[name]()
    shards = {"tp": topology.tp, "dcp": topology.dcp, "interleave": topology.interleave}
    drafted = made(kind, draft, **shards)
    outputs = drafted.generate(prompts, greedy)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert stats.drafted > 0 and not stats.faults
    assert drafted.accounts.in_use == 0
