"""Block drafts in the engine: no token differs, and what is kept follows the text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import budget, errors, geometry
from kvmem import pool as pools
from kvmem.geometry import Topology
from kvmem.model import dflash
from kvmem.model.decoder import Decoder
from kvmem.model.dflash_decoder import DFlashDecoder
from kvmem.model.partitions import partition_of
from kvmem.serve import SamplingParams, ServeConfig
from kvmem.serve import engine as engines
from kvmem.serve import loop as loops
from kvmem.serve.draft.dflash import DFlash
from kvmem.speculative import SpecPlan, draft_pool

PAGES = 30  # of one size in every test, so that steps are compiled once


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@functools.cache
def layers_for(model, page_size):
    drawn, rng = dflash.draw(model, layers=2, seed=3), np.random.default_rng(3)
    params = {  # large enough that a block says something else at each place
        name: rows if name.endswith("norm.weight") else rng.normal(0, 0.4, rows.shape)
        for name, rows in drawn.params.items()
        if name in drawn.spec.own_parameters()
    }
    params = {name: np.float32(rows) for name, rows in params.items()}
    block = dflash.with_params(model, 2, params, "of a test")
    specs = block.spec.layer_specs("float32")
    return block, geometry.group_layers(specs, page_size, domain="draft")


@pytest.fixture
def flashed(tiny_model, shared_steps, shared_drafts, monkeypatch):
    """An engine of the tiny model on a poisoned pool, drafting in blocks."""
    monkeypatch.setattr(loops, "Stepper", shared_steps)
    for (module, name), shared in shared_drafts.items():
        monkeypatch.setattr(module, name, shared)

    def make(draft_tokens=3, tp=1, dcp=1, page_size=4, pages=PAGES, **serve):
        model, topology = tiny_model(), Topology(tp, dcp)
        groups = geometry.group_layers(model.spec.layer_specs("float32"), page_size)
        draft = DFlash(*layers_for(model, page_size), draft_tokens)
        solved = budget.solve(
            groups, topology, (), max_pages=pages, draft=draft.draft_groups
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


def proposer_of(engine):
    return engine.verifier.proposer


def knowing(engine, answers, rights=(3, 0, 2, 1)):
    """Let blocks be computed, and the first tokens of each be right ones in turn.

    Returns:
        What was proposed before that, one list a call.
    """
    proposer, said = proposer_of(engine), []
    propose, at = proposer.propose, iter(range(10**6))

    def and_correct(sequences, most):
        proposal, tokens = propose(sequences, most), []
        assert not proposal.faults
        said.append(proposal.tokens)
        for sequence, found in zip(sequences, proposal.tokens, strict=True):
            rest = answers[tuple(sequence.tokens[: sequence.num_prompt])]
            rest = rest[len(sequence.output_ids) :]
            right = rights[next(at) % len(rights)]
            wrong = [(token + 1) % 256 for token in rest]
            tokens.append(tuple([*rest[:right], *wrong[right:]][: len(found)]))
        return proposal._replace(tokens=tuple(tokens))

    proposer.propose = and_correct
    return said


def answers_of(plain, prompts, count):
    outputs = plain.generate(prompts, greedy(count))
    pairs = zip(prompts, outputs, strict=True)
    return {tuple(prompt): output.output_ids for prompt, output in pairs}


def test_greedy_tokens_of_many_prompts_are_those_without_a_draft(flashed, engine):
    """24 prompts, of which most wait, share beginnings and are cut short of pages."""
    stems = [text(seed, 11) for seed in range(5)]
    prompts = [[*stems[at % 5], *text(40 + at, at % 9)] for at in range(24)]
    answers = answers_of(engine(), prompts, 24)
    drafted = flashed()
    knowing(drafted, answers)
    outputs = drafted.generate(prompts, greedy(24))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.output_ids == answers[tuple(prompt)]
    stats = drafted.stats()
    assert stats.hits > 0 and drafted.scheduler.num_preempted > 0
    assert 0 < stats.drafting.accepted < stats.drafting.drafted
    assert not stats.drafting.faults
    assert drafted.accounts.in_use == 0


def read_whole(model, block, tokens, anchors, length):
    """What blocks behind `anchors` propose where a text is read without a cache."""

    @jax.jit
    def propose(tokens, anchors):
        target = Decoder.from_params(model.spec, model.params)
        part = partition_of(block.spec, Topology())
        own = part.rank_params(block.params, 0)
        draft = DFlashDecoder(part, {name: jnp.asarray(x) for name, x in own.items()})
        rows = target.rows(tokens)
        return jnp.argmax(draft.block_logits(rows, tokens, anchors, length), -1)

    return np.asarray(propose(np.int32([tokens]), np.int32([anchors])))[0].tolist()


def test_what_is_proposed_is_what_blocks_of_the_whole_text_propose(flashed, engine):
    """After chunks of a prompt, accepted tokens and rejected ones."""
    prompt = text(33, 21)
    answers = answers_of(engine(), [prompt], 19)
    drafted = flashed()
    said, places = knowing(drafted, answers), []
    propose = proposer_of(drafted).propose

    def and_note(sequences, most):
        places.append(len(sequences[0].tokens) - 1)
        return propose(sequences, most)

    proposer_of(drafted).propose = and_note
    drafted.generate(prompt, greedy(19))
    tokens, block = [*prompt, *answers[tuple(prompt)]], layers_for(drafted.model, 4)[0]
    want = read_whole(drafted.model, block, tokens, places, 3)
    assert len({tuple(each) for each in want}) > 5
    assert all(len(set(each)) > 1 for each in want)
    for (found,), row in zip(said, want, strict=True):
        assert list(found) == row[: len(found)]


@pytest.mark.parametrize("draft_tokens", [pytest.param(1, marks=pytest.mark.long), 3])
def test_blocks_of_the_layers_alone_change_no_token(flashed, engine, draft_tokens):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    plain = engine().generate(prompts, greedy(17))
    drafted = flashed(draft_tokens)
    outputs = drafted.generate(prompts, greedy(17))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert stats.drafted > 0 and not stats.faults


def test_sampled_tokens_are_those_without_a_draft(flashed, engine):
    """Two samples of a prompt part inside a page, which the draft copies too."""
    warm = greedy(14, temperature=1.2, top_k=4, seed=5, n=2)
    prompts = [text(70 + seed, 14) for seed in range(2)]
    plain = engine().generate(prompts, warm)
    drafted = flashed()
    drafted.add(prompts[0], warm)
    while len(drafted.scheduler.running) < 2:
        drafted.step()
    drafted.step()
    first, second = (s.held.columns[0] for s in drafted.scheduler.running)
    assert first[:3] == second[:3] and first[3] != second[3]
    pages = np.asarray(proposer_of(drafted).pages)[0].view(np.float32)
    rows = [pages[each[3]].reshape(-1, 4, 8)[:, :2] for each in (first, second)]
    np.testing.assert_array_equal(*rows)  # of the prompt's two tokens in that page
    assert np.isfinite(rows[0]).all()
    drafted = flashed()
    outputs = drafted.generate(prompts, warm)
    assert [o.completions for o in outputs] == [o.completions for o in plain]
    assert not drafted.stats().drafting.faults


def test_behind_a_cached_prefix_a_block_is_what_it_is_without(flashed, engine):
    """Nothing is remembered beside the pages, and those are shared."""
    prompt = text(9, 27)
    answers, said = answers_of(engine(), [prompt], 12), []
    cold, warm = flashed(prefix_cache=False), flashed()
    warm.generate(prompt[:25], greedy(1))
    for each in (cold, warm):
        said.append(knowing(each, answers))
        (output,) = each.generate(prompt, greedy(12))
        assert output.output_ids == answers[tuple(prompt)]
    assert output.cached_tokens == 24
    assert said[0] == said[1] and len(said[0]) > 3


@pytest.mark.parametrize("when", ["between steps", "between draft and verify"])
def test_pages_of_the_target_may_move(flashed, engine, when):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(3)]
    counts = [3, 9, 21]  # the short ones end first and leave holes before others
    plain = engine().generate(prompts, [greedy(count) for count in counts])
    kept = {"prefix_cache": False}
    moving, still, moved = flashed(**kept), flashed(**kept), []
    propose = proposer_of(moving).propose

    def compact():
        moving.pool = moving.table.apply(moving.pool)
        moving.pool, count = pools.compact(moving.pool)
        assert moving.table.ledger.compact() == int(count)
        moved.append(int(count))

    def and_move(sequences, most):
        proposal = propose(sequences, most)
        compact()
        return proposal

    if when == "between draft and verify":
        proposer_of(moving).propose = and_move
    found = []
    for each in (still, moving):
        rows = zip(prompts, counts, strict=True)
        requests = [each.add(prompt, greedy(count)) for prompt, count in rows]
        while each.has_work:
            if each is moving and when == "between steps":
                compact()
            each.step()
        found.append([each.take_output(request).output_ids for request in requests])
    assert found[0] == found[1] == [o.output_ids for o in plain]
    assert sum(moved) >= 4
    np.testing.assert_array_equal(
        *[np.asarray(proposer_of(each).pages) for each in (still, moving)]
    )


def test_the_draft_keeps_of_a_text_what_one_reading_of_it_leaves(flashed, engine):
    """After accepted and rejected blocks, behind the same virtual ids."""
    prompt, found = text(81, 9), []
    answers = answers_of(engine(), [prompt], 20)
    tokens = [*prompt, *answers[tuple(prompt)]]
    end = 24  # tokens of whole pages that both have read
    for known in (prompt, tokens[:26]):
        made = flashed()
        if known is prompt:
            knowing(made, answers)
        made.add(known, greedy(20 if known is prompt else 3))
        while not made.scheduler.running or (
            made.scheduler.running[0].num_computed < end
        ):
            made.step()
        held = made.scheduler.running[0].held.columns[0][: end // 4]
        found.append(np.asarray(proposer_of(made).pages)[0, held].view(np.float32))
        accepted = made.stats().drafting.accepted
        assert accepted > 3 if known is prompt else not accepted
    np.testing.assert_allclose(*found, atol=1e-4)
    assert np.abs(found[0]).max() > 0.01


def test_preempted_requests_are_answered_as_alone(flashed, engine):
    prompts = [text(60 + seed, 14) for seed in range(4)]
    answers = answers_of(engine(), prompts, 30)
    drafted = flashed()
    knowing(drafted, answers)
    outputs = drafted.generate(prompts, greedy(30))
    assert [o.output_ids for o in outputs] == list(answers.values())
    assert drafted.scheduler.num_preempted > 0
    assert drafted.accounts.in_use == 0


@pytest.mark.parametrize("dcp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_pool_is_what_the_budget_paid_for_and_its_last_row_is_written(flashed, dcp):
    made = flashed(dcp=dcp)
    proposer, longest = proposer_of(made), 4 * PAGES * dcp
    plan = SpecPlan("dflash", dcp=dcp, page_size=4)
    groups = layers_for(made.model, 4)[1]
    planned = draft_pool(plan, groups, PAGES, Topology(dcp=dcp))
    assert proposer.pages.shape == (dcp, planned.pages, planned.page_nbytes)
    assert proposer.pages.nbytes == planned.nbytes * dcp
    assert (np.asarray(proposer.pages) == pools.POISON).all()  # nothing is written
    assert sum(term.bytes_per_token for term in proposer.claims()) * 4 * PAGES == (
        planned.nbytes
    )
    solved = made.budget
    assert solved.draft_pages * solved.draft_page_nbytes == planned.nbytes
    if dcp == 1:
        made.generate(text(1, longest - 6), greedy(5))
        pages = np.asarray(proposer.pages)
        assert not (pages == pools.POISON).all(axis=(0, 2)).any()
    table = jnp.asarray([[PAGES - 1, PAGES, -1]], jnp.int32)
    physical = proposer._stepper.physical(table)[0].tolist()
    last, null = PAGES * dcp, [PAGES * dcp] * dcp
    assert physical == [*range(last - dcp, last), *null, *null]


@pytest.mark.long
@pytest.mark.parametrize(("tp", "dcp"), [(2, 1), (1, 2), (2, 2)])
def test_on_head_shards_and_token_shards_blocks_and_tokens_are_the_same(
    flashed, engine, tp, dcp
):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(3)]
    warm = greedy(10, temperature=0.8, top_k=4, seed=2, n=2)
    plain = engine().generate(prompts, warm)
    outputs = flashed(tp=tp, dcp=dcp).generate(prompts, warm)
    assert [o.completions for o in outputs] == [o.completions for o in plain]
    answers, said = answers_of(engine(), prompts, 12), []
    for shards in ({}, {"tp": tp, "dcp": dcp}):
        drafted = flashed(**shards)
        said.append(knowing(drafted, answers))
        outputs = drafted.generate(prompts, greedy(12))
        assert [o.output_ids for o in outputs] == list(answers.values())
        assert drafted.stats().drafting.accepted > 0
    if dcp == 1:  # token shards have longer pages, so chunks end elsewhere
        assert said[0] == said[1]


@pytest.mark.long
@pytest.mark.parametrize("page_size", [2, 8])
def test_pages_of_other_sizes_give_the_same_tokens(flashed, engine, page_size):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    answers = answers_of(engine(), prompts, 17)
    drafted = flashed(page_size=page_size, pages=PAGES * 4 // page_size)
    knowing(drafted, answers)
    outputs = drafted.generate(prompts, greedy(17))
    assert [o.output_ids for o in outputs] == list(answers.values())
    assert drafted.accounts.in_use == 0


def test_rows_that_are_no_numbers_are_faults(flashed, engine):
    prompt = text(5, 9)
    plain = engine().generate(prompt, greedy(6))
    drafted = flashed()
    observe = proposer_of(drafted).observe
    proposer_of(drafted).observe = lambda feeds, rows: observe(feeds, rows * jnp.nan)
    (output,) = drafted.generate(prompt, greedy(6))
    assert output.output_ids == plain[0].output_ids
    stats = drafted.stats().drafting
    assert stats.accepted == 0
    assert stats.faults == {"the draft's logits are no numbers": 4}


@pytest.mark.own_steps
def test_after_a_warm_up_nothing_is_compiled(flashed, monkeypatch):
    monkeypatch.undo()
    made = flashed(max_length=64, widths=(64,))
    assert proposer_of(made).warm_up() > 0
    stepper = proposer_of(made)._stepper
    before = dict(stepper.num_traces)
    assert set(before.values()) == {1}
    made.generate([text(3, 9), text(4, 40)], greedy(9))
    assert dict(stepper.num_traces) == before


@pytest.fixture
def stand_in(flashed):
    """A target as a draft sees it, with facts of another."""

    class StandIn:
        def __init__(self, engine, **facts):
            self.__dict__ |= vars(engine) | facts

    return StandIn


def test_targets_that_a_block_cannot_follow_are_refused(flashed, stand_in, tiny_model):
    made = flashed()
    draft = DFlash(*layers_for(tiny_model(), 4))
    (group,) = made.own_groups
    (wide,) = geometry.group_layers(group.layers, 8)
    with pytest.raises(errors.IncompatiblePlan, match="the size of the target's"):
        draft.start(stand_in(made, own_groups=(wide,)))
    with pytest.raises(errors.ConfigError, match="draft_tokens"):
        DFlash(*layers_for(tiny_model(), 4), draft_tokens=0)
