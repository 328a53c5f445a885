"""Checkpoint directories: every family, dtype and sharding gives the named tensors."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from kvmem.errors import FormatMismatch
from kvmem.model import load_gguf, load_safetensors, tensor_file

FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_tensor_by_tensor(
    tiny_spec, make_params, write_checkpoint, family, num_shards
):
    spec = dataclasses.replace(tiny_spec, tie_embeddings=False, **FAMILIES[family])
    params = make_params(spec)
    config = {"model_type": family}
    model = load_safetensors.load(
        write_checkpoint(spec, params, config=config, num_shards=num_shards)
    )
    assert dataclasses.replace(model.spec, name="tiny") == spec
    assert model.spec.name == "checkpoint"
    assert set(model.params) == set(params)
    for name, array in params.items():
        np.testing.assert_array_equal(model.params[name], array, err_msg=name)


def test_a_gguf_file_and_a_checkpoint_of_one_model_agree(
    tiny_spec, make_params, write_checkpoint, write_gguf
):
    params = make_params(tiny_spec)
    a = load_safetensors.load(write_checkpoint(tiny_spec, params))
    b = load_gguf.load(write_gguf(tiny_spec, params))
    assert dataclasses.replace(a.spec, name="tiny") == b.spec
    assert all(np.array_equal(a.params[name], b.params[name]) for name in params)
    assert a.tokenizer.encode("the 123") == b.tokenizer.encode("the 123")


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_narrow_floats_are_widened_exactly(
    tiny_spec, make_params, write_checkpoint, stored
):
    dtype = np.dtype(getattr(ml_dtypes, stored, None) or stored)
    params = {n: a.astype(dtype) for n, a in make_params(tiny_spec).items()}
    directory = write_checkpoint(tiny_spec, as_stored(params))
    if stored == "bfloat16":
        mark_bfloat16(directory / "model.safetensors")
    model = load_safetensors.load(directory)
    for name, array in params.items():
        assert model.params[name].dtype == np.float32
        np.testing.assert_array_equal(model.params[name], array.astype(np.float32))
    kept = load_safetensors.load(directory, dtype=stored)
    assert {array.dtype for array in kept.params.values()} == {dtype}
    assert kept.model_id != model.model_id


def as_stored(params):
    """bfloat16 as the float16 of the same bits: numpy's writer knows no bfloat16."""
    return {
        name: array.view(np.float16) if array.dtype == ml_dtypes.bfloat16 else array
        for name, array in params.items()
    }


def mark_bfloat16(path):
    """Say in the header that the elements are bfloat16."""
    data = path.read_bytes()
    nbytes = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + nbytes].replace(b'"F16"', b'"BF16"')
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + nbytes :])


def test_tensors_of_the_asked_dtype_are_mapped_not_copied(
    tiny_spec, make_params, write_checkpoint
):
    params = load_safetensors.load(
        write_checkpoint(tiny_spec, make_params(tiny_spec))
    ).params
    assert not any(array.flags.owndata for array in params.values())
    with pytest.raises(ValueError, match="read-only"):
        params["model.norm.weight"][0] = 0


def test_what_older_writers_add_is_dropped(tiny_spec, make_params, write_checkpoint):
    params = make_params(tiny_spec)
    surplus = {
        "lm_head.weight": params["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    model = load_safetensors.load(write_checkpoint(tiny_spec, params | surplus))
    assert set(model.params) == set(params)


def test_an_untied_model_needs_its_output(tiny_spec, make_params, write_checkpoint):
    spec = dataclasses.replace(tiny_spec, tie_embeddings=False)
    directory = write_checkpoint(spec, make_params(tiny_spec))
    with pytest.raises(FormatMismatch, match=r"lm_head\.weight is missing"):
        load_safetensors.load(directory)


def test_a_shard_that_is_missing_or_elsewhere_is_named(
    tiny_spec, make_params, write_checkpoint
):
    directory = write_checkpoint(tiny_spec, make_params(tiny_spec), num_shards=2)
    index = directory / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    outside = f"../checkpoint/{places['model.norm.weight']}"
    wrong = places | {"model.norm.weight": outside}
    index.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(FormatMismatch, match=r"shard '\.\./checkpoint"):
        load_safetensors.load(directory)
    swapped = {name: "model-00001-of-00002.safetensors" for name in places}
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(FormatMismatch, match="does not hold it"):
        load_safetensors.load(directory)
    index.write_text(json.dumps({"weight_map": places}))
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatMismatch, match="model-00002-of-00002"):
        load_safetensors.load(directory)


def test_a_directory_without_weights_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FormatMismatch, match=r"model\.safetensors"):
        load_safetensors.load(tmp_path)
    with pytest.raises(FormatMismatch, match="nowhere"):
        load_safetensors.load(tmp_path / "nowhere")


def test_ids_beyond_the_embedding_are_refused(tiny_spec, make_params, write_checkpoint):
    spec = dataclasses.replace(tiny_spec, vocab=tiny_spec.vocab - 1)
    directory = write_checkpoint(spec, make_params(spec))
    with pytest.raises(FormatMismatch, match="ids up to 263"):
        load_safetensors.load(directory)


@pytest.fixture
def file(tiny_spec, make_params, write_checkpoint):
    directory = write_checkpoint(tiny_spec, make_params(tiny_spec))
    return directory / "model.safetensors"


def test_a_damaged_tensor_file_is_refused(file):
    whole = file.read_bytes()
    for data in (b"", whole[:7], whole[:200], whole[:-4], b"\xff" * 100):
        file.write_bytes(data)
        with pytest.raises(FormatMismatch, match=r"model\.safetensors"):
            tensor_file.read(file)


def test_integer_elements_mean_quantised_weights_and_are_refused(file):
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(FormatMismatch, match="I32"):
        tensor_file.read(file)
