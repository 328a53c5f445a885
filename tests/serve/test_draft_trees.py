"""Trees: several chains verified at once, and the accepted one moved into place."""

import numpy as np
import pytest

from kvmem import errors
from kvmem.serve import SamplingParams
from kvmem.serve.draft import FrozenKV
from kvmem.serve.work import Chains

LONG = pytest.mark.long


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def test_each_chain_of_a_tree_follows_the_text_and_hides_those_before_it():
    positions, firsts, ends = Chains(first=8, length=2, count=3).layout(range(7, 14))
    assert positions == [7, 8, 9, 8, 9, 8, 9]
    assert firsts == [8] * 7
    assert ends == [8, 8, 8, 10, 10, 12, 12]


@pytest.fixture
def split(engine):
    """Engines of one split pool, with a tree of `topk` chains of two tokens or none."""

    def make(topk=None, layers=1, **more):
        draft = None if topk is None else FrozenKV(layers, 2 * topk, topk)
        return engine(kind="split", draft=draft, **more)

    return make


@pytest.mark.parametrize("topk", [2, pytest.param(4, marks=LONG)])
def test_greedy_tokens_of_trees_are_those_without(split, topk):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    plain = split().generate(prompts, greedy(17))
    drafted = split(topk)
    outputs = drafted.generate(prompts, greedy(17))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert 0 < stats.accepted < stats.drafted and not stats.faults
    assert drafted.accounts.in_use == 0


def test_the_tree_of_a_whole_target_holds_its_choice(split):
    drafted = split(2, layers=2)
    drafted.generate([text(seed, 9) for seed in range(4)], greedy(16))
    stats = drafted.stats().drafting
    assert stats.tokens_per_step == 3  # of two chains one stands whole, and one more


def test_samples_and_short_pools_are_served_by_trees_as_without(split):
    warm = greedy(15, temperature=1.2, top_k=4, seed=2, n=2)
    prompts = [text(60 + seed, 14) for seed in range(3)]
    plain = split().generate(prompts, warm)
    drafted = split(4, pages=26)
    outputs = drafted.generate(prompts, warm)
    assert [o.completions for o in outputs] == [o.completions for o in plain]
    assert drafted.stats().drafting.accepted > 0


@pytest.mark.parametrize(
    "topk", [2, pytest.param(1, marks=LONG), pytest.param(4, marks=LONG)]
)
def test_pages_change_in_the_slots_of_accepted_tokens_alone(split, topk):
    """And what stands there is what plain steps write, whichever chain it came from."""
    prompt = text(26, 9)
    plain, drafted = split(), split(topk)
    for each in (plain, drafted):
        each.add(prompt, greedy(30))
        each.step()
    moved = 0
    while drafted.has_work:
        before, first = row_bytes(drafted)
        deltas = drafted.step()
        if not drafted.has_work:
            break
        after, end = row_bytes(drafted)
        for _ in deltas:
            plain.step()
        np.testing.assert_array_equal(after[:first], before[:first])
        assert not after[end:].any()
        want, same = row_bytes(plain)
        assert same == end
        floats = (each[:end].view(np.float32) for each in (after, want))
        np.testing.assert_allclose(*floats, atol=1e-4)
        moved += len(deltas) > 1
    assert moved > 0
    assert drafted.stats().drafting.accepted < drafted.stats().drafting.drafted


def row_bytes(made):
    """The bytes of every slot of the one sequence that runs: u8[slots, bytes]."""
    (sequence,) = made.scheduler.running
    made.pool = made.table.apply(made.pool)
    physical = made.table.ledger.translate(0, sequence.held.columns[0])
    pages = np.asarray(made.pool.pages)[0, np.asarray(physical)]
    rows = pages.reshape(len(pages), -1, 4, 32)  # head-major: rows of 4 slots
    by_slot = np.moveaxis(rows, 2, 1).reshape(len(pages) * 4, -1)
    return by_slot.copy(), sequence.num_computed


@pytest.mark.own_steps
@pytest.mark.parametrize("topk", [1, 2])
def test_a_draft_has_one_trace_a_batch_and_width(split, topk):
    """As many one-token sequences as requests times topk, and never another shape."""
    made = split(topk, widths=(128,))
    made.generate([text(seed, 9) for seed in range(4)], greedy(12))
    traces = made.verifier.proposer.num_traces
    assert set(traces.values()) == {1}
    assert {bucket.rows for bucket in traces} == ({4} if topk == 1 else {4, 4 * topk})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kind": "unified"}, "a linear draft chain only"),
        ({"dcp": 2}, "lies whole on one rank"),
    ],
)
def test_trees_are_refused_where_rows_cannot_be_moved(engine, more, words):
    draft = FrozenKV(1, 4, 2)
    with pytest.raises(errors.IncompatiblePlan, match=words):
        engine(draft=draft, **{"kind": "split", **more})
    with pytest.raises(errors.ConfigError, match="equally long"):
        FrozenKV(1, 5, 2)
