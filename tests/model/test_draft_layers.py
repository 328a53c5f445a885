"""Files of draft layers: the layers that were saved, for the model that they are of."""

import dataclasses

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from kvmem import errors
from kvmem.model import draft_layers, mtp
from kvmem.model.loaded import LoadedModel
from kvmem.model.spec import ModelSpec


class Words:
    """What a model id asks a tokenizer for."""

    identity = "words"
    template = None


@pytest.fixture
def model():
    def make(seed=0):
        spec = ModelSpec(
            name="tiny",
            hidden=8,
            mlp=12,
            layers=1,
            heads=2,
            kv_heads=1,
            head_dim=4,
            vocab=11,
            norm_eps=1e-5,
            tie_embeddings=True,
            max_position=64,
            eos_ids=(0,),
        )
        rng = np.random.default_rng(seed)
        params = {
            name: rng.normal(0, 1, shape).astype(np.float32)
            for name, shape in spec.parameters().items()
        }
        return LoadedModel(spec, params, Words(), f"tiny {seed}")

    return make


def test_layers_come_back_as_they_were_saved(tmp_path, model):
    target = model()
    drawn = mtp.draw(target, layers=2, seed=4)
    draft_layers.save(tmp_path / "draft.safetensors", drawn, target)
    found = draft_layers.load(tmp_path / "draft.safetensors", target, layers=2)
    assert found.spec == drawn.spec
    assert found.params.keys() == drawn.params.keys()
    for name, rows in drawn.params.items():
        np.testing.assert_array_equal(found.params[name], rows)
    shared = "model.embed_tokens.weight"
    assert found.params[shared] is target.params[shared]
    assert [path.name for path in tmp_path.iterdir()] == ["draft.safetensors"]


def test_half_the_bytes_on_disk_are_the_models_dtype_again(tmp_path, model):
    target = model()
    drawn = mtp.draw(target)
    half = {n: drawn.params[n].astype(np.float16) for n in drawn.spec.own_parameters()}
    draft_layers.save(
        tmp_path / "half", dataclasses.replace(drawn, params=half), target
    )
    found = draft_layers.load(tmp_path / "half", target)
    assert {rows.dtype.name for rows in found.params.values()} == {"float32"}
    np.testing.assert_allclose(
        found.params["mtp.fuse.weight"], drawn.params["mtp.fuse.weight"], atol=1e-4
    )


def test_layers_of_another_model_and_other_files_are_refused(tmp_path, model):
    target, other = model(), model(seed=1)
    path = tmp_path / "draft.safetensors"
    draft_layers.save(path, mtp.draw(target), target)
    with pytest.raises(errors.FormatMismatch, match="were trained behind the model"):
        draft_layers.load(path, other)
    with pytest.raises(errors.FormatMismatch, match=r"layers\.1\.\S+ is missing"):
        draft_layers.load(path, target, layers=2)
    with pytest.raises(errors.FormatMismatch, match="no such file"):
        draft_layers.load(tmp_path / "none", target)
    safetensors_numpy.save_file({"a": np.zeros(2, np.float32)}, tmp_path / "plain")
    with pytest.raises(errors.FormatMismatch, match="says of itself|says 'kvmem"):
        draft_layers.load(tmp_path / "plain", target)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(errors.FormatMismatch, match="whole file again"):
        draft_layers.load(path, target)


def test_a_byte_an_element_is_off_by_half_a_scale_at_most(tmp_path, model):
    target = model()
    drawn = mtp.draw(target, seed=5)
    rows = drawn.params["mtp.fuse.weight"]
    rows[0], rows[1, 3] = 0, 40  # a row of zeros, and one with an outlier
    draft_layers.save(tmp_path / "bytes", drawn, target, int8=True)
    stored = safetensors_numpy.load_file(tmp_path / "bytes")
    assert stored["mtp.fuse.weight"].dtype == np.int8
    found = draft_layers.load(tmp_path / "bytes", target)
    for name in drawn.spec.own_parameters():
        whole, read = drawn.params[name], found.params[name]
        assert read.dtype == np.float32 and read.shape == whole.shape
        if whole.ndim == 1:
            np.testing.assert_array_equal(read, whole)
            continue
        scale = np.abs(whole).max(1) / 127
        assert (np.abs(read - whole) <= scale[:, None] * 0.5001).all()
        assert np.abs(read - whole).max() > scale.max() / 8
    assert not found.params["mtp.fuse.weight"][0].any()
    assert found.params["mtp.fuse.weight"][1, 3] == pytest.approx(40)


def test_bytes_without_their_scales_and_scales_of_nothing_are_refused(tmp_path, model):
    target = model()
    path = tmp_path / "bytes"
    draft_layers.save(path, mtp.draw(target), target, int8=True)
    whole = safetensors_numpy.load_file(path)
    facts = {"scheme": "kvmem draft layers 2", "target": target.model_id}
    name = "mtp.fuse.weight.scale"
    for scale in (None, whole[name][:-1]):
        odd = {**whole, name: scale} if scale is not None else dict(whole)
        if scale is None:
            del odd[name]
        safetensors_numpy.save_file(odd, path, metadata=facts)
        with pytest.raises(errors.FormatMismatch, match="without its scales"):
            draft_layers.load(path, target)
    safetensors_numpy.save_file(
        {**whole, "mtp.mask.scale": whole[name]}, path, metadata=facts
    )
    with pytest.raises(errors.FormatMismatch, match=r"mtp\.mask\.scale scales nothing"):
        draft_layers.load(path, target)


def test_layers_of_another_kind_are_made_by_who_knows_them(tmp_path, model):
    target = model()
    drawn = mtp.draw(target)
    draft_layers.save(tmp_path / "draft", drawn, target)

    def complete(of, layers, params, source):
        return of, layers, sorted(params), source

    found = draft_layers.load(tmp_path / "draft", target, 3, complete)
    names = sorted(drawn.spec.own_parameters())
    assert found == (target, 3, names, f"of {tmp_path / 'draft'}")
