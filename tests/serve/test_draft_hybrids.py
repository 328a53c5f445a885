"""Draft layers behind hybrids: what is proposed is what a whole text would propose.

The product is a long one; that tokens are those of plain steps is `test_draft_matrix`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.geometry import Topology
from kvmem.model import dflash, mtp
from kvmem.model.dflash_decoder import DFlashDecoder
from kvmem.model.hybrid.decoder import HybridDecoder
from kvmem.model.mtp_decoder import MtpDecoder
from kvmem.model.partitions import partition_of
from kvmem.serve import SamplingParams

pytestmark = pytest.mark.long
LENGTH = 3  # tokens proposed


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(count, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


@pytest.fixture
def said_of_whole(layers_of, hybrid_model):
    """What layers say at places of a text that they read without a cache."""

    def say(kind, mode, tokens, places):
        model = hybrid_model(kind)
        small, _ = layers_of(dflash if mode == "dflash" else mtp, 4, 3, kind)
        part = partition_of(small.spec, Topology())
        own = {n: jnp.asarray(x) for n, x in part.rank_params(small.params, 0).items()}

        @jax.jit
        def choose(tokens, places):
            rows = HybridDecoder.from_params(model.spec, model.params).rows(tokens)
            if mode == "dflash":
                draft = DFlashDecoder(part, own)
                return jnp.argmax(draft.block_logits(rows, tokens, places, LENGTH), -1)
            none = jnp.zeros_like(rows[:, :1])
            before = jnp.concatenate([none, rows[:, :-1]], axis=1)
            draft = MtpDecoder(part, own)
            tokens = jnp.argmax(draft.head(draft.rows(tokens, hidden=before)), -1)
            return tokens[:, places[0], None]

        found = choose(np.int32([tokens]), np.int32([places]))
        return np.asarray(found)[0].tolist()

    return say


@pytest.mark.parametrize("mode", ["mtp", "dspark", "dflash"])
@pytest.mark.parametrize("kind", ["window", "state", "indexer"])
def test_what_is_proposed_is_what_a_whole_text_proposes(
    drafted, said_of_whole, mode, kind
):
    """Through chunks, rejected tokens, whose states are read into again, and prefixes
    that are found where they can be. Of a chain the first token is compared."""
    made, said, cached = drafted(mode, kind=kind), [], []
    propose = made.verifier.proposer.propose

    def and_note(sequences, most):
        proposal = propose(sequences, most)
        said.append((len(sequences[0].tokens) - 1, list(proposal.tokens[0])))
        return proposal

    made.verifier.proposer.propose = and_note
    prompt = text(83, 21)
    for _ in range(3):  # of itself and what came of it, the next is made
        said.clear()
        (output,) = made.generate(prompt, greedy(9))
        tokens = [*prompt, *output.output_ids]
        want = said_of_whole(kind, mode, tokens, [place for place, _ in said])
        assert len(said) > 3
        for (_, found), row in zip(said, want, strict=True):
            assert found[: len(row)] == row[: len(found)]
        cached.append(output.cached_tokens)
        prompt = [*tokens, *text(84, 2)]
    assert cached[0] == 0 and min(cached[1:]) >= 16
    assert made.stats().drafting.drafted > made.stats().drafting.accepted
    assert not made.stats().drafting.faults


@pytest.mark.parametrize("mode", ["mtp", "dspark", "dflash"])
@pytest.mark.parametrize("kind", ["window", "state"])
def test_preempted_samples_behind_a_hybrid_are_answered_as_alone(drafted, mode, kind):
    warm = greedy(30, temperature=1.2, top_k=4, seed=5, n=2)
    prompts = [text(70 + seed, 14) for seed in range(3)]
    plain = drafted(None, kind=kind).generate(prompts, warm)
    made = drafted(mode, kind=kind)
    outputs = made.generate(prompts, warm)
    assert [o.completions for o in outputs] == [o.completions for o in plain]
    assert made.scheduler.num_preempted > 0
    assert made.accounts.in_use == 0 and not made.stats().drafting.faults
