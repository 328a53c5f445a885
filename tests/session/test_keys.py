"""Keys: bound to one user, kept as hashes, seen by a running service."""

import json
import stat
import threading

import pytest

from kvmem import errors
from kvmem.session import keys


@pytest.fixture
def ring(tmp_path):
    return keys.KeyRing(tmp_path)


def test_a_key_finds_its_user_and_its_file_does_not_hold_it(ring, tmp_path):
    token = ring.add("lab", "ann")
    found = ring.find(token)
    assert (found.account, found.user) == ("lab", "ann")
    path = tmp_path / keys.FILE_NAME
    assert token not in path.read_text() and token.split("_", 2)[2] not in (
        path.read_text()
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_not_a_key_finds_nobody(ring):
    token = ring.add("lab", "ann")
    _, id_, secret = token.split("_", 2)
    for wrong in ("", "kvmem_", token[:-1], token + "a", f"kvmem_{id_}_", secret):
        assert ring.find(wrong) is None
    assert ring.find(token.replace("kvmem_", "other_")) is None
    assert ring.find("é" + token) is None and ring.find(token + "x" * 200) is None


def test_a_ring_that_runs_sees_keys_that_were_added_and_taken_back(ring, tmp_path):
    assert ring.find("kvmem_a_b") is None
    token = keys.KeyRing(tmp_path).add("lab", "ann")
    assert ring.find(token).user == "ann"
    keys.KeyRing(tmp_path).revoke(ring.find(token).id)
    assert ring.find(token) is None
    with pytest.raises(errors.NotFound):
        ring.revoke("0" * 8)


@pytest.mark.case("SES-13")
def test_keys_added_at_once_are_all_there(tmp_path):
    barrier, tokens = threading.Barrier(8), []

    def add(i: int):
        ring = keys.KeyRing(tmp_path)
        barrier.wait()
        tokens.append((f"u{i}", ring.add("lab", f"u{i}")))

    threads = [threading.Thread(target=add, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    ring = keys.KeyRing(tmp_path)
    assert [ring.find(token).user for _, token in tokens] == [u for u, _ in tokens]


@pytest.mark.parametrize(
    ("account", "user"), [("_lab", "ann"), ("lab", "a/b"), ("..", "ann"), ("lab", "")]
)
def test_a_key_of_nobody_is_refused(ring, account, user):
    with pytest.raises(ValueError):
        ring.add(account, user)


def test_a_file_that_cannot_be_read_lets_nobody_in(ring, tmp_path):
    token = ring.add("lab", "ann")
    path = tmp_path / keys.FILE_NAME
    whole = json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(errors.CorruptPage):
        ring.find(token)
    path.write_text(json.dumps(whole | {"version": 2}))
    with pytest.raises(errors.FormatMismatch, match="version 2"):
        ring.find(token)
