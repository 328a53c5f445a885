"""What a store is asked and cannot do is refused in words, and holds nothing up."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from kvmem import store
from kvmem.errors import ConfigError, FormatMismatch, InvalidId, StoreLocked
from kvmem.store import bucket, durable, io, report, writer_lease

CHUNK, RECORD = 4, 96


@pytest.mark.parametrize("wait", [-1, float("nan"), "3"])
def test_a_deadline_that_is_none_is_refused(open_store, make_chunks, wait):
    chunks, st = make_chunks(1), open_store()
    st.put(*chunks)
    with pytest.raises(ConfigError, match="deadline_s="):
        st.get(*chunks[:2], deadline_s=wait)
    assert st.get(*chunks[:2]).num_hit == 1


def test_a_get_that_waits_for_nothing_masks_nothing(open_store, make_chunks):
    chunks = make_chunks(3)
    with open_store() as st:
        st.put(*chunks)
    st = open_store(read_only=True)
    found = st.get(*chunks[:2], deadline_s=0)
    assert found.reason in (None, "deadline")
    assert st.get(*chunks[:2]).num_hit == 3 and not st.stats().num_masked


@pytest.mark.parametrize("lease_s", [0, -5, float("nan"), float("inf"), "x"])
def test_a_lease_that_holds_nothing_or_for_ever_is_refused(open_objects, lease_s):
    with pytest.raises(ConfigError, match="lease_s="):
        open_objects(lease_s=lease_s)


def test_a_writer_whose_clock_is_ahead_is_named_with_what_helps(
    open_objects, s3, monkeypatch
):
    objects = s3.objects()
    held = writer_lease.take(objects, 60.0)
    said = json.loads(objects.read(writer_lease.NAME))
    assert said["seconds"] == 60.0 and held.is_held
    said["until"] += 30 * 86_400
    objects.put(writer_lease.NAME, json.dumps(said).encode())
    with pytest.raises(StoreLocked, match="mend the clock, or delete _writer.json"):
        open_objects()
    objects.delete([writer_lease.NAME])
    open_objects().close()


@pytest.mark.parametrize("prefix", ["a/../c", ".", "..", "a/."])
def test_a_prefix_that_looks_like_a_way_through_folders_is_refused(prefix):
    with pytest.raises(ConfigError, match="no folders"):
        bucket.open_bucket(f"s3://bucket/{prefix}")


@pytest.mark.parametrize("limit", ["1GiB", float("nan"), b"1"])
def test_a_limit_that_is_no_number_is_refused(open_store, limit):
    with pytest.raises(ConfigError, match="max_nbytes="):
        open_store(max_nbytes=limit)


@pytest.mark.parametrize("sizes", [(1 << 20, 0, 4), (1e6, 96, 4), (9, "96", 4)])
def test_a_tier_without_sizes_is_refused(sizes):
    with pytest.raises(ConfigError, match="whole numbers above 0"):
        store.HostTier(*sizes)


@pytest.mark.parametrize("as_what", [np.ndarray.tolist, np.ndarray.tobytes])
def test_records_that_are_no_array_are_refused(open_store, make_chunks, as_what):
    chunks = make_chunks(1)
    with pytest.raises(FormatMismatch, match="View the bytes as uint8"):
        open_store().put(*chunks[:2], as_what(chunks.records))


def test_half_a_surrogate_names_nothing():
    with pytest.raises(InvalidId, match="surrogate"):
        store.chain_keys("\ud800", [1], 1)
    with pytest.raises(InvalidId, match="surrogate"):
        store.Extra("salt", ("\ud800",))
    with pytest.raises(InvalidId, match="model_id None"):
        store.PageStore.open("x", None, "f", RECORD)


def test_a_root_is_written_though_its_parent_cannot_be_opened(
    open_store, make_chunks, monkeypatch, tmp_path
):
    open_store().close()
    sync = io._sync

    def closed(path):
        if path == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        sync(path)

    monkeypatch.setattr(io, "_sync", closed)
    assert open_store().put(*make_chunks(1)).written == 1
    with pytest.raises(PermissionError):
        durable.make_folder(tmp_path / "new")


def test_a_folder_that_cannot_be_read_has_a_row_and_so_have_the_others(
    open_store, make_chunks, monkeypatch
):
    for model in ("a", "b"):
        with open_store(model) as st:
            st.put(*make_chunks(1))
    folders = report._folders

    def closed(folder):
        if folder.name == "a":
            raise PermissionError(13, "Permission denied", str(folder))
        return folders(folder)

    monkeypatch.setattr(report, "_folders", closed)
    rows = report.inspect(st.root)
    assert [(row.model_id, row.status) for row in rows] == [
        ("a", "unreachable"),
        ("b", "ok"),
    ]


def test_a_hidden_file_is_no_segment(open_store, make_chunks):
    with open_store() as st:
        st.put(*make_chunks(1))
    (st._folder / ".DS_Store").touch()
    assert [row.status for row in report.inspect(st.root)] == ["ok"]
    assert open_store().stats().num_unusable_segments == 0


def test_a_miss_beside_what_cannot_be_read_says_so(open_store, make_chunks):
    chunks, other = make_chunks(2), make_chunks(2, 1)
    with open_store() as st:
        for each in (chunks, other):
            st.put(*each)
    path = next(st._folder.glob("*/chunks.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    st = open_store(read_only=True)
    details = [st.get(*each[:2]).detail for each in (chunks, other)]
    assert any("1 segments cannot be read" in detail for detail in details)


def test_a_writer_whose_lock_file_was_deleted_writes_no_more(open_store, make_chunks):
    st = open_store()
    os.remove(st.root / "_writer.lock")
    second = open_store()
    with pytest.raises(StoreLocked, match="deleted or replaced"):
        st.put(*make_chunks(1))
    assert second.put(*make_chunks(1, 1)).written == 1


def test_a_root_that_lost_its_own_file_is_told_how_to_have_it_back(
    open_store, make_chunks
):
    with open_store() as st:
        st.put(*make_chunks(1))
    (st.root / "_store.json").unlink()
    for read_only in (False, True):
        with pytest.raises(ConfigError, match='write .*"chunk_tokens": N.* back'):
            open_store(read_only=read_only)


def test_puts_that_end_with_the_process_are_said_to_be_lost(tmp_path, repo_root):

    code = f"""
import numpy as np, threading
from kvmem import store
class Stuck(store.Disk):
    def perform(self, step, action):
        if step.verb == "orbax":
            threading.Event().wait()
        return action()
st = store.PageStore.open({str(tmp_path / "root")!r}, "m", "f", 96, 4, io=Stuck())
keys = store.chain_keys("m/f", [1, 2, 3, 4], 4)
st.put_async(keys, np.array([1, 2, 3, 4]), np.zeros((4, 96), np.uint8))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ) | {"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 puts in flight are lost" in done.stderr
