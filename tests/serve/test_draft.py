"""Drafting in the engine: every token as without, whatever is proposed."""

import dataclasses
import itertools

import numpy as np
import pytest

from kvmem import budget, errors, geometry
from kvmem.geometry import Topology
from kvmem.model import mtp
from kvmem.serve import Engine, SamplingParams
from kvmem.serve.draft import MTP, FrozenKV
from kvmem.serve.draft import mtp as draft_mtp
from kvmem.serve.draft.protocol import Forgetful, Proposal
from kvmem.serve.work import Feed

WIDTH = 4
KINDS = ("full", "window", "indexer", "state")


def text(seed, length):
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@dataclasses.dataclass
class Oracle:
    """A draft that knows the answers and errs where it is told to.

    Args:
        answers: prompt -> the tokens that follow it, of each sample.
        rights: how many right tokens stand before the first wrong one, in turn.
        counts: how many tokens are proposed, in turn.
    """

    groups = ()
    answers: dict[tuple[int, ...], list[tuple[int, ...]]]
    rights: tuple[int, ...] = (0, 1, 2, 3, 4)
    counts: tuple[int, ...] = (WIDTH,)
    faults: int = 0

    def start(self, target):
        return _Oracle(self, target)


class _Oracle(Forgetful):
    num_drafted = WIDTH

    def __init__(self, facts, target):
        self.facts, self.told = facts, []
        self.rights = itertools.cycle(facts.rights)
        self.counts = itertools.cycle(facts.counts)

    def propose(self, sequences, most):
        tokens = []
        for sequence, count in zip(sequences, most, strict=True):
            prompt = tuple(sequence.tokens[: sequence.num_prompt])
            at = len(sequence.output_ids)
            rest = self.facts.answers[prompt][sequence.sample][at:]
            count, right = min(count, next(self.counts)), next(self.rights)
            wrong = [(token + 1) % 256 for token in rest]
            tokens.append(tuple([*rest[:right], *wrong[right:]][:count]))
        return Proposal(tuple(tokens))

    def accepted(self, sequence, count):
        self.told.append((sequence.request_id, count))


def answers_of(plain, prompts, sampling):
    outputs = plain.generate([list(p) for p in prompts], sampling)
    found = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        found[prompt] = [each.output_ids for each in output.completions]
    return found, outputs


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_with_a_draft_are_those_without(made, kind):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    without = made(kind)
    answers, plain = answers_of(without, prompts, greedy(17))
    drafted = made(kind, Oracle(answers))
    outputs = drafted.generate([list(p) for p in prompts], greedy(17))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert 0 < stats.accepted < stats.drafted
    assert stats.emitted == stats.steps + stats.accepted == 4 * 16
    assert drafted.accounts.in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_drafted_is_found_again_as_far_as_plain_steps_leave_it(made, kind):
    prompt, found = text(7, 13), []
    answers, plain = answers_of(made(kind), [prompt], greedy(17))
    longer = [*prompt, *plain[0].output_ids, *text(8, 3)]
    drafts = [Oracle(answers, rights) for rights in ((0, 1, 2, 3, 4), (3,), (2,))]
    for draft in (None, *drafts):
        each = made(kind, draft)
        each.generate(list(prompt), greedy(17))
        (output,) = each.generate(longer, greedy(1))
        found.append((output.cached_tokens, output.output_ids))
    assert found == found[:1] * 4
    assert found[0][0] == 28  # 29 tokens had been computed, on pages of 4


@pytest.mark.parametrize(
    "kind", ["full", "window", pytest.param("indexer", marks=pytest.mark.long)]
)
def test_the_targets_first_layers_draft_on_its_own_pages(made, kind):
    prompts = [text(seed, 9 + 5 * seed) for seed in range(4)]
    _, plain = answers_of(made(kind), prompts, greedy(17))
    drafted = made(kind, FrozenKV(layers=1, draft_tokens=3))
    outputs = drafted.generate([list(p) for p in prompts], greedy(17))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    stats = drafted.stats().drafting
    assert stats.drafted > 0 and not stats.faults


def test_a_draft_that_is_the_whole_target_is_always_right(made):
    made = made("full", FrozenKV(layers=2, draft_tokens=3))
    made.generate([list(text(seed, 9)) for seed in range(4)], greedy(17))
    stats = made.stats().drafting
    assert stats.accept_rate == 1
    assert stats.tokens_per_step == 4


@pytest.mark.parametrize("kind", ["full", "state"])
def test_sampled_tokens_with_a_draft_are_those_without(made, kind):
    warm = greedy(15, temperature=1.3, top_k=50, top_p=0.95, seed=11, n=3)
    prompts = [text(21, 9), text(22, 14)]
    answers, plain = answers_of(made(kind), prompts, warm)
    drafted = made(kind, Oracle(answers))
    outputs = drafted.generate([list(p) for p in prompts], warm)
    assert [o.completions for o in outputs] == [o.completions for o in plain]
    assert drafted.stats().drafting.accepted > 0


def test_log_probabilities_of_drafted_tokens_are_their_own(made):
    asked = greedy(12, logprobs=3)
    answers, (plain,) = answers_of(made("full"), [text(23, 9)], asked)
    (output,) = made("full", Oracle(answers)).generate(list(text(23, 9)), asked)
    got, want = (each.completions[0].logprobs for each in (output, plain))
    assert output.output_ids == plain.output_ids
    for mine, theirs in zip(got, want, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]


@pytest.mark.parametrize("kind", ["full", "state"])
@pytest.mark.parametrize("stop_at", [4, 5, 6])
def test_a_stop_inside_an_accepted_run_cuts_there(made, kind, stop_at):
    prompt = text(24, 10)
    answers, (plain,) = answers_of(made(kind), [prompt], greedy(14))
    tokens = plain.output_ids
    stop_at = tokens.index(sorted(set(tokens), key=tokens.index)[stop_at - 1])
    drafted = made(kind, Oracle(answers, rights=(WIDTH,)))
    ends = SamplingParams(max_tokens=14, ignore_eos=True, stop_ids=(tokens[stop_at],))
    found = []
    for each in (made(kind), drafted):
        (output,) = each.generate(list(prompt), ends)
        (longer,) = each.generate([*prompt, *tokens], greedy(1))
        found.append((output.output_ids, output.text, longer.cached_tokens))
        assert output.completions[0].finish_reason == "stop"
    assert found[0] == found[1]
    assert found[0][0] == tokens[: stop_at + 1]


def test_a_text_ends_at_its_longest_with_a_draft_as_without(made):
    prompt = text(25, 10)
    answers, _ = answers_of(made("full"), [prompt], greedy(14))
    for count in (1, 2, 3, 6):
        drafted = made("full", Oracle(answers, rights=(WIDTH,)))
        (output,) = drafted.generate(list(prompt), greedy(count))
        assert output.output_ids == answers[prompt][0][:count]
        assert output.completions[0].finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_with_a_draft_end_with_the_same_tokens(made, kind):
    prompts = [text(50 + i, 18) for i in range(4)]
    answers, plain = answers_of(made(kind), prompts, greedy(40))
    few = {"pages": 30} if kind == "full" else {}
    drafted = made(kind, Oracle(answers, counts=(4, 2, 1)), **few)
    outputs = drafted.generate([list(p) for p in prompts], greedy(40))
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    assert drafted.scheduler.num_preempted > 0
    assert drafted.accounts.in_use == 0


def bytes_of(made, sequence):
    """The bytes of every page that a sequence holds, by group."""
    made.pool = made.table.apply(made.pool)
    pages, found = np.asarray(made.pool.pages), []
    for group, vpages in enumerate(sequence.held.columns):
        physical = made.table.ledger.translate_parts(group, vpages)
        found.append(pages[:, np.asarray(physical).reshape(-1)].copy())
    return found


@pytest.mark.case("SPC-07")
@pytest.mark.parametrize("draft", ["oracle", "frozen"])
def test_pages_change_in_the_slots_of_accepted_tokens_alone(made, draft):
    """All other bytes stay as they were: head-major rows of 4 slots of 32 bytes."""
    prompt = text(26, 9)
    answers, _ = answers_of(made("full"), [prompt], greedy(30))
    facts = Oracle(answers) if draft == "oracle" else FrozenKV(1, 3)
    drafted = made("full", facts)
    drafted.add(list(prompt), greedy(30))
    (drafted.step(), drafted.step())
    (sequence,) = drafted.scheduler.running
    steps = 0
    while drafted.has_work:
        before, first = bytes_of(drafted, sequence)[0], sequence.num_computed
        if len(drafted.step()) and not drafted.has_work:
            break
        after, end = bytes_of(drafted, sequence)[0], sequence.num_computed
        for page in range(after.shape[1]):
            slot = np.arange(after.shape[2]) // 32 % 4 + 4 * page
            old = before[:, page] if page < before.shape[1] else 0 * after[:, page]
            changed = (after[:, page] != old).any(axis=0)
            assert not changed[(slot < first) | (slot >= end)].any()
            assert not after[:, page][:, slot >= end].any()
        assert after.shape[1] == -(-end // 4)  # no page without an accepted token
        steps += 1
    stats = drafted.stats().drafting
    assert steps > 3 and stats.drafted > stats.accepted


@pytest.mark.case("SPC-07")
def test_a_page_is_cached_when_its_last_token_was_accepted_and_not_before(made):
    """Page 16, 14 committed and 4 drafted: cached after 2 of them are accepted."""
    prompt, found = text(27, 14), []
    answers, _ = answers_of(made("full", page_size=16), [prompt], greedy(12))
    for right in (0, 1, 2):
        facts = Oracle(answers, rights=(right,))
        drafted = made("full", facts, page_size=16)
        drafted.add(list(prompt), greedy(12))
        drafted.step()  # the prompt, and the first token behind it
        drafted.step()  # that token, and four drafted ones
        (sequence,) = drafted.scheduler.running
        assert sequence.num_computed == 15 + right
        assert drafted.table.match([*sequence.tokens, 0]).num_tokens == 0
        drafted.scheduler.publish(sequence)
        found.append(drafted.table.match([*sequence.tokens, 0]).num_tokens)
    assert found == [0, 16, 16]


@pytest.mark.case("SPC-06")
def test_a_state_stands_after_the_accepted_tokens_alone(made):
    """A state is bit for bit what reading the accepted tokens alone makes of it."""
    prompt = text(28, 9)
    answers, _ = answers_of(made("state"), [prompt], greedy(20))
    states = []
    for rights in ((WIDTH,), (0,), (1, 2)):
        drafted = made("state", Oracle(answers, rights=rights))
        drafted.add(list(prompt), greedy(20))
        seen = {}
        while drafted.has_work:
            drafted.step()
            if drafted.scheduler.running:
                (sequence,) = drafted.scheduler.running
                seen[sequence.num_computed] = bytes_of(drafted, sequence)
        states.append(seen)
    group = next(
        g for g, life in enumerate(drafted.table.lives) if life.kind == "state"
    )
    met = set(states[0]) & set(states[1]) & set(states[2])
    assert len(met) > 2
    for length in met:
        first, *others = (np.asarray(each[length][group]) for each in states)
        for other in others:
            np.testing.assert_allclose(
                first.view(np.float32), other.view(np.float32), atol=1e-5
            )


@pytest.mark.parametrize(
    "name",
    ["mtp", pytest.param("dspark", marks=pytest.mark.long), "two_engine", "frozen_kv"],
)
def test_a_text_near_the_longest_is_drafted_for_beside_a_short_one(drafted, name):
    """126 of 128 tokens, behind which one may be drafted, beside some, and all five."""
    prompts, asked = [text(30, 8), text(29, 125)], [greedy(60), greedy(3)]
    plain = drafted(None).generate([list(p) for p in prompts], asked)
    pages = 160 if name == "mtp" else 64  # of the draft's layers too
    made = drafted(name, draft_tokens=5, pages=pages)
    outputs = made.generate([list(p) for p in prompts], asked)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    assert made.stats().drafting.drafted > 3 and made.accounts.in_use == 0


def test_a_draft_on_the_targets_pages_finds_room_for_all_that_it_writes(made):
    drafted = made("full", FrozenKV(1, 3))
    proposer, asked = drafted.verifier.proposer, []
    propose = proposer.propose

    def checked(sequences, most):
        for sequence, count in zip(sequences, most, strict=True):
            asked.append(sequence.held.room - len(sequence.tokens) - count)
        return propose(sequences, most)

    proposer.propose = checked
    drafted.generate([list(text(seed, 9)) for seed in range(2)], greedy(12))
    assert len(asked) > 6 and min(asked) >= 0


def test_a_budget_that_knows_nothing_of_draft_layers_is_refused(tiny_model, layers_of):
    (group,) = geometry.group_layers(tiny_model().spec.layer_specs("float32"), 4)
    solved = budget.solve((group,), Topology(), (), max_pages=20)
    with pytest.raises(errors.IncompatiblePlan, match="target, draft on a budget of t"):
        Engine(tiny_model(), group, solved, draft=MTP(*layers_of(mtp)))


def test_a_step_is_never_packed_into_less_room_than_it_needs(made):
    """Two pages of four tokens in one row: eight entries, and nine are asked for."""
    made = made("full")
    made.add(list(text(31, 9)), greedy(4))
    made.step()
    (sequence,) = made.scheduler.running
    bucket = made.buckets.decode(1, 8)._replace(rows=1, pages=2)
    feed = Feed(sequence.tokens[8:9], 8, sequence.held)
    with pytest.raises(errors.OutOfPages, match="8 entries: 9 are needed"):
        made.stepper.pack([feed], bucket)
    made.stepper.pack([feed], bucket._replace(pages=3))


@pytest.mark.parametrize("name", ["mtp", "dflash"])
def test_warming_up_leaves_nothing_to_trace_of_rows_that_are_shifted(drafted, name):
    small = (draft_mtp._before, draft_mtp.from_the_left)[name == "dflash" :]
    for each in small:
        each.clear_cache()
    made = drafted(name)
    made.warm_up()
    warm = [each._cache_size() for each in small]
    assert min(warm) > 0
    made.generate([list(text(seed, 9 + seed)) for seed in range(3)], greedy(9))
    assert [each._cache_size() for each in small] == warm
