import pytest

from kvmem.errors import ConfigError
from kvmem.geometry import Rope, group_layers
from kvmem.model.hybrid.families import FAMILIES
from kvmem.model.hybrid.mixers import Attention, DeltaNet, Latent
from kvmem.model.hybrid.spec import HybridSpec
from kvmem.settings import Table


def windows(spec):
    return [layer.window for layer in spec.layer_specs()]


def test_gpt_oss_has_windows_and_full_attention_in_turn(facts_of):
    spec = HybridSpec("x", facts_of("gpt_oss", num_hidden_layers=4))
    assert windows(spec) == [6, None, 6, None]
    assert all(mixer.learned_sinks and mixer.bias for mixer in spec.mixers)
    assert spec.mixers[0].rope == Rope(150_000.0)
    assert spec.parameters()["model.layers.3.mixer.sinks"] == (4,)
    assert spec.eos_ids == (256,) and spec.bos_id is None


def test_gemma_3_has_five_windows_to_a_full_attention_each_with_its_rope(facts_of):
    facts = facts_of("gemma3").plain() | {"num_hidden_layers": 6}
    del facts["sliding_window_pattern"]
    spec = HybridSpec("x", Table(facts))
    assert windows(spec) == [8] * 5 + [None]
    thetas = [mixer.rope.theta for mixer in spec.mixers]
    assert thetas == [10_000.0] * 5 + [1_000_000.0]
    assert {mixer.scale for mixer in spec.mixers} == {12**-0.5}
    assert spec.tie_embeddings and "lm_head.weight" not in spec.parameters()
    assert "model.layers.0.post_feedforward_layernorm.weight" in spec.parameters()


def test_deepseek_keeps_a_row_and_an_index_key_a_token(facts_of):
    spec = HybridSpec("x", facts_of("deepseek_v32"))
    full, index = group_layers(spec.layer_specs("bfloat16"), 16)
    assert (full.record_nbytes, index.record_nbytes) == (2 * 264, 2 * 132)
    assert index.tied_to == full.name
    assert full.layers[0].rope == Rope(10_000.0, "interleaved", offset=128, width=4)
    assert index.layers[0].rope == Rope(10_000.0, width=4)
    assert all(isinstance(mixer, Latent) for mixer in spec.mixers)


def test_qwen3_next_has_three_delta_nets_to_a_full_attention(facts_of):
    facts = facts_of("qwen3_next").plain() | {"num_hidden_layers": 4}
    del facts["full_attention_interval"]
    spec = HybridSpec("x", Table(facts))
    kinds = [type(mixer) for mixer in spec.mixers]
    assert kinds == [DeltaNet] * 3 + [Attention]
    assert spec.mixers[3].rope.width == 4 and spec.mixers[3].gated
    full, state = group_layers(spec.layer_specs("bfloat16"), 16)
    assert state.is_state and len(state.layers) == 3
    conv = 2 * 8 * 3 * 2 + 2 * 8 * 3 * 2 + 4 * 8 * 3 * 2  # q and k, then v, in bf16
    assert state.record_nbytes == 3 * (conv + 4 * 8 * 8 * 4)


def test_declared_layer_types_stand_above_the_pattern(facts_of):
    types = ["full_attention", "sliding_attention"] * 2
    facts = facts_of("gpt_oss", layer_types=types, num_hidden_layers=4)
    spec = HybridSpec("x", facts)
    assert windows(spec) == [None, 6, None, 6]


def test_equal_facts_are_one_model_with_one_cache(facts_of):
    one = HybridSpec("x", facts_of("gpt_oss"))
    assert one == HybridSpec("x", facts_of("gpt_oss"))
    assert hash(one) == hash(HybridSpec("x", facts_of("gpt_oss")))
    assert one != HybridSpec("x", facts_of("gpt_oss", sliding_window=7))


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"model_type": "mamba9"}, f"model_type to one of {', '.join(FAMILIES)}"),
        ({"num_local_experts": 8}, "num_local_experts is not computed.*MLPs are dense"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling is not computed"),
        ({"hidden_size": "32"}, "hidden_size: '32' is str, not int"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"layer_types": ["full_attention"]}, "1 layer types for 2 layers"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention among them"),
    ],
)
def test_what_is_not_understood_is_refused_in_words(changes, words, facts_of):
    with pytest.raises(ConfigError, match=words):
        HybridSpec("x", facts_of("gpt_oss", **changes))


def test_missing_fields_are_named_all_at_once(facts_of):
    facts = facts_of("gpt_oss").plain()
    del facts["head_dim"], facts["hidden_size"]
    with pytest.raises(ConfigError, match="hidden_size is missing; head_dim is miss"):
        HybridSpec("x", Table(facts))


def test_a_shared_cache_without_an_owner_is_refused(facts_of):
    facts = facts_of("gemma3", num_kv_shared_layers=1)  # the only full layer is last
    with pytest.raises(ConfigError, match="layer 2 of type full_attention.*Lower"):
        HybridSpec("x", facts).mixers  # noqa: B018
