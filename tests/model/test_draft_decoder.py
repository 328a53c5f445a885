"""Draft layers that propose some words alone: the target's logits of those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvmem import errors
from kvmem.geometry import Topology, envelope, group_layers
from kvmem.model import dflash, draft_layers, draft_spec, mtp, parallel
from kvmem.model.loaded import LoadedModel
from kvmem.pool.table import GroupTable

SAID = np.array([0, 3, 17, 33, 34, 61, 66], np.int32)  # on both ranks, both ends
TABLE = np.array([[2, 0, 3]], np.int32)


class Words:
    """What a model id asks a tokenizer for."""

    identity, template = "words", None


@pytest.fixture(scope="module")
def layers(decoder_spec, decoder_params):
    """A target, and draft layers of it that propose some words or all."""

    @functools.cache
    def make(kind, tied, some):
        spec = decoder_spec(tie_embeddings=tied)
        target = LoadedModel(spec, decoder_params(spec), Words(), "small")
        own = kind.spec_of(spec, 1)
        params = decoder_params(own, seed=3)
        wanted = {name: np.float32(params[name]) for name in own.own_parameters()}
        wanted |= {draft_spec.WORDS: SAID} if some else {}
        return target, kind.with_params(target, 1, wanted, "of a test")

    return make


def heads(draft, tp, rows):
    """Return logits f32[S, n, V] of all ranks side by side."""
    weights = parallel.load(draft.spec, draft.params, Topology(tp))

    def of_rank(split):
        return nnx.merge(weights.graph, split, weights.shared).head(rows, "tp")

    found = jax.vmap(of_rank, axis_name="tp")(weights.split)
    return np.concatenate(list(found), axis=-1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", [mtp, dflash])
def test_words_have_the_logits_of_the_whole_head_and_all_else_none(
    layers, kind, tp, tied
):
    rows = np.random.default_rng(1).standard_normal((2, 3, 32), np.float32)
    whole = heads(layers(kind, tied, False)[1], tp, rows)
    some = heads(layers(kind, tied, True)[1], tp, rows)
    assert some.shape == whole.shape
    np.testing.assert_allclose(some[..., SAID], whole[..., SAID], rtol=1e-5, atol=1e-5)
    rest = np.setdiff1d(np.arange(some.shape[-1]), SAID)
    assert np.isneginf(some[..., rest]).all()


def test_a_fault_is_seen_though_few_words_are_said(layers):
    rows = np.full((1, 1, 32), np.nan, np.float32)
    assert np.isnan(heads(layers(mtp, True, True)[1], 1, rows)).any()


def test_words_are_kept_beside_the_tensors_and_change_no_id(layers, tmp_path):
    target, some = layers(mtp, True, True)
    _, every = layers(mtp, True, False)
    for int8 in (False, True):
        path = tmp_path / f"{int8}.safetensors"
        draft_layers.save(path, some, target, int8=int8)
        found = draft_layers.load(path, target)
        assert found.spec == some.spec and found.spec.words == tuple(SAID.tolist())
        assert found.params.keys() == every.params.keys()
    assert some.model_id == every.model_id  # the rows that are kept are the same


@pytest.mark.parametrize("words", [[], [3, 2], [2, 2], [-1, 4], [5, 67]], ids=str)
def test_words_are_ascending_ids_of_the_model(layers, words):
    target, draft = layers(mtp, True, False)
    own = {name: draft.params[name] for name in draft.spec.own_parameters()}
    own[draft_spec.WORDS] = np.array(words, np.int32)
    with pytest.raises(errors.FormatMismatch, match="ascending token ids below 67"):
        mtp.with_params(target, 1, own, "of a test")


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_that_nobody_asks_about_leave_the_same_rows(layers, tp):
    """Without logits and features a step writes what it writes with them."""
    _, draft = layers(mtp, True, True)
    (group,) = group_layers(draft.spec.layer_specs("float32"), 4, domain="draft")
    page = envelope.build(group, Topology(tp), 0)
    weights = parallel.load(draft.spec, draft.params, Topology(tp))
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 67, (1, 9)).astype(np.int32)
    hidden = rng.standard_normal((1, 9, 32), np.float32)
    step, found = parallel.make_step((page,)), []
    for logits, features in ((1, 1), (0, 0)):
        pages = jnp.full((tp, 4, page.nbytes), 0xFF, jnp.uint8)
        pages, said, *_ = step(
            weights,
            pages,
            tokens,
            jnp.zeros(1, jnp.int32),
            jnp.array([9], jnp.int32),
            (GroupTable(jnp.asarray(TABLE), jnp.zeros(1, jnp.int32)),),
            num_logits=logits,
            num_features=features,
            hidden=hidden,
        )
        found.append(np.asarray(pages))
        assert said.size == 0 or logits
    np.testing.assert_array_equal(*found)
    assert (found[0] != 0xFF).any()
