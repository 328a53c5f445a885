"""F12: a process that dies at any step, and a power cut at any step, lose nothing.

The law: what was acknowledged is there, the files are sound, and the operation that was
cut off, tried again, ends where a run without faults ends. Each protection has a twin
without it, and the enumeration sees what it was for.
"""

import functools
import json
from pathlib import Path

import pytest

from kvmem.session import archive, lines, log, state
from kvmem.session.place import LEDGER, Place

VECTORS = Path(__file__).with_name("vectors.jsonl").read_text().splitlines()
F12 = next(row for row in map(json.loads, VECTORS) if row["id"] == "F12")
((_, SCRIPT, EXPECTED),) = F12["steps"]
SHORT = ["recall q1", "batch k2", "msg k3"]  # enough for every twin to be caught


@pytest.fixture
def make_disk(memory_disk):
    return memory_disk.MemoryDisk


@pytest.fixture
def is_caught(deaths):
    """Say whether some death shows that a protection is missing."""

    def is_caught(make_disk, **more) -> bool:
        return any(deaths.judged(make_disk, SHORT, num_random=0, **more))

    return is_caught


def test_nothing_acknowledged_is_lost_at_any_step(make_disk, deaths):
    found = list(deaths.judged(make_disk, SCRIPT, num_random=1))
    broken = [each for each in found if each]
    assert len(broken) == EXPECTED["violations"], broken[:3]
    assert len(found) > 300


def test_a_retry_that_was_acknowledged_survives_the_next_power_cut(make_disk, deaths):
    found = deaths.judged(make_disk, SHORT, num_random=0, twice=True)
    assert [each for each in found if each] == []


def test_a_script_that_begins_with_an_append_loses_nothing(make_disk, deaths):
    script = ["msg k1", "batch k2", "recall q1"]
    assert [each for each in deaths.judged(make_disk, script, 0) if each] == []


SCRIPTS = {
    "commits": "batch k1; commit; extract; msg k2; extract",
    "servings with messages": (
        "recall q1 append; carry k1 q1; commit; recall q2; msg k2"
    ),
    "chains and deletion": "msg k1; chain one; chain two; delete; create; msg k1",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_other_operations_end_as_if_nothing_had_happened(script, make_disk, deaths):
    script = SCRIPTS[script].split("; ")
    assert [each for each in deaths.judged(make_disk, script, 0) if each] == []


LONG = {
    "F12": "; ".join(SCRIPT),
    "commits": "msg k1; recall q1; commit; batch k2; extract; msg k4; commit; extract",
    "servings": "recall q1 append; carry k1 q1; recall q2; commit; recall q3; msg k2; "
    "commit 1; recall q4",
    "chains": "msg k1; chain one; recall q1; chain two; msg k2; delete; create; msg k1",
}


@pytest.mark.long
@pytest.mark.parametrize("script", LONG)
def test_retries_of_longer_scripts_survive_the_next_power_cut(
    script, make_disk, deaths
):
    script = LONG[script].split("; ")
    found = deaths.judged(make_disk, script, num_random=1, twice=True)
    assert [each for each in found if each] == []


TWINS = {
    "sync after append": lambda s: s.verb == "sync" and s.path.name == "messages.jsonl",
    "sync of the temporary file": lambda s: s.verb == "sync" and ".tmp" in s.path.name,
    "sync of the new folder's files": lambda s: s.verb == "sync" and ".new" in str(s),
    "folder sync after replace": lambda s: (s.verb, s.path.name) == ("sync_dir", "s"),
    "folder sync after rename": lambda s: (
        (s.verb, s.path.name) == ("sync_dir", "sessions")
    ),
    "folder sync after create": lambda s: (
        s.verb == "sync_dir" and s.path.name in ("accounts", "lab", "users", "r", "")
    ),
}


@pytest.mark.parametrize("protection", TWINS)
def test_a_store_without_one_sync_is_caught(protection, memory_disk, is_caught):
    forgets = TWINS[protection]
    assert is_caught(lambda: memory_disk.MemoryDisk(forgets=forgets))


LINES = ["recall q1", "batch k1", "recall q2", "batch k2", "recall q3", "msg k3"]


def test_servings_behind_a_ledger_survive_every_death_twice(make_disk, deaths):
    found = list(deaths.judged(make_disk, LINES, num_random=0, twice=True))
    assert [each for each in found if each] == [] and len(found) > 200


LINE_TWINS = {
    "sync of the line": lambda s: (s.verb, s.path.name) == ("sync", LEDGER),
    "folder sync before it": lambda s: (s.verb, s.path.name) == ("sync_dir", "s"),
}


@pytest.mark.parametrize("protection", LINE_TWINS)
def test_a_ledger_without_one_sync_of_its_lines_is_caught(
    protection, memory_disk, deaths
):
    forgets = LINE_TWINS[protection]
    make = functools.partial(memory_disk.MemoryDisk, forgets=forgets)
    assert any(deaths.judged(make, LINES[:4], num_random=0))


def test_a_ledger_that_trusts_what_it_did_not_sync_is_caught(
    make_disk, deaths, monkeypatch
):
    monkeypatch.setattr(state, "settle_ledger", lambda place, found: place.settle())
    assert any(deaths.judged(make_disk, LINES[:4], num_random=0, twice=True))


def test_a_store_that_mends_no_torn_end_is_caught(make_disk, is_caught, monkeypatch):
    monkeypatch.setattr(log, "mended", lambda place, found: (found, None))
    assert is_caught(make_disk)


def test_a_store_whose_batches_are_not_marked_is_caught(
    make_disk, is_caught, monkeypatch
):
    whole = lines.batch

    def each_alone(seq, stored, key, digest):
        return b"".join(
            whole(seq + k, [one], key, digest) for k, one in enumerate(stored)
        )

    monkeypatch.setattr(lines, "batch", each_alone)
    assert is_caught(make_disk)


def test_a_store_that_looks_up_no_key_is_caught(make_disk, is_caught, monkeypatch):
    monkeypatch.setattr(archive, "batch_of", lambda archives, live, key: None)
    assert is_caught(make_disk)


def test_a_store_that_trusts_what_it_did_not_sync_is_caught(
    make_disk, is_caught, monkeypatch
):
    monkeypatch.setattr(Place, "settle", lambda place, log=None: None)
    assert is_caught(make_disk, twice=True)


def test_a_store_without_syncs_survives_kills_and_no_power_cut(memory_disk, deaths):
    def make():
        return memory_disk.MemoryDisk(forgets=lambda step: True)

    found = list(deaths.judged(make, ["msg k1", "recall q1"], num_random=0))
    assert any(each and each.startswith("power loss") for each in found)
    assert not any(each and each.startswith("kill") for each in found)
