"""Draft layers on virtual ids: pages of the target move, the draft's stay."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import budget, errors, geometry
from kvmem import pool as pools
from kvmem.geometry import Topology
from kvmem.model import mtp
from kvmem.serve import SamplingParams, ServeConfig
from kvmem.serve import engine as engines
from kvmem.serve import loop as loops
from kvmem.serve.draft.dspark import DSpark

PAGES = 30  # of one size in every test, so that steps are compiled once


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@functools.cache
def layers_for(model):
    small = mtp.draw(model, layers=1, seed=3)
    specs = small.spec.layer_specs("float32")
    return small, geometry.group_layers(specs, 4, domain="draft")


@pytest.fixture
def sparked(tiny_model, shared_steps, shared_drafts, monkeypatch):
    """An engine of the tiny model on a poisoned pool, drafting on virtual ids."""
    monkeypatch.setattr(loops, "Stepper", shared_steps)
    for (module, name), shared in shared_drafts.items():
        monkeypatch.setattr(module, name, shared)

    def make(draft_tokens=3, tp=1, dcp=1, **serve):
        model, topology = tiny_model(), Topology(tp, dcp)
        groups = geometry.group_layers(model.spec.layer_specs("float32"), 4)
        draft = DSpark(*layers_for(model), draft_tokens)
        solved = budget.solve(
            groups, topology, (), max_pages=PAGES, draft=draft.draft_groups
        )
        config = {"max_batch": 4, "max_length": 128, "prefill_chunk": 16}
        config |= {"batches": (4,), "chunks": (16,), **serve}
        return engines.Engine(
            model,
            groups,
            solved,
            topology,
            config=ServeConfig(**config),
            poison=True,
            checked=True,
            draft=draft,
        )

    return make


def compact(engine):
    """Move the target's pages to the front, on the device and in the host's mirror."""
    engine.pool = engine.table.apply(engine.pool)
    engine.pool, moved = pools.compact(engine.pool)
    assert engine.table.ledger.compact() == int(moved)
    return int(moved)


def drain(engine, requests, before_turn=lambda: None):
    while engine.has_work:
        before_turn()
        engine.step()
    return [engine.take_output(request).output_ids for request in requests]


def test_greedy_tokens_are_those_without_a_draft(sparked, engine):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    plain = engine().generate(prompts, greedy(17))
    drafted = sparked()
    outputs = drafted.generate(prompts, greedy(17))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert stats.drafted > 0 and not stats.faults
    assert drafted.accounts.in_use == 0
    again = drafted.generate(prompts[3], greedy(17))
    assert again[0].cached_tokens > 0
    assert again[0].output_ids == plain[3].output_ids
    assert not drafted.stats().drafting.faults


@pytest.mark.parametrize("when", ["between steps", "between draft and verify"])
def test_pages_may_move(sparked, engine, when):
    """The target's physical pages change places under texts of several lengths; the
    draft goes on from the rows that it has, and proposes what it would have."""
    prompts = [text(seed, 9 + 5 * seed) for seed in range(3)]
    counts = [3, 9, 21]  # the short ones end first and leave holes before others
    still, moving = sparked(prefix_cache=False), sparked(prefix_cache=False)
    proposer, moved = moving.verifier.proposer, []
    propose = proposer.propose

    def and_move(sequences, most):
        proposal = propose(sequences, most)
        moved.append(compact(moving))
        return proposal

    if when == "between draft and verify":
        proposer.propose = and_move
    found = []
    for each in (still, moving):
        rows = zip(prompts, counts, strict=True)
        requests = [each.add(prompt, greedy(count)) for prompt, count in rows]
        is_between = each is moving and when == "between steps"
        move = (lambda: moved.append(compact(moving))) if is_between else lambda: None
        found.append(drain(each, requests, move))
    plain = engine().generate(prompts, [greedy(count) for count in counts])
    assert found[0] == found[1] == [o.output_ids for o in plain]
    assert sum(moved) >= 4
    stats = [each.stats().drafting for each in (still, moving)]
    assert stats[0] == stats[1] and not stats[0].faults
    np.testing.assert_array_equal(
        *[np.asarray(each.verifier.proposer.pages) for each in (still, moving)]
    )


def test_the_draft_keeps_of_a_text_what_one_reading_of_it_leaves(sparked):
    """Whatever was proposed and rejected on the way, behind the same virtual ids."""
    prompt, found = text(81, 9), []
    (output,) = sparked().generate(prompt, greedy(12))
    tokens = [*prompt, *output.output_ids]
    for known, count in ((prompt, 12), (tokens[:-2], 3)):
        made = sparked()
        made.add(known, greedy(count))
        while not made.scheduler.running or (
            made.scheduler.running[0].num_computed < len(tokens) - 3
        ):
            made.step()
        held = made.scheduler.running[0].held.columns[0][: (len(tokens) - 3) // 4]
        found.append(np.asarray(made.verifier.proposer.pages)[0, held].view(np.float32))
    np.testing.assert_allclose(*found, atol=1e-4)
    assert np.abs(found[0]).max() > 0.01


def test_a_copied_page_takes_the_drafts_rows_along(sparked, engine):
    """Two samples of one prompt part inside a page; the draft's is copied too, so no
    proposal of the second reads what nobody wrote."""
    warm = greedy(12, temperature=1.2, top_k=4, seed=5, n=2)
    prompt = text(70, 14)
    (plain,) = engine().generate(prompt, warm)
    drafted = sparked()
    request = drafted.add(prompt, warm)
    while len(drafted.scheduler.running) < 2:
        drafted.step()
    drafted.step()
    first, second = (s.held.columns[0] for s in drafted.scheduler.running)
    assert first[:3] == second[:3] and first[3] != second[3]
    pages = np.asarray(drafted.verifier.proposer.pages)[0].view(np.float32)
    rows = [pages[each[3]].reshape(-1, 4, 8)[:, :2] for each in (first, second)]
    np.testing.assert_array_equal(*rows)  # of the prompt's two tokens in that page
    assert np.isfinite(rows[0]).all()
    while drafted.has_work:
        drafted.step()
    assert drafted.take_output(request).completions == plain.completions
    assert not drafted.stats().drafting.faults


def test_preempted_requests_are_answered_as_alone(sparked, engine):
    prompts = [text(60 + seed, 14) for seed in range(4)]
    plain = engine().generate(prompts, greedy(30))
    drafted = sparked()
    outputs = drafted.generate(prompts, greedy(30))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    assert drafted.scheduler.num_preempted > 0
    assert drafted.accounts.in_use == 0


def test_every_virtual_id_has_pages_of_the_draft_behind_it(sparked):
    """The highest one can be written; ids that are nobody's name no page."""
    made = sparked()
    made.generate(text(1, 4 * PAGES - 6), greedy(5))
    pages = np.asarray(made.verifier.proposer.pages)
    assert pages.shape[1] == PAGES == made.pool.groups[0].num_vpages
    assert not (pages == pools.POISON).all(axis=(0, 2)).any()
    stepper = made.verifier.proposer._stepper
    table = jnp.asarray([[PAGES - 1, PAGES, -1, np.iinfo(np.int32).max]], jnp.int32)
    assert stepper.physical(table).tolist() == [[PAGES - 1, PAGES, PAGES, PAGES]]


def test_behind_a_page_of_token_shards_stand_as_many_of_the_draft(sparked):
    stepper = sparked(dcp=2).verifier.proposer._stepper
    table = jnp.asarray([[3, PAGES]], jnp.int32)
    assert stepper.physical(table).tolist() == [[6, 7, 2 * PAGES, 2 * PAGES]]


@pytest.mark.long
@pytest.mark.parametrize(("tp", "dcp"), [(2, 1), (1, 2), (2, 2)])
def test_on_head_shards_and_token_shards_the_tokens_are_the_same(
    sparked, engine, tp, dcp
):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(3)]
    warm = greedy(10, temperature=0.8, top_k=4, seed=2, n=2)
    for sampling in (greedy(12), warm):
        plain = engine().generate(prompts, sampling)
        drafted = sparked(tp=tp, dcp=dcp)
        outputs = drafted.generate(prompts, sampling)
        assert [o.completions for o in outputs] == [o.completions for o in plain]
        stats = drafted.stats().drafting
        assert stats.drafted > 0 and not stats.faults


def test_rows_that_are_no_numbers_are_faults(sparked, engine):
    prompt = text(5, 9)
    plain = engine().generate(prompt, greedy(6))
    drafted = sparked()
    observe = drafted.verifier.proposer.observe
    drafted.verifier.proposer.observe = lambda feeds, rows: observe(
        feeds, rows * jnp.nan
    )
    (output,) = drafted.generate(prompt, greedy(6))
    assert output.output_ids == plain[0].output_ids
    stats = drafted.stats().drafting
    assert stats.accepted == 0 and sum(stats.faults.values()) > 0


@pytest.fixture
def stand_in(sparked):
    """A target as a draft sees it, with facts of another."""

    class StandIn:
        def __init__(self, engine, **facts):
            self.__dict__ |= vars(engine) | facts

    return StandIn


def test_pages_that_the_draft_cannot_follow_are_refused(sparked, stand_in, tiny_model):
    made = sparked()
    draft = DSpark(*layers_for(tiny_model()))
    (group,) = made.own_groups
    (wide,) = geometry.group_layers(group.layers, 8)
    with pytest.raises(errors.IncompatiblePlan, match="the size of the target's"):
        draft.start(stand_in(made, own_groups=(wide,)))
