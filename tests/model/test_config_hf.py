"""Hugging Face configs: facts, or a refusal that names every field."""

import json

import numpy as np
import pytest

from kvmem.errors import FormatMismatch
from kvmem.model import config_hf


@pytest.fixture
def read(tmp_path, tiny_spec, made):
    def read(changes=None, drop=()):
        config = made.hf_config(tiny_spec, changes)
        config = {key: value for key, value in config.items() if key not in drop}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return config_hf.read(tmp_path / "config.json")

    return read


def test_both_spellings_of_rope_are_read(read, tiny_spec):
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}
    assert read().rope == read(new, drop=("rope_theta",)).rope == tiny_spec.rope
    old = read({"rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    both = {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0}
    assert read({"rope_parameters": both}).rope == old
    assert old.frequencies[0] == 0.5


def test_what_llama_leaves_out_has_llamas_meaning(read):
    spec = read(drop=("num_key_value_heads", "head_dim", "tie_word_embeddings"))
    assert spec.kv_heads == 4 and spec.head_dim == 16 and not spec.tie_embeddings
    assert read(drop=("rope_theta",)).rope.theta == 10_000.0


GOLDEN_ROPES = [
    # (scaling, pair and frequency), as transformers 5.24 computes them at width 64
    (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
        {0: 1.0, 16: 0.006538461893796921, 24: 0.0002500000118743628},
        1.138629436111989,
    ),
    (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        {
            0: 1.0,
            10: 0.016560440883040428,
            15: 0.0012905480107292533,
            16: 0.000429556705057621,
            17: 9.708286233944818e-05,
            24: 1.6619674170215148e-06,
        },
        1.0,
    ),
]


@pytest.mark.parametrize("block, frequencies, magnitude", GOLDEN_ROPES)
def test_scaled_frequencies_are_those_of_transformers(
    read, block, frequencies, magnitude
):
    rope = read({"rope_parameters": block, "head_dim": 64}).rope
    ours = rope.inverse_frequencies(64)
    for pair, frequency in frequencies.items():
        np.testing.assert_allclose(ours[pair], frequency, rtol=1e-6)
    assert rope.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    "more, magnitude",
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.7, "mscale_all_dim": 1.3}, 1.0970406 / 1.1802183),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarns_attention_factor_is_the_declared_one(read, more, magnitude):
    block = GOLDEN_ROPES[0][0] | more
    rope = read({"rope_parameters": block, "head_dim": 64}).rope
    assert rope.magnitude == pytest.approx(magnitude)


def test_yarns_ramp_follows_its_options(read):
    def frequencies(**more):
        block = GOLDEN_ROPES[0][0] | more
        return read({"rope_parameters": block, "head_dim": 64}).rope.frequencies

    plain = frequencies()
    assert frequencies(truncate=False) != plain
    assert frequencies(beta_fast=16) != plain != frequencies(beta_slow=2)


REFUSED = [
    ({"model_type": "gemma2"}, "model_type is 'gemma2'"),
    ({"model_type": "smollm3"}, "model_type is 'smollm3'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"model_type": "mistral", "sliding_window": 32}, "sliding_window is 32"),
    (
        {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True},
        "sliding_window is 32",
    ),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "between layers"),
    ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ({"model_type": "qwen3", "head_dim": None}, "head_dim is missing"),
    ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads"),
    ({"hidden_size": "64"}, "hidden_size is '64', not an integer >= 1"),
    ({"hidden_size": 64.5}, "hidden_size is 64.5, not an integer"),
    ({"hidden_size": True}, "hidden_size is True, not an integer"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0, not an integer from 1"),
    (
        {"num_hidden_layers": -1},
        "num_hidden_layers is -1, not an integer from 1 to 512",
    ),
    (
        {"num_key_value_heads": 0},
        "num_key_value_heads is 0, not an integer from 1 to 512",
    ),
    ({"head_dim": 0}, "head_dim is 0, not an integer >= 1"),
    ({"rms_norm_eps": "a"}, "rms_norm_eps is 'a', not a number > 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number"),
    ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or"),
    ({"layer_types": "full_attention"}, "layer_types is .*, not a list of texts"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', not a token id"),
    ({"rope_theta": 0}, "rope_theta is 0, not a number > 0"),
    ({"rope_scaling": "abc"}, "rope_scaling is 'abc', not an object"),
    ({"rope_scaling": {"rope_type": ["x"]}}, "rope key rope_type is .*, not a text"),
    ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor is 'x', not a num"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, not a number >"),
    (
        {"rope_parameters": GOLDEN_ROPES[1][0] | {"low_freq_factor": 4.0}},
        "low_freq_factor is 4.0, not below high_freq_factor 4.0",
    ),
    ({"rope_parameters": GOLDEN_ROPES[0][0] | {"rope_theta": 1}}, "yarn divides by"),
    ({"num_key_value_heads": 3}, "is 4, no multiple of num_key_value_heads 3"),
    ({"hidden_size": 66, "head_dim": None}, "hidden_size is 66, no multiple of num_at"),
    ({"head_dim": 15}, "head_dim is 15, and rope turns pairs"),
    ({"hidden_size": 60, "head_dim": None}, "head_dim is 15, and rope turns pairs"),
]


@pytest.mark.parametrize("changes, phrase", REFUSED)
def test_what_the_decoder_does_not_compute_is_refused(read, changes, phrase):
    with pytest.raises(FormatMismatch, match=phrase):
        read(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 128},  # as long as any text
        {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False},
        {"model_type": "llama", "sliding_window": 32},  # llama knows no such field
        {"layer_types": ["full_attention", "full_attention"]},
        {"quantization_config": None, "attention_bias": False},
    ],
)
def test_a_window_that_never_bites_is_no_window(read, changes):
    assert read(changes).max_position == 128


def test_all_refusals_come_at_once(read):
    with pytest.raises(FormatMismatch) as error:
        read({"mlp_bias": True, "hidden_act": "relu", "rope_scaling": {"type": "x"}})
    for phrase in ("mlp_bias", "hidden_act", "rope_type"):
        assert phrase in str(error.value)


def test_faults_of_type_and_of_meaning_come_at_once(read):
    with pytest.raises(FormatMismatch) as error:
        read(
            {
                "hidden_size": "64",
                "vocab_size": 0,
                "num_key_value_heads": 3,
                "rope_scaling": {"type": "linear", "factor": "x"},
            }
        )
    said = str(error.value)
    for phrase in ("hidden_size", "vocab_size", "num_key_value_heads", "factor"):
        assert phrase in said
    assert "missing" not in said


def test_null_stands_for_absent(read, tiny_spec):
    changes = {"rope_theta": None, "rope_scaling": None, "tie_word_embeddings": None}
    changes |= {"partial_rotary_factor": None, "sliding_window": None}
    spec = read(changes)
    assert spec.rope.theta == 10_000.0 and not spec.tie_embeddings


@pytest.mark.parametrize(
    ("name", "text", "phrase"),
    [
        ("config.json", "[]", "it holds a list"),
        ("config.json", '{"a": 1', "no JSON"),
        ("config.json", b"\xff\xfe", "no JSON"),
        ("generation_config.json", "{", "generation_config.json: it is no JSON"),
        ("generation_config.json", "3", "generation_config.json: it holds a int"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
    ],
)
def test_files_that_hold_no_object_are_refused(read, tmp_path, name, text, phrase):
    read()
    raw = text if isinstance(text, bytes) else text.encode()
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(FormatMismatch, match=phrase):
        config_hf.read(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["[]", "{", '{"torch_dtype": 16}'])
def test_a_declared_dtype_is_read_from_an_object_alone(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatMismatch):
        config_hf.declared_dtype(tmp_path / "config.json")


def test_ends_of_text_are_those_of_the_generation_config(read, tmp_path):
    assert read().eos_ids == (0,)
    assert read({"eos_token_id": 7}).eos_ids == (7,)
    assert read({"eos_token_id": None}).eos_ids == ()
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [2, 5]}')
    assert read().eos_ids == (2, 5)
    generation.write_text('{"eos_token_id": null}')
    assert read().eos_ids == (0,)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatMismatch, match="no JSON"):
        config_hf.read(tmp_path / "config.json")
