"""A draft model with a pool of its own: beside the target, and never in its way."""

import numpy as np
import pytest

from kvmem import budget, geometry
from kvmem.geometry import Topology
from kvmem.model import cut
from kvmem.serve import SamplingParams
from kvmem.serve.draft import TwoEngine

PAGE = 4


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@pytest.fixture
def draft_of(tiny_model):
    """A draft of one pool of `pages` pages: a tiny model, or another one's layers."""

    def make(model=None, pages=64, page_size=PAGE, **facts):
        model = model or tiny_model(seed=1)
        layers = model.spec.layer_specs("float32")
        groups = geometry.group_layers(layers, page_size)
        (paid,) = budget.solve(groups, Topology(), (), max_pages=pages).pools
        return TwoEngine(model, groups, paid, **{"draft_tokens": 3, **facts})

    return make


@pytest.fixture
def made(engine, hybrid_engine):
    def make(kind, draft=None, **more):
        if kind == "full":
            return engine(draft=draft, **more)
        return hybrid_engine(kind, draft=draft, **more)

    return make


@pytest.mark.parametrize("kind", ["full", "window", "indexer", "state"])
def test_greedy_tokens_beside_a_draft_model_are_those_without(made, draft_of, kind):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    plain = made(kind).generate(prompts, greedy(17))
    drafted = made(kind, draft_of())
    outputs = drafted.generate(prompts, greedy(17))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert stats.drafted > 0 and not stats.faults
    pages = drafted.verifier.proposer.pages
    assert pages.table.accounts().in_use == 0


def test_a_draft_that_is_the_target_is_always_right(made, tiny_model, draft_of):
    drafted = made("full", draft_of(tiny_model()))
    drafted.generate([text(seed, 9 + 7 * seed) for seed in range(4)], greedy(17))
    stats = drafted.stats().drafting
    assert (stats.accept_rate, stats.tokens_per_step) == (1, 4)


def test_a_window_of_the_draft_is_read_as_it_moves(made, hybrid_model, draft_of):
    target = hybrid_model("window")
    drafted = made("window", draft_of(target))
    drafted.generate([text(seed, 9 + 7 * seed) for seed in range(4)], greedy(17))
    assert drafted.stats().drafting.accept_rate == 1


def test_the_first_layers_of_a_model_draft_for_it(made, tiny_model, draft_of):
    model = tiny_model()
    first = cut.first_layers(model, 1)
    prompts = [text(seed, 12) for seed in range(3)]
    plain = made("full").generate(prompts, greedy(12))
    outputs = made("full", draft_of(first)).generate(prompts, greedy(12))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
