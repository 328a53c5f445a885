"""The kept, dequantised form of a GGUF file: fast, checked, replaceable."""

import os
import time

import numpy as np
import pytest

from kvmem import settings
from kvmem.model import load_gguf, weights_cache


@pytest.fixture
def path(tiny_spec, make_params, write_gguf):
    return write_gguf(tiny_spec, make_params(tiny_spec))


@pytest.fixture
def num_reads(monkeypatch):
    """Count how often the GGUF file itself is read."""
    calls = []
    read = load_gguf.read
    monkeypatch.setattr(load_gguf, "read", lambda p: calls.append(p) or read(p))
    return lambda: len(calls)


def same(a, b) -> bool:
    return (
        a.spec == b.spec
        and a.model_id == b.model_id
        and a.tokenizer.state() == b.tokenizer.state()
        and list(sorted(a.params)) == list(sorted(b.params))
        and all(np.array_equal(a.params[n], b.params[n]) for n in a.params)
    )


def entries() -> list[str]:
    return sorted(entry.name for entry in weights_cache.folder().iterdir())


def test_the_second_load_does_not_read_the_file(path, num_reads):
    first = load_gguf.load(path)
    second = load_gguf.load(path)
    assert num_reads() == 1 and same(first, second)
    assert entries() == [weights_cache.key_of(path)]


def test_mapped_arrays_are_read_only(path):
    load_gguf.load(path)
    array = load_gguf.load(path).params["model.norm.weight"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_scaled_rope_and_ends_survive_being_kept(
    tiny_spec, make_params, write_gguf, num_reads
):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tiny_spec, make_params(tiny_spec), extra=linear)
    first, second = load_gguf.load(path), load_gguf.load(path)
    assert num_reads() == 1 and hash(first.spec) == hash(second.spec)
    assert second.spec.rope.frequencies[1] == first.spec.rope.frequencies[1]


def flip(file, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "last byte of the tensors": lambda e: flip(e / "tensors.safetensors", -1),
    "header of the tensors": lambda e: flip(e / "tensors.safetensors", 0),
    "a byte of the facts": lambda e: flip(e / "model.json", 300),
    "the seal": lambda e: flip(e / "model.json", 3),
    "tensors cut": lambda e: os.truncate(e / "tensors.safetensors", 5000),
    "facts cut": lambda e: os.truncate(e / "model.json", 200),
    "facts empty": lambda e: os.truncate(e / "model.json", 0),
    "tensors gone": lambda e: (e / "tensors.safetensors").unlink(),
    "facts gone": lambda e: (e / "model.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_built_anew(path, num_reads, damage, caplog):
    first = load_gguf.load(path)
    DAMAGE[damage](weights_cache.folder() / weights_cache.key_of(path))
    assert same(first, load_gguf.load(path))
    assert num_reads() == 2 and "is damaged" in caplog.text
    assert same(first, load_gguf.load(path))
    assert num_reads() == 2
    assert entries() == [weights_cache.key_of(path)]


def test_a_file_that_changed_in_place_is_another_entry(
    tiny_spec, make_params, write_gguf
):
    first = load_gguf.load(write_gguf(tiny_spec, make_params(tiny_spec)))
    second = load_gguf.load(write_gguf(tiny_spec, make_params(tiny_spec, seed=1)))
    assert first.model_id != second.model_id
    assert len(entries()) == 2


def test_a_write_that_fails_half_way_leaves_nothing_and_the_load_succeeds(
    path, num_reads, monkeypatch, caplog
):
    def full(tensors, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_cache.safetensors_numpy, "save_file", full)
    load_gguf.load(path)
    load_gguf.load(path)
    assert num_reads() == 2 and "No space left" in caplog.text
    assert entries() == []


def test_a_model_too_large_to_keep_is_read_each_time(path, num_reads, monkeypatch):
    monkeypatch.setattr(weights_cache, "MAX_NBYTES", 1000)
    load_gguf.load(path)
    load_gguf.load(path)
    assert num_reads() == 2 and not weights_cache.folder().exists()


def test_what_a_killed_process_left_is_swept_after_a_day(path):
    old, young = (weights_cache.folder() / f".tmp-{age}" for age in ("old", "young"))
    for scratch in (old, young):
        scratch.mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    load_gguf.load(path)
    assert not old.exists() and young.exists()


def test_the_folder_is_the_homes_unless_the_environment_names_one(monkeypatch):
    assert weights_cache.folder().parent.name == "kvmem-cache"
    monkeypatch.delenv("KVMEM_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(weights_cache.folder()) == "/home/somebody/.cache/kvmem/gguf"


def test_the_folders_variable_is_no_setting(tiny_spec):
    env = {"KVMEM_CACHE": "/somewhere"}
    facts = settings.read(type(tiny_spec.rope), None, (), env)
    assert facts.value == type(tiny_spec.rope)()


def test_facts_alone_are_read_without_expanding_the_weights(path, monkeypatch):
    def expands(*args):
        raise AssertionError("a tensor was expanded")

    with monkeypatch.context() as patch:
        patch.setattr(load_gguf, "_params", expands)
        first = load_gguf.read_spec(path)
    assert not weights_cache.folder().exists()
    model = load_gguf.load(path)
    monkeypatch.setattr(load_gguf, "_open", expands)  # now from the cache
    assert load_gguf.read_spec(path) == first == model.spec
    DAMAGE["a byte of the facts"](weights_cache.folder() / weights_cache.key_of(path))
    with pytest.raises(AssertionError, match="expanded"):
        load_gguf.read_spec(path)
