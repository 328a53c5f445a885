"""Hybrids served over one pool of all their groups: tokens as without any cache."""

import random

import numpy as np
import pytest

from kvmem import errors
from kvmem.config import Config, ModelConfig, PoolConfig
from kvmem.serve import SamplingParams

KINDS = ("window", "indexer", "state")
PAGE = 4


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def residency(engine):
    """Hold what running sequences have of each group to the rule."""
    for sequence in engine.scheduler.running:
        held, history = sequence.held, sequence.num_computed
        for group, life in enumerate(engine.table.lives):
            if life.kind == "state":
                assert len(held.columns[group]) == 1
                continue
            end, stale = held.end(group), life.stale(history, PAGE)
            assert held.ordinals(group) == [p for p in range(end) if p not in stale]
            assert len(held.columns[group]) <= life.peak(96, PAGE, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_of_a_hybrid_without_a_cache(
    hybrid_engine, hybrid_dense, kind
):
    made = hybrid_engine(kind)
    prompts = [text(seed, length) for seed, length in enumerate((1, 16, 17, 50))]
    begun = [made.add(prompt, greedy(14)) for prompt in prompts]
    while made.has_work:
        made.step()
        residency(made)
    for prompt, request_id in zip(prompts, begun, strict=True):
        want = hybrid_dense(kind, prompt, 14)
        assert made.take_output(request_id).output_ids == want
    assert made.accounts.in_use == 0


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        ("window", 4),
        ("state", 2),
        pytest.param("indexer", 2, marks=pytest.mark.long),
    ],
)
def test_every_topology_serves_a_hybrid_alike(hybrid_engine, hybrid_dense, kind, tp):
    made = hybrid_engine(kind, tp=tp)
    prompt = text(10, 23)
    for cached in (0, 20):
        (output,) = made.generate(prompt, greedy(8))
        assert output.cached_tokens == cached
        assert output.output_ids == hybrid_dense(kind, prompt, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_used_as_far_as_every_group_goes(hybrid_engine, hybrid_dense, kind):
    made = hybrid_engine(kind)
    stem, tails = text(11, 30), [text(seed, 9) for seed in (12, 13, 14)]
    found = []
    for tail in tails:
        prompt = [*stem, *tail]
        (output,) = made.generate(prompt, greedy(6))
        assert output.output_ids == hybrid_dense(kind, prompt, 6)
        found.append(output.cached_tokens)
    # a state has no snapshot where two texts part until the second has stood there
    assert found == ([0, 0, 28] if kind == "state" else [0, 28, 28])
    again = [*stem, *tails[2]]
    (output,) = made.generate(again, greedy(6))
    assert output.cached_tokens == 36
    longer = [*again, *output.output_ids, *text(15, 5)]
    (output,) = made.generate(longer, greedy(6))
    assert output.cached_tokens == 44  # 45 had been computed
    assert output.output_ids == hybrid_dense(kind, longer, 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [32, 31])
def test_a_prompt_of_whole_pages_is_resumed_one_page_before_its_end(
    hybrid_engine, hybrid_dense, kind, length
):
    """Two lengths at which vLLM #51094 restored a state one token too far."""
    made, prompt = hybrid_engine(kind), text(16, length)
    want = hybrid_dense(kind, prompt, 5)
    for cached in (0, 28):
        (output,) = made.generate(prompt, greedy(5))
        assert (output.cached_tokens, output.output_ids) == (cached, want)


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_hybrids_end_with_the_same_tokens(hybrid_engine, hybrid_dense, kind):
    made = hybrid_engine(kind)
    prompts = [text(50 + i, 18) for i in range(4)]
    begun = [made.add(prompt, greedy(40)) for prompt in prompts]
    while made.has_work:
        made.step()
        residency(made)
    assert made.scheduler.num_preempted > 0
    for prompt, request_id in zip(prompts, begun, strict=True):
        want = hybrid_dense(kind, prompt, 40)
        assert made.take_output(request_id).output_ids == want
    assert made.accounts.in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_hybrid_do_not_touch_each_other(hybrid_engine, kind):
    params = SamplingParams(max_tokens=9, temperature=1.2, seed=3, n=3, ignore_eos=True)
    prompt = text(17, 18)
    (output,) = hybrid_engine(kind).generate(prompt, params)
    ids = [completion.output_ids for completion in output.completions]
    assert len(set(ids)) == 3
    alone = SamplingParams(max_tokens=9, temperature=1.2, seed=3, ignore_eos=True)
    (first,) = hybrid_engine(kind, prefix_cache=False).generate(prompt, alone)
    assert first.output_ids == ids[0]


def test_a_hybrid_that_is_reset_forgets_every_group(hybrid_engine):
    made = hybrid_engine("state")
    made.generate(text(18, 30), greedy(4))
    assert made.accounts.evictable > 0
    made.reset()
    assert made.accounts.free == made.accounts.total
    (again,) = made.generate(text(18, 30), greedy(4))
    assert again.cached_tokens == 0


def test_a_request_that_never_fits_is_refused_with_every_groups_numbers(hybrid_engine):
    made = hybrid_engine("window", pages=20)
    with pytest.raises(errors.OutOfPages) as refused:
        made.add(text(19, 60), greedy(20))
    assert "20 of full, 7 of window(10): 27 pages, the pool has 20" in str(
        refused.value
    )
    assert not made.has_work


def test_a_store_for_several_groups_is_refused_before_anything_is_made(
    hybrid_model, hybrid_engine
):
    made = hybrid_engine("window")
    words = "for the groups full, window10: .* kept in parts"
    with pytest.raises(errors.IncompatiblePlan, match=words):
        type(made)(
            made.model, made.groups, made.budget, store=object(), config=made.config
        )


@pytest.mark.own_steps
def test_traces_of_a_hybrid_are_the_declared_buckets(hybrid_engine):
    made = hybrid_engine("window", widths=(48, 96))
    assert made.warm_up() == len(made.buckets.all()) == 4
    made.generate([text(20, 30), text(21, 5), text(22, 60)], greedy(20))
    assert set(made.num_traces.values()) == {1}


def pressure(made, steps, seed):
    """Serve random requests; every step is checked by the engine itself."""
    rng = random.Random(seed)
    stems = [[rng.randrange(256) for _ in range(40)] for _ in range(3)]
    going, aborted = [], 0
    for _ in range(steps):
        if len(made.scheduler.waiting) < 3:
            prompt = rng.choice(stems)[: rng.randrange(2, 25)] + [rng.randrange(256)]
            count = rng.randrange(1, 60)
            going.append(made.add(prompt, greedy(count, n=rng.choice((1, 1, 2)))))
        made.step()
        residency(made)
        free, evictable, in_use, total = made.accounts
        assert free + evictable + in_use == total
        if rng.random() < 0.05:
            aborted += made.abort(rng.choice(going))
    stats = made.stats()
    assert min(aborted, stats.hits, stats.preempted, stats.evicted_pages) > 0
    for request_id in going:
        made.abort(request_id)
    assert (made.accounts.in_use, made.has_work) == (0, False)
    made.reset()
    assert made.accounts.free == made.accounts.total


@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_under_pressure_gives_every_page_back(hybrid_engine, kind):
    pressure(hybrid_engine(kind), 250, seed=1)


@pytest.mark.long
@pytest.mark.own_steps
@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_under_pressure_for_2000_steps(hybrid_engine, kind):
    made = hybrid_engine(kind)
    made.warm_up()
    pressure(made, 2_000, seed=2)
    assert made.num_traces == dict.fromkeys(made.buckets.all(), 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pool": PoolConfig(pages=60, certified=True)}, "certified to false"),
        ({"pool": PoolConfig(pages=60, kind="split")}, 'pool.kind to "unified"'),
    ],
)
def test_what_several_groups_cannot_have_yet_is_refused_before_weights_are_drawn(
    hybrid_model, monkeypatch, changes, words
):
    facts = hybrid_model("state").spec.facts
    asked = {"pool": PoolConfig(pages=60), **changes}
    made = Config(model=ModelConfig(facts=facts, seed=1), **asked)
    monkeypatch.setattr(ModelConfig, "load", lambda self: pytest.fail("too late"))
    with pytest.raises(errors.IncompatiblePlan) as refused:
        made.engine()
    assert words in str(refused.value)
