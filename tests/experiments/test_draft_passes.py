"""Every place of a text begins the chain of rows that it would begin alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.draft_passes import passes
from kvmem.geometry import Topology
from kvmem.model import mtp
from kvmem.model.mtp_decoder import MtpDecoder
from kvmem.model.partitions import partition_of

LENGTH, TAUGHT, DEPTH = 11, 6, 3


@pytest.fixture(params=[1, 2], ids=["one layer", "two layers"])
def draft(request, tiny_model):
    layers = mtp.draw(tiny_model[1], request.param, seed=4)
    part = partition_of(layers.spec, Topology())
    weights = part.rank_params(layers.params, 0)
    return MtpDecoder(part, {name: jnp.asarray(x) for name, x in weights.items()})


@pytest.fixture
def text():
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 257, (2, LENGTH)).astype(np.int32)
    return tokens, rng.normal(0, 3, (2, LENGTH, 32)).astype(np.float32)


@nnx.jit
def chains(draft, tokens, rows):
    return passes(draft, tokens, rows, DEPTH, TAUGHT)


@nnx.jit
def read(draft, tokens, hidden):
    return draft.rows(tokens, hidden=hidden)


def alone(draft, tokens, rows, start):
    """Rows of one chain: the model's up to its first token, then its own.

    No row sees what is behind it, so zeros stand where nothing is known.
    """
    steps = np.arange(LENGTH)[None, :, None]
    known, found = np.where(steps < start, rows, 0), []
    for place in range(start, min(start + DEPTH, LENGTH)):
        hidden = np.pad(known, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        own = np.asarray(read(draft, tokens, hidden))[:, place]
        found.append(own)
        known[:, place] = own
    return found


def test_chains_have_the_rows_that_they_have_alone(draft, text):
    tokens, rows = text
    found = chains(draft, tokens, rows)
    first = LENGTH - TAUGHT
    assert [part.shape[1] for part in found] == [TAUGHT, TAUGHT, TAUGHT - 1]
    for start in range(first - 1, LENGTH):
        for number, own in enumerate(alone(draft, tokens, rows, start)):
            at = start + number - (LENGTH - found[number].shape[1])
            if at >= 0:
                np.testing.assert_allclose(found[number][:, at], own, atol=1e-5)


def test_a_pass_reads_nothing_of_the_model_behind_its_chains_beginning(draft, text):
    tokens, rows = text
    changed = rows.copy()
    changed[:, 7] += 1.0
    before, after = (chains(draft, tokens, each) for each in (rows, changed))
    for number, (mine, theirs) in enumerate(zip(before, after, strict=True)):
        first = LENGTH - mine.shape[1]
        same = [np.allclose(mine[:, i], theirs[:, i]) for i in range(mine.shape[1])]
        assert same == [first + i < 8 + number for i in range(len(same))]
