"""Weights of drafts: what is the target's lies on the device once, and a budget pays
for what is not."""

import jax
import numpy as np
import pytest

from kvmem import errors
from kvmem.config import Config, ModelConfig, PoolConfig, ServeConfig
from kvmem.config.speculative import SpeculativeConfig
from kvmem.model import draft_layers, mtp
from kvmem.model.draft_spec import WORDS
from kvmem.model.placed import placed

MIB = 1 << 20
NORMS = 2 * 32 * 4
LAYER = 32 * (64 + 2 * 32) + 64 * 32 + 3 * 32 * 48 + 2 * 32  # floats, norms too
OWN = {
    "ngram": 0,
    "frozen_kv": 0,
    "two_engine": 0,
    "mtp": LAYER + 32 * 64 + 2 * 32,  # what fuses two rows, and a norm for each
    "dspark": LAYER + 32 * 64 + 2 * 32,
    "dflash": LAYER + 32 * 32 + 2 * 32,  # a projection, a norm and a mask
}


@pytest.fixture
def config(llama_config):
    """A config of the tiny model on a device of a MiB."""
    sizes = {
        "vocab_size": 257,
        "max_position_embeddings": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    }
    source = llama_config("tiny", **sizes)

    def make(algorithm, draft=None, **more):
        return Config(
            model=ModelConfig(source=source),
            draft=draft and ModelConfig(source=llama_config("small", **sizes | draft)),
            pool=PoolConfig(page_size=4, device_memory=str(MIB)),
            serve=ServeConfig(max_batch=2, max_length=32),
            speculative=SpeculativeConfig(algorithm, **more),
        )

    return make


def new_nbytes(engine):
    """Bytes of a draft's weights that are not arrays of its target."""
    stepper = getattr(engine.verifier.proposer, "_stepper", None)
    if stepper is None:
        return 0
    theirs = {id(leaf) for leaf in jax.tree.leaves(engine.stepper.weights)}
    mine = jax.tree.leaves(stepper.weights)
    return sum(leaf.nbytes for leaf in mine if id(leaf) not in theirs)


@pytest.mark.parametrize("algorithm", OWN)
def test_a_device_pays_for_the_weights_that_are_a_drafts_own(
    config, tiny_model, algorithm
):
    made, own = config(algorithm), 4 * OWN[algorithm]
    assert made.draft_weight_nbytes == own
    assert made.budget().pool_nbytes == MIB - made.weight_nbytes - own
    # two norms are ones here and there, and so are one array each
    assert new_nbytes(made.engine(model=tiny_model())) == own - NORMS * bool(own)


def test_a_draft_model_is_paid_for_whole(config):
    made = config("two_engine", draft={"num_hidden_layers": 1})
    assert made.draft_weight_nbytes == 4 * (LAYER + 257 * 32 + 32)
    left = MIB - made.weight_nbytes - made.draft_weight_nbytes
    assert made.budget().pool_nbytes == left
    with pytest.raises(errors.OutOfPages, match="device_memory"):
        config("two_engine", draft={"num_hidden_layers": 40}).budget()


def test_the_heads_rows_of_words_that_are_proposed_are_a_drafts_own(
    config, tiny_model, tmp_path
):
    model, path = tiny_model(), tmp_path / "words.safetensors"
    drawn = mtp.draw(model)
    own = {name: drawn.params[name] for name in drawn.spec.own_parameters()}
    own[WORDS] = np.arange(3, 50, dtype=np.int32)
    draft_layers.save(path, mtp.with_params(model, 1, own, "words"), model)
    made = config("mtp", weights=str(path))
    assert made.draft_weight_nbytes == 4 * (OWN["mtp"] + 47 * 32)
    assert new_nbytes(made.engine(model=model)) == made.draft_weight_nbytes - NORMS
    assert draft_layers.words_of(tmp_path / "none") == ()


def test_exact_rejection_is_paid_for_the_probabilities_that_it_compares(config):
    """Two sequences of four drafted tokens: ten rows of the target, eight of theirs."""
    plain, exact = config("two_engine"), config("two_engine", acceptance="rejection")
    rows = {term.name: term.fixed_bytes for term in exact.budget().terms}
    assert rows["verify probabilities"] == (10 + 8) * 257 * 4
    assert exact.budget().fixed_nbytes - plain.budget().fixed_nbytes == 18 * 257 * 4


def test_arrays_are_one_where_name_shape_and_elements_are_equal():
    ids, ones = np.arange(3, dtype=np.int32), np.ones(2, np.float32)
    there = placed({"a": ids, "b": ids, "c": ones}, None)
    rows = {"a": ids.copy(), "b": ids + 1, "d": ones}
    found = placed(rows, None, there)
    assert found["a"] is there["a"]
    assert found["b"] is not there["b"] and found["b"].tolist() == [1, 2, 3]
    assert found["d"] is not there["c"]
