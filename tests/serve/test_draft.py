"""Drafting in the engine: every token as without, whatever is proposed."""

import dataclasses
import itertools

import numpy as np
import pytest

from kvmem.serve import SamplingParams
from kvmem.serve.draft import FrozenKV
from kvmem.serve.draft.protocol import Forgetful, Proposal

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


@pytest.fixture
def made(engine, hybrid_engine):
    """An engine of a kind of model, with or without a draft."""

    def make(kind, draft=None, **more):
        if kind == "full":
            return engine(draft=draft, **more)
        return hybrid_engine(kind, draft=draft, **more)

    return make


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
    for draft in (None, Oracle(answers)):
        each = made(kind, draft)
        each.generate(list(prompt), greedy(17))
        (output,) = each.generate(longer, greedy(1))
        found.append((output.cached_tokens, output.output_ids))
    assert found[0] == found[1]
    assert found[0][0] == 28  # 29 tokens had been computed, on pages of 4


@pytest.mark.parametrize("kind", ["full", "window", "indexer"])
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
