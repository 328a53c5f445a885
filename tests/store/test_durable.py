import os
import stat
import subprocess
import sys

import pytest

from kvmem.errors import StoreLocked
from kvmem.store import durable


@pytest.fixture
def calls(monkeypatch):
    """The syncs and renames in order; descriptors are named by their path."""
    seen = []
    fsync, rename = os.fsync, os.rename

    def name(descriptor):
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(
        os, "fsync", lambda fd: (seen.append(("sync", name(fd))), fsync(fd))
    )
    monkeypatch.setattr(
        os,
        "rename",
        lambda a, b: (
            seen.append(("rename", os.path.basename(a), os.path.basename(b))),
            rename(a, b),
        ),
    )
    return seen


def test_a_file_is_synced_renamed_and_its_folder_synced(tmp_path, calls):
    durable.write_file(tmp_path / "a.json", b"whole")
    assert calls == [
        ("sync", "a.json.tmp"),
        ("rename", "a.json.tmp", "a.json"),
        ("sync", tmp_path.name),
    ]
    assert (tmp_path / "a.json").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    durable.write_file(tmp_path / "a", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        durable.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_tree_is_synced_files_first_with_closed_modes(tmp_path, calls):
    top = tmp_path / "top"
    (top / "c" / "0").mkdir(parents=True)
    (top / "c" / "0" / "x").write_bytes(b"xx")
    (top / "y").write_bytes(b"")
    table = durable.seal_tree(top)
    assert table == {"c/0/x": (2, durable.digest(b"xx")), "y": (0, durable.digest(b""))}
    synced = [name for _, name in calls]
    assert sorted(synced[:2]) == ["x", "y"]
    assert sorted(synced[2:]) == ["0", "c", "top"]
    for path in [top, *top.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_sync_that_fails_in_a_tree_reaches_the_caller(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"x")

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        durable.seal_tree(tmp_path)


def test_each_new_folder_is_durable_in_its_parent(tmp_path, calls):
    durable.make_folder(tmp_path / "a" / "b")
    assert [name for _, name in calls] == [tmp_path.name, "a"]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_folder_whose_maker_died_before_the_sync_is_made_durable(tmp_path, calls):
    (tmp_path / "a").mkdir()
    durable.make_folder(tmp_path / "a")
    assert calls == [("sync", tmp_path.name)]


def test_a_second_writer_is_refused_and_told_who_holds_the_lock(tmp_path):
    lock = durable.WriterLock(tmp_path / "lock")
    with pytest.raises(StoreLocked, match=f"process {os.getpid()} on"):
        durable.WriterLock(tmp_path / "lock")
    assert lock.is_held
    lock.release()
    lock.release()
    assert not lock.is_held
    durable.WriterLock(tmp_path / "lock").release()


def test_the_lock_dies_with_its_process(tmp_path, repo_root):
    code = (
        "import pathlib, sys, time\n"
        "from kvmem.store import durable\n"
        f"lock = durable.WriterLock(pathlib.Path({str(tmp_path / 'lock')!r}))\n"
        "print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(repo_root)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(StoreLocked, match=f"process {other.pid}"):
                durable.WriterLock(tmp_path / "lock")
        finally:
            other.kill()
    durable.WriterLock(tmp_path / "lock").release()
