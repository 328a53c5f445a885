"""Books: what fails is said in words, and leaves what was there."""

import errno
import sqlite3
import subprocess
import sys

import pytest

from kvmem import errors
from kvmem.session import book


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(book, "_WAIT_S", 0.05)


@pytest.fixture
def other(store):
    """A connection of another program to Ann's items, made by her first item."""
    store.principal("lab", "ann").remember("green")
    path = store.principal("lab", "ann").folder / "items.sqlite3"
    store.close()
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


def test_a_writer_that_does_not_end_is_waited_for_and_then_busy(impatient, other, me):
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(errors.Busy, match="Try again"):
        me.remember("black")
    assert [item.text for item in me.items.list()] == ["green"]  # readers do not wait
    other.execute("ROLLBACK")
    me.remember("black")


def test_bytes_that_a_reader_holds_are_said_to_be_there_still(impatient, other, me):
    other.execute("BEGIN")
    assert other.execute("SELECT text FROM item").fetchall() == [("green",)]
    (item,) = me.items.list()
    with pytest.raises(errors.Busy, match="once more"):
        me.items.delete(item.uri)
    assert me.items.list() == () == me.items.search("green")
    other.execute("COMMIT")
    assert me.items.delete(item.uri) == ()
    files = [path.read_bytes() for path in me.folder.iterdir()]
    assert not any(b"green" in content for content in files)


def test_a_full_disk_is_an_error_of_the_machine_and_keeps_what_was_there(other, me):
    with me.store.book("lab", "ann").read() as cursor:
        (pages,) = cursor.execute("PRAGMA page_count").fetchone()
        cursor.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(OSError, match="full") as caught:
        me.remember("x" * 100_000)
    assert caught.value.errno == errno.ENOSPC
    assert [item.text for item in me.items.list()] == ["green"]


def test_a_book_says_its_version_and_whose_it_is(other):
    assert other.execute("PRAGMA user_version").fetchone() == (book.VERSION,)
    assert other.execute("SELECT * FROM owner").fetchall() == [("lab", "ann")]


def test_what_is_acknowledged_was_synced(other, me):
    with me.store.book("lab", "ann").read() as cursor:
        assert cursor.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert cursor.execute("PRAGMA secure_delete").fetchone() == (1,)


FORKS = """
import multiprocessing, sys
from kvmem.session import SessionStore

me = SessionStore.open(sys.argv[1]).principal("lab", "ann")
me.remember("green")

def child(results):
    me.remember("black")
    results.put([item.text for item in me.items.list()])

context = multiprocessing.get_context("fork")
results = context.SimpleQueue()
process = context.Process(target=child, args=(results,))
process.start()
assert sorted(results.get()) == ["black", "green"]
process.join()
assert sorted(item.text for item in me.items.list()) == ["black", "green"]
print("both have both")
"""


def test_a_forked_child_uses_connections_of_its_own(tmp_path):
    """In a process of its own: what other tests load here must not be forked."""
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "both have both\n", done.stderr
