"""A full disk: the error reaches the caller, nothing half is visible, and space helps.

Injected at every write of ours, and for real: by a limit on the size of files, and on a
file system that is full.
"""

import errno
import os
import subprocess

import numpy as np
import pytest

from kvmem.store.io import Disk

CHUNK, RECORD = 4, 96


class Filling(Disk):
    """A disk that is full at its n-th chance to be, half of a write done."""

    def __init__(self):
        self.left, self.verbs = None, ("mkdir", "write", "orbax", "sync", "rename")
        self.failed = []

    def perform(self, step, action):
        if self.left is None or step.verb not in self.verbs:
            return action()
        self.left -= 1
        if self.left >= 0:
            return action()
        self.left = None
        self.failed.append(step.verb)
        if step.verb in ("write", "orbax"):
            action()
        if step.verb == "write":
            data = step.path.read_bytes()
            step.path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.case("PER-15")
def test_a_full_disk_at_any_step_reaches_the_caller_and_leaves_nothing_half(
    open_store, make_chunks
):
    chunks, disk = make_chunks(60), Filling()
    st = open_store(io=disk)
    st.put(*chunks.part(0, 2))
    done, steps = 2, []
    for at in range(40):
        disk.left = at
        part = chunks.part(done, done + 1)
        try:
            st.put(*part, chunks.keys[done - 1])
        except OSError as error:
            assert error.errno == errno.ENOSPC
        else:
            break
        steps = disk.failed
        assert st.contains(chunks.keys) == done
        assert all(report.status == "ok" for report in st.verify())
        assert st.put(*part, chunks.keys[done - 1]).written == 1
        done += 1
    assert set(steps) == {"mkdir", "write", "orbax", "sync", "rename"}
    assert len(steps) > 16
    st.close()
    found = open_store().get(*chunks.part(0, done)[:2])
    assert (found.num_hit, found.reason) == (done, None)
    np.testing.assert_array_equal(found.records, chunks.records[: done * CHUNK])


REAL = """
import os, pathlib, resource, signal
import numpy as np
from kvmem import store
{limit}
random = np.random.default_rng(0)
tokens = np.arange(8 * 4, dtype=np.int32)
records = random.integers(0, 256, (8 * 4, 24_000), np.uint8)     # 96 kB a chunk
keys = store.chain_keys("m/f", tokens, 4)
part = lambda a, b: (keys[a:b], tokens[4 * a : 4 * b], records[4 * a : 4 * b])
with store.PageStore.open({root!r}, "m", "f", 24_000, 4) as st:
    assert st.put(*part(0, 2)).written == 2
    full()
    try:
        st.put(*part(2, 8))
    except Exception as error:
        print("failed:", type(error).__name__, str(error)[:4000].replace("\\n", " "))
    assert st.contains(keys) == 2
    assert [r.status for r in st.verify()] == ["ok"], st.verify()
    free()
    assert st.put(*part(2, 8)).written == 6
    found = st.get(keys, tokens)
    assert found.num_hit == 8 and (found.records == records).all()
    assert [r.status for r in st.verify()] == ["ok", "ok"], st.verify()
print("whole")
"""

BY_SIZE = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
free = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
"""

BY_SPACE = """
full = lambda: pathlib.Path({filler!r}).write_bytes(bytes(2_700_000))
free = lambda: os.unlink({filler!r})
"""


@pytest.mark.case("PER-15")
def test_a_file_that_may_not_grow_is_a_failed_put_and_no_more(run_python, tmp_path):
    said = run_python(REAL.format(root=str(tmp_path / "root"), limit=BY_SIZE))
    assert said.startswith("failed: ") and said.endswith("whole\n"), said
    assert "OSError [Errno 27] File too large" in said


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB; only root may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system needs rights that this user lacks")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.case("PER-15")
def test_a_file_system_that_is_full_is_a_failed_put_and_no_more(run_python, small_disk):
    limit = BY_SPACE.format(filler=str(small_disk / "filler"))
    said = run_python(REAL.format(root=str(small_disk / "root"), limit=limit))
    assert said.startswith("failed: ") and said.endswith("whole\n"), said
    assert "OSError [Errno 28] No space left" in said


def test_a_disk_too_full_for_the_holders_name_is_opened_all_the_same(
    open_store, monkeypatch
):
    """Whoever makes room on it must be its writer; no descriptor is left behind."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    open_store().close()
    with monkeypatch.context() as filled:
        filled.setattr("os.pwrite", full)
        open_store().close()
    open_store().close()


def test_a_lock_that_cannot_be_taken_keeps_no_descriptor(open_store, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    open_store().close()
    monkeypatch.setattr("fcntl.flock", refuse)
    taken = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No locks"):
        open_store()
    assert len(os.listdir("/proc/self/fd")) == taken
