"""Locks: one holder among threads and processes, and a wait that ends."""

import subprocess
import sys
import threading
import time

import pytest

from kvmem.errors import Busy
from kvmem.session import OsIO
from kvmem.session.locks import Locks

HOLDING = """
import sys, time
from pathlib import Path
from kvmem.session.io import OsIO
from kvmem.session.locks import Locks
with Locks(OsIO()).hold(Path(sys.argv[1]), "it"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_has_one_holder_among_threads_and_stores(tmp_path):
    path, inside, most = tmp_path / "lock", [], []
    stores = [Locks(OsIO()), Locks(OsIO())]

    def work(locks):
        for _ in range(20):
            with locks.hold(path, "it"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, args=(stores[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80 and max(most) == 1


def test_a_wait_for_another_process_ends_in_busy_and_its_death_frees_the_lock(tmp_path):
    path, locks = tmp_path / "lock", Locks(OsIO(), wait_s=0.05)
    command = [sys.executable, "-c", HOLDING, str(path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    start = time.monotonic()
    with pytest.raises(Busy, match="the lock of it: another writer holds it"):
        locks.hold(path, "it").__enter__()
    assert 0.05 <= time.monotonic() - start < 5
    with pytest.raises(Busy), locks.hold(path, "it", wait_s=0.0):
        pass
    other.kill()
    other.communicate()
    with locks.hold(path, "it"):
        assert path.exists()


def test_a_lock_is_given_back_with_an_error_and_its_file_stays(tmp_path):
    path, locks = tmp_path / "lock", Locks(OsIO(), wait_s=0.0)
    with pytest.raises(ZeroDivisionError), locks.hold(path, "it"):
        raise ZeroDivisionError
    with locks.hold(path, "it"):
        pass
    assert path.exists()


def test_a_lock_that_cannot_be_opened_is_not_held(tmp_path):
    locks = Locks(OsIO(), wait_s=0.0)
    for _ in range(2):  # the thread's own lock was given back too
        with pytest.raises(FileNotFoundError), locks.hold(tmp_path / "no" / "x", "it"):
            pass


def test_a_thread_lock_that_nobody_needs_is_forgotten(tmp_path):
    locks = Locks(OsIO())
    with locks.hold(tmp_path / "lock", "it"):
        assert len(locks._threads) == 1
    assert len(locks._threads) == 0
