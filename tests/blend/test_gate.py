"""The gate: which models may be blended, by their facts and by what was measured."""

import dataclasses
import json

import pytest

from kvmem import errors
from kvmem.blend import BlendConfig, Verdict, gate
from kvmem.geometry import LayerSpec, Rope, Topology, group_layers, kinds
from kvmem.model import cache_facts

ROPE = Rope(theta=100.0)


def gqa(name, index, **changes):
    return LayerSpec(name, index, kv_heads=2, head_dim=8, **{"rope": ROPE} | changes)


def indexed(rope):
    layers = []
    for index in range(3):
        latent = {"rank": 128, "rope_dim": 8, "scale": 0.1, "dtype": "float32"}
        layers.append(kinds.latent(f"layers.{index}", index, rope=ROPE, **latent))
        name = f"layers.{index}.indexer"
        layers.append(kinds.indexer(name, index, dim=128, rope=rope))
    return group_layers(layers, 4)


DENSE = group_layers([gqa(f"layers.{n}", n) for n in range(3)], 4)
HADAMARD = indexed(Rope(kind="hadamard"))


def laws(groups, topology=None, **config):
    return " | ".join(gate.objections(groups, BlendConfig(**config), topology))


def test_keys_that_turn_are_blended():
    assert laws(DENSE) == ""
    assert laws(indexed(ROPE)) == ""


def test_recurrent_layers_are_refused_whatever_the_ratio():
    state = {"key_heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8}
    state |= {"conv_kernel": 4}
    layers = [kinds.gated_delta("layers.0", 0, **state), gqa("layers.1", 1)]
    for ratio in (0.15, 1.0):
        assert "recurrent layers (layers.0)" in laws(
            group_layers(layers, 4), ratio=ratio
        )


def test_windows_are_refused_unless_no_text_outgrows_them():
    layers = [gqa("layers.0", 0, window=16), gqa("layers.1", 1)]
    assert "keeps the tokens of a window" in laws(group_layers(layers, 4))
    assert laws(group_layers(layers, 4, max_length=16)) == ""


@pytest.mark.case("ROP-03")
@pytest.mark.parametrize("kind", ["multi_axis", "length_scaled", "hadamard"])
def test_a_rope_that_does_not_turn_is_refused_by_its_reason(kind):
    groups = group_layers(
        [gqa("layers.0", 0), gqa("layers.1", 1, rope=Rope(kind=kind))], 4
    )
    found = laws(groups, check_layer=0)
    assert "keys of layers.1 cannot be turned" in found
    assert "allow_stale_selector" not in found, "no index keys are in the way"
    assert laws(groups, check_layer=0, allow_stale_selector=True) == found
    assert laws(groups, check_layer=0, ratio=1.0) == "", "all keys are computed anew"


def test_a_mixed_indexer_is_blended_at_ratio_1_or_where_it_may_be_stale():
    found = laws(HADAMARD)
    assert "layers.0.indexer" in found and "Hadamard" in found
    assert "blend.allow_stale_selector or blend.ratio = 1 allow it" in found
    assert laws(HADAMARD, ratio=1.0) == ""
    assert laws(HADAMARD, allow_stale_selector=True) == ""
    names = gate.stale_layers(HADAMARD)
    assert names == tuple(f"layers.{index}.indexer" for index in range(3))
    assert gate.stale_layers(indexed(ROPE)) == ()


def test_the_published_indexer_is_known_to_be_mixed():
    facts = {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "index_head_dim": 128,
    }
    groups = group_layers(cache_facts.layers(facts, "bfloat16"), 64)
    kinds_of = {layer.kind: layer.rope for g in groups for layer in g.layers}
    assert kinds_of["indexer"].kind == "hadamard"
    assert kinds_of["mla"] is None, "rows are sizes where no decoder computes them"


def test_token_shards_are_refused():
    assert "dcp is 2" in laws(DENSE, Topology(tp=1, dcp=2))
    assert laws(DENSE, Topology(tp=2)) == ""


def test_the_check_layer_is_the_first_from_there_on_that_keeps_keys():
    layers = [gqa("a", 0), gqa("b", 1), gqa("c", 2, shares="b"), gqa("d", 3)]
    groups = group_layers(layers, 4)
    found = [
        layer and layer.name
        for n in range(5)
        for layer in [gate.check_layer(groups, BlendConfig(check_layer=n))]
    ]
    assert found == ["a", "b", "d", "d", None]
    assert "no layer from there on" in laws(groups, check_layer=4)
    assert gate.check_layer(HADAMARD, BlendConfig()).name == "layers.1"


def test_all_laws_that_are_broken_are_named_at_once():
    layers = [
        gqa("layers.0", 0, window=16),
        gqa("layers.1", 1, rope=Rope(kind="multi_axis")),
    ]
    with pytest.raises(errors.IncompatiblePlan) as caught:
        gate.require(group_layers(layers, 4), Topology(dcp=2), BlendConfig())
    for word in ("dcp is 2", "a window", "several axes"):
        assert word in str(caught.value)


VERDICT = Verdict(
    model_id="m" * 64,
    kv_dtype="float32",
    ratio=0.15,
    check_layer=1,
    stale_selector=(),
    num_texts=3,
    num_tokens=48,
    agreement=0.95,
    first_agreement=1.0,
    kl=0.02,
    blended_s=0.5,
    recomputed_s=2.0,
)


@pytest.fixture
def record(tmp_path):
    def write(**changes):
        path = tmp_path / "gate.json"
        path.write_text(json.dumps(dataclasses.replace(VERDICT, **changes).as_json()))
        return str(path)

    return write


def test_a_record_is_read_as_it_was_written(record):
    found = gate.read(record(stale_selector=("layers.0.indexer",)))
    assert found == dataclasses.replace(VERDICT, stale_selector=("layers.0.indexer",))
    assert found.speedup == 4.0


def passes(config):
    return gate.require_passed(config, "m" * 64, "float32")


def test_a_model_that_passed_is_let_through(record):
    assert passes(BlendConfig(gate=record())) == VERDICT


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"model_id": "n" * 64}, "of model_id nnnn"),
        ({"kv_dtype": "bfloat16"}, "of kv_dtype bfloat16"),
        ({"ratio": 0.3}, "of ratio 0.3"),
        ({"check_layer": 0}, "of check_layer 0"),
        ({"agreement": 0.899}, "0.899 of the next tokens agree"),
        ({"kl": 0.3}, "mean divergence is 0.3"),
        ({"kl": float("nan")}, "mean divergence is nan"),
        ({"agreement": float("nan")}, "nan of the next tokens agree"),
    ],
)
def test_a_record_of_something_else_or_of_too_little_is_refused(record, changes, word):
    with pytest.raises(errors.IncompatiblePlan, match=word):
        passes(BlendConfig(gate=record(**changes)))


@pytest.mark.parametrize(
    "changes", [{"agreement": "0.95"}, {"kl": None}, {"ratio": True}]
)
def test_a_record_whose_figures_are_none_is_no_record(record, changes):
    with pytest.raises(errors.ConfigError, match=f"{next(iter(changes))}: no figure"):
        gate.read(record(**changes))


def test_without_a_gate_nothing_is_blended():
    with pytest.raises(errors.IncompatiblePlan, match="without a gate"):
        passes(BlendConfig())


def test_what_is_no_record_is_refused(tmp_path):
    path = tmp_path / "gate.json"
    for content in (None, "{", "[]", '{"model_id": "x"}'):
        if content is not None:
            path.write_text(content)
        with pytest.raises(errors.ConfigError, match="blend.gate"):
            gate.read(path)
