"""The seam: every touch of the disk passes it, each change as one named step."""

import ast
import stat
from pathlib import Path

import pytest

import kvmem.session
from kvmem.session import OsIO, SessionStore
from kvmem.session.io import Unsynced

HERE = Path(kvmem.session.__file__).parent
# What has a disk of its own: SQLite, and what runs no session's files.
OTHERS = {"book", "items", "item_rows", "keys", "client", "capture", "middleware"}
TOUCHES = {"open", "read_bytes", "write_bytes", "read_text", "write_text", "touch"}
TOUCHES |= {"unlink", "rename", "replace", "mkdir", "rmdir", "iterdir", "glob", "stat"}
TOUCHES |= {"exists", "is_file", "is_dir", "rglob", "fsync", "listdir", "scandir"}
SEAM = {"io", "_io", "disk"}


def touches(text: str) -> list[str]:
    """Return calls that touch a disk and do not go through the seam."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        *owner, verb = name.split(".")
        is_text = verb == "replace" and not (owner and "path" in owner[-1].lower())
        is_own = owner and owner[-1] in {*SEAM, "dataclasses", "SessionStore", "cls"}
        if verb in TOUCHES and not is_own and not is_text:
            found.append(name)
    return found


def test_no_file_of_the_store_touches_a_disk_but_through_the_seam():
    files = [p for p in HERE.glob("*.py") if p.stem not in OTHERS | {"io"}]
    assert len(files) > 20
    assert {p.stem: t for p in files if (t := touches(p.read_text()))} == {}
    assert touches("path.read_bytes()") and touches("os.listdir(x)")
    assert not touches("place.io.is_file(x)")


class Noting(OsIO):
    def __init__(self):
        self.steps = []

    def perform(self, step, action):
        self.steps.append((step.verb, step.path.name))
        return super().perform(step, action)


def test_a_first_append_is_a_folder_renamed_into_place_and_one_synced_write(tmp_path):
    disk = Noting()
    session = SessionStore.open(tmp_path, io=disk).principal("lab", "ann").session("s")
    session.create()
    disk.steps.clear()
    session.append([{"role": "user", "content": "x"}])
    assert disk.steps == [
        ("append", "messages.jsonl"),
        ("sync", "messages.jsonl"),
        ("write", ".meta.json.tmp"),
        ("replace", ".meta.json"),
    ]
    session.principal.session("t").create()
    names = [
        step for step in disk.steps if step[0] in ("sync", "sync_dir", "rename_dir")
    ]
    assert names == [
        ("sync", "messages.jsonl"),
        ("sync", "messages.jsonl"),
        ("sync", ".meta.json"),
        ("sync_dir", ".new-t"),
        ("rename_dir", "t"),
        ("sync_dir", "sessions"),
    ]


def test_files_and_folders_are_closed_to_others(tmp_path):
    session = SessionStore.open(tmp_path / "r").principal("lab", "ann").session("s")
    session.append([{"role": "user", "content": "x"}])
    session.chains.put(None, b"x", 0)
    session.commit()
    for path in (tmp_path / "r").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_process_durability_syncs_nothing(tmp_path):
    disk = Noting()
    store = SessionStore.open(tmp_path, io=disk, durability="process")
    session = store.principal("lab", "ann").session("s")
    session.append([{"role": "user", "content": "x"}])
    session.commit()
    assert not [s for s in disk.steps if s[0].startswith("sync")] and session.clock == 1
    assert isinstance(store.io, Unsynced)


def test_verbs_say_what_is_missing(tmp_path):
    disk = OsIO()
    assert disk.names(tmp_path / "no") == [] and not disk.is_dir(tmp_path / "no")
    disk.unlink(tmp_path / "no")
    disk.remove_tree(tmp_path / "no")
    with pytest.raises(FileNotFoundError):
        disk.append(tmp_path / "no", b"x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "new").mkdir()
    with pytest.raises(OSError, match="not empty"):
        disk.rename_dir(tmp_path / "new", tmp_path / "full")
