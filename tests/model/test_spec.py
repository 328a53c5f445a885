"""The facts of a decoder."""

import dataclasses

import pytest

from kvmem.errors import FormatMismatch


def test_every_tensor_of_the_model_is_named_with_its_shape(tiny_spec):
    shapes = tiny_spec.parameters()
    assert len(shapes) == 2 + 9 * tiny_spec.layers
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (2 * 16, 64)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (64, 96)
    assert "lm_head.weight" not in shapes


def test_untied_biased_and_normed_models_have_the_tensors_for_it(tiny_spec):
    spec = dataclasses.replace(
        tiny_spec, tie_embeddings=False, qkv_bias=True, qk_norm=True
    )
    more = set(spec.parameters()) - set(tiny_spec.parameters())
    assert len(more) == 1 + 5 * spec.layers
    assert spec.parameters()["model.layers.0.self_attn.v_proj.bias"] == (32,)
    assert spec.parameters()["model.layers.0.self_attn.q_proj.bias"] == (64,)
    assert spec.parameters()["model.layers.1.self_attn.k_norm.weight"] == (16,)


def test_layer_specs_say_what_a_page_keeps(tiny_spec):
    layers = tiny_spec.layer_specs("bfloat16")
    assert [layer.index for layer in layers] == [0, 1]
    assert layers[1].kv_heads == 2 and layers[1].rope.theta == 50_000.0
    assert sum(f.token_nbytes for f in layers[0].fields) == 2 * 2 * 16 * 2


def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(tiny_spec):
    found = tiny_spec.parameters()
    tiny_spec.require(found, "here")
    del found["model.norm.weight"]
    found["model.layers.0.mlp.bias"] = (3,)
    found["model.layers.0.mlp.up_proj.weight"] = (64, 96)
    with pytest.raises(FormatMismatch) as error:
        tiny_spec.require(found, "here")
    for word in (
        "model.norm.weight is missing",
        "mlp.bias is unknown",
        "model.layers.0.mlp.up_proj.weight is (64, 96), not (96, 64)",
    ):
        assert word in str(error.value)


def test_many_faults_are_counted(tiny_spec):
    with pytest.raises(FormatMismatch, match="and 12 more"):
        tiny_spec.require({}, "here")
