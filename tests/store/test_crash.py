"""A writer killed at every step of ours, and at random moments inside Orbax.

After each death: what was acknowledged is there byte for byte, what was not is absent
or whole, the next writer works and everything it finds is clean.
"""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from kvmem import store

CHUNK, RECORD = 4, 96
PUTS = [[0, 3], [3, 5], [5, 6]]


@pytest.fixture(scope="module")
def fork(repo_root):
    """Order a writer of the fork server and return what became of it."""
    env = os.environ | {"PYTHONPATH": str(repo_root)}
    command = [sys.executable, str(repo_root / "tests" / "store" / "fork_server.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as it:
        assert it.stdout.readline() == "warm\n"

        def order(**what) -> dict:
            it.stdin.write(json.dumps(what) + "\n")
            it.stdin.flush()
            said = json.loads(it.stdout.readline())
            errors = [word["error"] for word in said["words"] if "error" in word]
            assert not errors, errors
            return said

        yield order
        it.stdin.close()


def acked(said: dict) -> int:
    return max((word["acked"] for word in said["words"] if "acked" in word), default=0)


def steps(said: dict) -> list[dict]:
    return [word for word in said["words"] if "step" in word]


def assert_recovers(open_store, chunks, least: int) -> None:
    """The next writer finds what was acknowledged, and goes on as if nothing was."""
    with open_store() as st:
        found = st.get(chunks.keys, chunks.tokens)
        assert found.num_hit >= least, (found.num_hit, least, found.reason)
        expected = chunks.records[: found.num_hit * CHUNK]
        np.testing.assert_array_equal(found.records, expected)
        assert all(report.status == "ok" for report in st.verify()), st.verify()
        put = st.put(*chunks)
        assert put.written + put.already_present == len(chunks.keys)
        found = st.get(chunks.keys, chunks.tokens)
        assert (found.num_hit, found.reason) == (len(chunks.keys), None)
        np.testing.assert_array_equal(found.records, chunks.records)
        assert all(report.status == "ok" for report in st.verify()), st.verify()


def all_steps(fork, root) -> list[dict]:
    """Every step of a writer that lives to the end."""
    said = fork(root=str(root), puts=PUTS[:2])
    assert (said["status"], acked(said)) == (0, 5)
    return steps(said)


def deaths(every: list[dict]) -> list[dict]:
    """Die before every step, and half-way through every write."""
    found = [{"at": at, "how": "before"} for at in range(len(every))]
    halves = [at for at, word in enumerate(every) if word["step"] == "write"]
    return found + [{"at": at, "how": "half"} for at in halves]


def kill(fork, tmp_path, open_store, chunks, die) -> None:
    said = fork(root=str(tmp_path / "root"), puts=PUTS[:2], die=die)
    assert said["status"] == -9, said
    assert_recovers(open_store, chunks, acked(said))


SAMPLES = 9


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_a_writer_killed_at_some_steps_loses_nothing_acknowledged(
    fork, tmp_path, open_store, make_chunks, sample
):
    """A ninth of the matrix for each sample's share of one step."""
    every = deaths(all_steps(fork, tmp_path / "whole"))
    die = random.Random(sample).choice(every[sample::SAMPLES])
    kill(fork, tmp_path, open_store, make_chunks(5), die)


@pytest.mark.long
def test_a_writer_killed_at_any_step_loses_nothing_acknowledged(
    fork, tmp_path_factory, make_chunks
):
    every = deaths(all_steps(fork, tmp_path_factory.mktemp("whole") / "root"))
    assert len(every) > 60
    for die in every:
        top = tmp_path_factory.mktemp("killed")

        def open_store(top=top):
            return store.PageStore.open(top / "root", "m", "f", RECORD, CHUNK)

        kill(fork, top, open_store, make_chunks(5), die)


def in_orbax(fork, tmp_path, open_store, chunks, seed) -> str:
    """Kill at a random moment of the third save; return what was left of it."""
    share = random.Random(seed).uniform(0, 1.5)
    die = {"in_orbax_of": 2, "share": share}
    said = fork(root=str(tmp_path / "root"), puts=PUTS, die=die)
    assert said["status"] in (-9, 0)
    least = acked(said)
    assert least >= 5
    last = tmp_path / "root" / "m" / "f"
    name = sorted(path.name for path in last.iterdir())[-1]
    left = sorted(path.name for path in (last / name).iterdir())
    assert_recovers(open_store, chunks, least)
    return " ".join(left)


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_killed_inside_orbax_loses_nothing_acknowledged(
    fork, tmp_path, open_store, make_chunks, seed
):
    in_orbax(fork, tmp_path, open_store, make_chunks(6), seed)


@pytest.mark.long
def test_fifty_deaths_inside_orbax_lose_nothing_acknowledged(
    fork, tmp_path_factory, make_chunks
):
    left = set()
    for seed in range(50):
        top = tmp_path_factory.mktemp("orbax")

        def open_store(top=top):
            return store.PageStore.open(top / "root", "m", "f", RECORD, CHUNK)

        left.add(in_orbax(fork, top, open_store, make_chunks(6), seed))
    assert any("orbax-checkpoint-tmp" in names for names in left), left


def test_a_lost_chunk_would_be_seen(fork, tmp_path, open_store, make_chunks):
    """The twin: a store that lost what was acknowledged does not pass."""
    said = fork(root=str(tmp_path / "root"), puts=PUTS[:1])
    assert acked(said) == 3
    (only,) = (tmp_path / "root" / "m" / "f").iterdir()
    (only / "manifest.json").unlink()
    with pytest.raises(AssertionError):
        assert_recovers(open_store, make_chunks(6), acked(said))
