"""Draft layers in the target's manager: one table, one pool, one prefix."""

import functools

import numpy as np
import pytest

from kvmem import budget, errors, geometry
from kvmem.geometry import Topology
from kvmem.model import mtp
from kvmem.serve import SamplingParams, ServeConfig, step
from kvmem.serve import engine as engines
from kvmem.serve import loop as loops
from kvmem.serve.draft.mtp import MTP


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@functools.cache
def layers_for(model, layers):
    small = mtp.draw(model, layers, seed=3)
    specs = small.spec.layer_specs("float32")
    return small, geometry.group_layers(specs, 4, domain="draft")


@pytest.fixture
def layered(tiny_model, shared_steps, shared_drafts, monkeypatch):
    """An engine of the tiny model, with draft layers in its pool or without any."""
    monkeypatch.setattr(loops, "Stepper", shared_steps)
    for (module, name), shared in shared_drafts.items():
        monkeypatch.setattr(module, name, shared)

    def make(layers=1, pages=90, draft_tokens=3, tp=1, dcp=1, store=None, **serve):
        model, topology = tiny_model(), Topology(tp, dcp)
        groups = geometry.group_layers(model.spec.layer_specs("float32"), 4)
        draft, joint = None, groups
        if layers:
            small, own = layers_for(model, layers)
            draft, joint = MTP(small, own, draft_tokens), (*groups, *own)
        solved = budget.solve(joint, topology, (), max_pages=pages)
        config = {"max_batch": 4, "max_length": 128, "prefill_chunk": 16}
        config |= {"batches": (4,), "chunks": (16,), **serve}
        return engines.Engine(
            model,
            groups,
            solved,
            topology,
            config=ServeConfig(**config),
            store=store,
            poison=True,
            checked=True,
            draft=draft,
        )

    return make


def test_greedy_tokens_with_draft_layers_are_those_without(layered, engine):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    plain = engine().generate(prompts, greedy(17))
    drafted = layered()
    outputs = drafted.generate(prompts, greedy(17))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert stats.drafted > 0 and not stats.faults
    assert drafted.accounts.in_use == 0
    again = drafted.generate(prompts[3], greedy(17))
    assert again[0].cached_tokens > 0
    assert again[0].output_ids == plain[3].output_ids


def test_preempted_samples_with_draft_layers_are_answered_as_alone(layered, engine):
    warm = greedy(30, temperature=1.2, top_k=4, seed=5, n=2)
    prompts = [text(70 + seed, 14) for seed in range(3)]
    plain = engine().generate(prompts, warm)
    drafted = layered(pages=40)
    outputs = drafted.generate(prompts, warm)
    assert [o.completions for o in outputs] == [o.completions for o in plain]
    assert drafted.scheduler.num_preempted > 0
    assert drafted.accounts.in_use == 0


def test_target_and_draft_hold_and_cache_the_same_tokens(layered):
    """One table: neither can be found, given back or cut without the other."""
    drafted = layered()
    drafted.add(text(80, 13), greedy(20))
    while drafted.has_work:
        drafted.step()
        for sequence in drafted.scheduler.running:
            target, draft = sequence.held.columns
            assert len(target) == len(draft)
    shelf = drafted.table.shelf
    assert shelf.first == 0 and shelf.others == (1,)
    units = list(shelf.cache.vpages())
    assert len(units) > 5 and shelf.companions.has(1, units).all()


def test_the_layers_keep_of_a_text_what_one_reading_of_it_leaves(layered):
    """After drafts, rejections and chunks: the bytes of the draft's own pages.

    A text read at once and a text of the same tokens that was generated with drafts
    have equal draft keys and values.
    """
    prompt, found = text(81, 9), []
    one = layered(draft_tokens=3)
    (output,) = one.generate(prompt, greedy(12))
    tokens = [*prompt, *output.output_ids]
    for known, count in ((prompt, 12), (tokens[:-2], 3)):
        made = layered()
        made.add(known, greedy(count))
        while made.has_work and not (
            made.scheduler.running
            and made.scheduler.running[0].num_computed >= len(tokens) - 3
        ):
            made.step()
        (sequence,) = made.scheduler.running
        made.pool = made.table.apply(made.pool)
        held = sequence.held.columns[1][: (len(tokens) - 3) // 4]
        physical = np.asarray(made.table.ledger.translate(1, held))
        found.append(np.asarray(made.pool.pages)[0, physical].view(np.float32))
    np.testing.assert_allclose(*found, atol=1e-4)
    assert np.abs(found[0]).max() > 0.01


@pytest.mark.long
@pytest.mark.parametrize(("tp", "dcp"), [(2, 1), (1, 2), (2, 2)])
def test_draft_layers_on_shards_give_the_same_tokens(layered, engine, tp, dcp):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(3)]
    plain = engine().generate(prompts, greedy(12))
    outputs = layered(tp=tp, dcp=dcp).generate(prompts, greedy(12))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]


def rows_of(made, length):
    """What the draft's own pages have of the first tokens of the one that runs."""
    (sequence,) = made.scheduler.running
    made.pool = made.table.apply(made.pool)
    held = sequence.held.columns[-1][: length // 4]
    physical = np.asarray(made.table.ledger.translate(len(made.groups) - 1, held))
    (envelope,) = step.envelopes(made.groups, made.topology, made.order)[-1:]
    nbytes = envelope.payload_nbytes
    return np.asarray(made.pool.pages)[0, physical, :nbytes].view(np.float32)


def until(made, length):
    """Run until so many tokens of the one text that there is are computed."""
    while not made.scheduler.running or (
        made.scheduler.running[0].num_computed < length
    ):
        made.step()


@pytest.mark.parametrize(
    "kind",
    [
        "state",
        pytest.param("window", marks=pytest.mark.long),
        pytest.param("indexer", marks=pytest.mark.long),
    ],
)
def test_behind_a_hybrid_the_layers_keep_what_one_reading_leaves(drafted, kind):
    """After rejected tokens, whose states are read into again from before the step;
    and behind a prefix that was found."""
    prompt, found = text(81, 9), []
    one = drafted("mtp", kind=kind)
    (output,) = one.generate(prompt, greedy(14))
    tokens, end = [*prompt, *output.output_ids], 20
    assert one.stats().drafting.drafted > one.stats().drafting.accepted
    plain = drafted("mtp", kind=kind, prefix_cache=False)
    for made, known, count in ((one, tokens[:-2], 3), (plain, prompt, 14)):
        made.add(known, greedy(count))
        until(made, end)
        found.append(rows_of(made, end))
    assert one.scheduler.running[0].cached_tokens in (12, 16, 20)
    plain = drafted("mtp", kind=kind, prefix_cache=False)
    plain.add(tokens[:-2], greedy(3))
    until(plain, end)
    for each in found:
        np.testing.assert_allclose(each, rows_of(plain, end), atol=1e-3)
    assert np.abs(found[0]).max() > 0.01


def test_layers_of_other_tensors_are_refused(tiny_model):
    with pytest.raises(
        errors.FormatMismatch, match="input_layernorm.weight is missing"
    ):
        mtp.with_params(tiny_model(), 1, {}, "from nowhere")


def test_a_store_that_would_keep_the_target_alone_is_refused(layered):
    """Saved without the draft's part, a text would come back without it too."""
    with pytest.raises(errors.IncompatiblePlan, match="kept in parts beside"):
        layered(store=object())
