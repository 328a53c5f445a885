"""GGUF files: what comes out is what transformers holds, rope order included."""

import dataclasses

import gguf
import numpy as np
import pytest

from kvmem.errors import FormatMismatch
from kvmem.model import load_gguf, loaded

DEMO_ID = "07d8b7a9b45ade774fa1d34a4ad7e2b2bb3e8096855c7143468bc51fd95e2458"
DEMO_Q = "54b377bbfa2deab945dfdba7fb59e0ca3eb74329358bd1b53b635b3ff37c1a56"
DEMO_EMBED = "3fd491c8066dd9dc1a2bf6796701526c82817d95c0ecabacdef3013c2b8bbbaa"


def test_the_demo_model_has_the_sizes_its_file_declares(smollm2):
    spec = smollm2.spec
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.hidden, spec.mlp, spec.vocab) == (576, 1536, 49_152)
    assert spec.norm_eps == 1e-5 and spec.rope.theta == 100_000.0
    assert spec.tie_embeddings and spec.max_position == 8192 and spec.bos_id == 1
    assert {array.dtype.name for array in smollm2.params.values()} == {"float32"}


def test_the_demo_model_is_byte_for_byte_the_one_transformers_loads(smollm2):
    # Compared once, tensor by tensor, with what transformers 5.24 loads (torch 2.13).
    assert smollm2.digests["model.layers.0.self_attn.q_proj.weight"] == DEMO_Q
    assert smollm2.digests["model.embed_tokens.weight"] == DEMO_EMBED
    assert smollm2.model_id == DEMO_ID


def test_every_tensor_comes_back_under_its_name(tiny_spec, make_params, write_gguf):
    params = make_params(tiny_spec)
    model = load_gguf.load(write_gguf(tiny_spec, params))
    assert model.spec == tiny_spec
    assert set(model.params) == set(params)
    for name, array in params.items():
        np.testing.assert_array_equal(model.params[name], array, err_msg=name)


def test_no_tensor_lies_in_the_file_that_was_read(tiny_spec, make_params, write_gguf):
    path = write_gguf(tiny_spec, make_params(tiny_spec))
    model = load_gguf.read(path)
    path.write_bytes(bytes(path.stat().st_size))  # in place: a map would see it
    assert loaded.tensor_digests(model.params) == model.digests


def test_an_untied_model_has_its_own_output(tiny_spec, make_params, write_gguf):
    spec = dataclasses.replace(tiny_spec, tie_embeddings=False)
    params = make_params(spec)
    model = load_gguf.load(write_gguf(spec, params))
    assert not model.spec.tie_embeddings
    np.testing.assert_array_equal(
        model.params["lm_head.weight"], params["lm_head.weight"]
    )


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_0", "Q5_1", "BF16", "F16"])
def test_quantised_tensors_are_expanded(tiny_spec, make_params, write_gguf, name):
    quant = gguf.GGMLQuantizationType[name]
    params = make_params(tiny_spec)
    model = load_gguf.load(write_gguf(tiny_spec, params, quant=quant))
    for name, array in params.items():
        if array.ndim == 2:  # rows are quantised one by one, so order does not matter
            array = gguf.dequantize(gguf.quantize(array, quant), quant)
        np.testing.assert_array_equal(model.params[name], array, err_msg=name)


def test_half_split_scores_equal_the_interleaved_ones_of_the_file(made):
    rng = np.random.default_rng(5)
    heads, width, hidden = 3, 8, 12
    weight = rng.standard_normal((2, heads * width, hidden))
    x = rng.standard_normal((2, hidden))
    angle = np.outer([3, 11], 100.0 ** (-np.arange(width // 2) / (width // 2)))

    def rotated(rows, split):
        a, b = split(rows.reshape(heads, width))
        cos, sin = np.cos(angle[:, None]), np.sin(angle[:, None])
        return a * cos - b * sin, a * sin + b * cos

    def scores(weights, split):
        qk = [rotated(w @ v, split) for w, v in zip(weights, x, strict=True)]
        (qa, qb), (ka, kb) = [(a[i], b[i]) for i, (a, b) in enumerate(qk)]
        return (qa * ka + qb * kb).sum(-1)

    stored = [made.interleaved(w, heads) for w in weight]
    ours = [load_gguf._half_split(w, heads) for w in stored]
    neighbours = scores(stored, lambda r: (r[:, 0::2], r[:, 1::2]))
    halves = scores(ours, lambda r: (r[:, : width // 2], r[:, width // 2 :]))
    np.testing.assert_allclose(halves, neighbours, rtol=1e-12)
    wrong = scores(stored, lambda r: (r[:, : width // 2], r[:, width // 2 :]))
    assert not np.allclose(wrong, neighbours)


def test_divisors_of_frequencies_and_linear_scaling_become_rope_facts(
    tiny_spec, make_params, write_gguf
):
    params = make_params(tiny_spec)
    factors = np.array([1, 1, 2, 4, 4, 8, 8, 8], np.float32)
    base = tiny_spec.rope.inverse_frequencies(16)
    path = write_gguf(tiny_spec, params | {"rope_freqs.weight": factors})
    scaled = load_gguf.load(path).spec.rope
    np.testing.assert_allclose(scaled.inverse_frequencies(16), base / factors)
    linear = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
    }
    scaled = load_gguf.load(write_gguf(tiny_spec, params, extra=linear)).spec.rope
    np.testing.assert_allclose(scaled.inverse_frequencies(16), base / 4)


def test_head_width_is_the_files_when_it_says_so(tiny_spec, make_params, write_gguf):
    spec = dataclasses.replace(tiny_spec, head_dim=32)
    path = write_gguf(spec, make_params(spec), extra={"llama.attention.key_length": 32})
    assert load_gguf.load(path).spec.head_dim == 32


def test_all_reasons_of_a_refusal_come_at_once(tiny_spec, make_params, write_gguf):
    extra = {
        "llama.expert_count": 8,
        "llama.attention.sliding_window": 64,
        "llama.rope.scaling.type": "yarn",
        "llama.attention.head_count_kv": [2, 1],
    }
    path = write_gguf(tiny_spec, make_params(tiny_spec), extra=extra)
    with pytest.raises(FormatMismatch) as error:
        load_gguf.load(path)
    for key in extra:
        assert key in str(error.value)


def test_another_architecture_is_refused_by_name(tiny_spec, make_params, write_gguf):
    path = write_gguf(tiny_spec, make_params(tiny_spec), architecture="gemma2")
    with pytest.raises(FormatMismatch, match="'gemma2', not 'llama'"):
        load_gguf.load(path)


def test_a_partly_rotated_head_is_refused(tiny_spec, make_params, write_gguf):
    extra = {"llama.rope.dimension_count": 8}
    path = write_gguf(tiny_spec, make_params(tiny_spec), extra=extra)
    with pytest.raises(FormatMismatch, match="rope over 8 of 16"):
        load_gguf.load(path)


def test_a_missing_tensor_or_key_is_named(tiny_spec, make_params, write_gguf):
    params = make_params(tiny_spec)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(FormatMismatch, match=f"{name} is missing"):
        load_gguf.load(write_gguf(tiny_spec, params, drop=(name,)))
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    with pytest.raises(FormatMismatch, match=r"q_proj\.bias is unknown"):
        load_gguf.load(write_gguf(tiny_spec, params | bias))
    for key in ("llama.feed_forward_length", "tokenizer.ggml.tokens"):
        with pytest.raises(FormatMismatch, match=f"{key} is missing"):
            load_gguf.load(write_gguf(tiny_spec, params, drop=(key,)))


def test_a_file_that_is_cut_or_no_gguf_is_refused(
    tiny_spec, make_params, write_gguf, tmp_path
):
    whole = write_gguf(tiny_spec, make_params(tiny_spec)).read_bytes()
    path = tmp_path / "cut.gguf"
    for stop in (0, 3, 40, 3000, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:stop])
        with pytest.raises(FormatMismatch, match=r"cut\.gguf"):
            load_gguf.load(path)
    path.write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(FormatMismatch, match="magic"):
        load_gguf.load(path)


def test_a_file_in_the_other_byte_order_is_refused(tmp_path):
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatMismatch, match="other order"):
        load_gguf.load(path)
