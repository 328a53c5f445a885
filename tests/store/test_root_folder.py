import json
import os
import stat

import pytest

from kvmem.errors import ConfigError, CorruptPage, FormatMismatch, InvalidId
from kvmem.store import root_folder
from kvmem.store.segment import Facts


def test_a_new_root_is_private_and_says_its_chunk_size(tmp_path):
    root = tmp_path / "new" / "root"
    root_folder.take(root, 16).release()
    assert json.loads((root / "_store.json").read_text()) == {
        "kind": "kvmem store",
        "version": 1,
        "chunk_tokens": 16,
    }
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for path in root.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    root_folder.take(root, 16).release()
    root_folder.check(root, 16)


def test_another_chunk_size_is_refused_and_the_lock_given_back(tmp_path):
    root_folder.take(tmp_path, 16).release()
    for _ in range(2):
        with pytest.raises(FormatMismatch, match="chunk_tokens=32.*chunk_tokens=16"):
            root_folder.take(tmp_path, 32)
    with pytest.raises(FormatMismatch, match="chunk_tokens=32.*chunk_tokens=16"):
        root_folder.check(tmp_path, 32)


def test_another_layout_version_is_refused(tmp_path):
    (tmp_path / "_store.json").write_text('{"version": 2, "chunk_tokens": 16}')
    with pytest.raises(FormatMismatch, match="version 2.*version 1"):
        root_folder.take(tmp_path, 16)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"version": 1}', "\xff"])
def test_damaged_root_facts_are_named(tmp_path, text):
    (tmp_path / "_store.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptPage, match="_store.json"):
        root_folder.check(tmp_path, 16)


def test_a_folder_of_something_else_is_never_made_a_store(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="something else"):
        root_folder.take(tmp_path, 16)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(ConfigError, match="something else"):
        root_folder.take(tmp_path / "thesis.tex", 16)


def test_a_root_that_was_left_half_made_is_finished(tmp_path):
    (tmp_path / "_writer.lock").touch()
    (tmp_path / "_store.json.tmp").write_text('{"ver')
    root_folder.take(tmp_path, 16).release()
    root_folder.check(tmp_path, 16)


@pytest.mark.parametrize("where", ["nowhere", "empty", "file"])
def test_a_reader_needs_a_store_that_is_there_and_makes_none(tmp_path, where):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="there is no store"):
        root_folder.check(tmp_path / where, 16)
    assert not (tmp_path / "nowhere").exists()
    assert os.listdir(tmp_path / "empty") == []


@pytest.mark.parametrize(
    "identity",
    ["", ".", "..", "a/b", "../up", "/abs", "a\\b", "a b", "a\n", "a\0", "ü"]
    + ["_store.json", "-x", ".hidden", "x" * 129],
)
def test_an_identity_that_is_not_safe_as_a_folder_is_refused(identity):
    for facts in (Facts(identity, "f", 16, 96), Facts("m", identity, 16, 96)):
        with pytest.raises(InvalidId, match="names a folder"):
            root_folder.check_facts(facts)


@pytest.mark.parametrize("identity", ["m", "SmolLM2-135M.v1_x", "0" * 64, "x" * 128])
def test_digests_and_model_names_are_safe(identity):
    root_folder.check_facts(Facts(identity, identity, 16, 96))


@pytest.mark.parametrize(("chunk", "record"), [(0, 96), (16, 0), (-1, 96)])
def test_sizes_are_above_zero(chunk, record):
    with pytest.raises(ConfigError, match="above 0"):
        root_folder.check_facts(Facts("m", "f", chunk, record))
