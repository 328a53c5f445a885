"""The model id: equal for equal models, different for anything that changes numbers."""

import dataclasses
import hashlib
import json
import math

import ml_dtypes
import numpy as np
import pytest

from kvmem import geometry
from kvmem.model import gguf_tokenizer, loaded


@pytest.fixture
def words(tokens_metadata):
    return gguf_tokenizer.build(tokens_metadata)


@pytest.fixture
def params(tiny_spec, make_params):
    return make_params(tiny_spec)


def test_equal_models_have_equal_ids_whatever_their_memory(params, words, tiny_spec):
    first = loaded.model_id(params, words, tiny_spec)
    assert len(first) == 64 and int(first, 16)
    shuffled = {name: params[name] for name in sorted(params, reverse=True)}
    assert loaded.model_id(shuffled, words, tiny_spec) == first
    fortran = {name: np.asfortranarray(array) for name, array in params.items()}
    assert loaded.model_id(fortran, words, tiny_spec) == first
    swapped = {name: array.astype(">f4") for name, array in params.items()}
    assert loaded.model_id(swapped, words, tiny_spec) == first


def test_a_scheme_does_not_drift(words, tiny_spec):
    def filled(name, shape):
        data = hashlib.shake_256(name.encode()).digest(4 * math.prod(shape))
        return np.frombuffer(data, "<f4").reshape(shape)

    shapes = tiny_spec.parameters()
    params = {name: filled(name, shape) for name, shape in shapes.items()}
    assert loaded.model_id(params, words, tiny_spec) == (
        "db04946cb09e9a9dd443d4e069dbbb67ce5652e1e28206a146283d86f98aa812"
    )


def test_any_tensor_changes_the_id(params, words, tiny_spec):
    first = loaded.model_id(params, words, tiny_spec)
    name = "model.layers.1.mlp.down_proj.weight"
    array = params[name]
    one_bit = array.copy()
    one_bit.view(np.uint8)[-1, -1] ^= 1
    others = [
        {name: one_bit},
        {name: array.reshape(96, 64)},
        {name: array.view(np.int32)},
        {name: array.astype(ml_dtypes.bfloat16)},
        {"model.norm.bias": np.zeros(64, np.float32)},
        {"model.norm.weight": params["model.layers.0.input_layernorm.weight"]},
    ]
    ids = [loaded.model_id(params | other, words, tiny_spec) for other in others]
    assert len({first, *ids}) == 1 + len(others)


CHANGES = {
    "hidden": 65,
    "mlp": 97,
    "layers": 3,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "vocab": 265,
    "norm_eps": 1e-6,
    "tie_embeddings": False,
    "rope": geometry.Rope(theta=50_000.0, magnitude=1.1),
    "qkv_bias": True,
    "qk_norm": True,
}
NAMES_ONLY = {"name": "other", "max_position": 9, "bos_id": 7, "eos_ids": (9,)}


def test_every_fact_is_either_a_number_or_known_not_to_be(tiny_spec):
    assert tuple(CHANGES) == loaded.NUMBERS
    fields = {field.name for field in dataclasses.fields(tiny_spec)}
    assert fields == CHANGES.keys() | NAMES_ONLY.keys()


@pytest.mark.parametrize("field", CHANGES)
def test_a_number_changes_the_id(params, words, tiny_spec, field):
    other = dataclasses.replace(tiny_spec, **{field: CHANGES[field]})
    first = loaded.model_id(params, words, tiny_spec)
    assert loaded.model_id(params, words, other) != first


def test_names_and_limits_do_not(params, words, tiny_spec):
    other = dataclasses.replace(tiny_spec, **NAMES_ONLY)
    first = loaded.model_id(params, words, tiny_spec)
    assert loaded.model_id(params, words, other) == first


def test_the_tokenizer_and_the_template_change_the_id(
    params, words, tiny_spec, tokens_metadata
):
    first = loaded.model_id(params, words, tiny_spec)
    for changes in ({"tokenizer.ggml.pre": "gpt-2"}, {"tokenizer.chat_template": "x"}):
        other = gguf_tokenizer.build(tokens_metadata | changes)
        assert loaded.model_id(params, other, tiny_spec) != first


def test_digests_that_are_known_are_not_taken_again(params, words, tiny_spec):
    digests = loaded.tensor_digests(params)
    model = loaded.LoadedModel(tiny_spec, params, words, "here", digests)
    assert model.model_id == loaded.model_id(params, words, tiny_spec)
    assert model.nbytes == sum(array.nbytes for array in params.values())
    digests["model.norm.weight"] = "0" * 64
    other = loaded.LoadedModel(tiny_spec, params, words, "here", digests)
    assert other.model_id != model.model_id


def test_a_models_words_are_short(params, words, tiny_spec):
    assert len(repr(loaded.LoadedModel(tiny_spec, params, words, "here"))) < 600


def test_the_facts_of_an_id_survive_json(params, words, tiny_spec):
    spec = dataclasses.replace(tiny_spec, rope=geometry.Rope(frequencies=(0.1, 1 / 3)))
    model = loaded.LoadedModel(spec, params, words, "here")
    assert model.model_id == loaded.model_id(params, words, spec)
    again = json.loads(json.dumps(model.facts))
    assert loaded.id_of(again) == model.model_id
    assert set(again["numbers"]) == set(loaded.NUMBERS)
    again["tensors"][0][3] = "0" * 64
    assert loaded.id_of(again) != model.model_id
