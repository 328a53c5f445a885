"""Draft layers that propose some words alone: the same texts, and those words only."""

import numpy as np
import pytest

from kvmem import geometry
from kvmem.model import draft_spec, mtp
from kvmem.serve import SamplingParams
from kvmem.serve.draft.dspark import DSpark
from kvmem.serve.draft.mtp import MTP, MTPProposer

SAID = np.array(sorted({*range(40, 90), 3, 255}), np.int32)


@pytest.fixture
def said(monkeypatch):
    """Every token that is proposed while a test runs."""
    found, propose = set(), MTPProposer.propose

    def listening(self, sequences, most):
        proposal = propose(self, sequences, most)
        found.update(token for tokens in proposal.tokens for token in tokens)
        return proposal

    monkeypatch.setattr(MTPProposer, "propose", listening)
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", [MTP, DSpark])
def test_texts_are_those_of_plain_steps_whatever_may_be_said(
    engine, tiny_model, said, kind, tp
):
    whole = mtp.draw(tiny_model(), 1, seed=3)
    own = {name: whole.params[name] for name in whole.spec.own_parameters()}
    own[draft_spec.WORDS] = SAID
    small = mtp.with_params(tiny_model(), 1, own, "of some words")
    groups = geometry.group_layers(small.spec.layer_specs("float32"), 4, domain="draft")
    prompts = [[5, 77, 41, 9] * 3, [60, 61, 62], [7] * 11]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = engine(tp=tp).generate(prompts, greedy)
    drafted = engine(tp=tp, pages=90, draft=kind(small, groups, 3))
    outputs = drafted.generate(prompts, greedy)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    assert drafted.stats().drafting.drafted > 0
    assert said and said <= {*SAID.tolist()}
