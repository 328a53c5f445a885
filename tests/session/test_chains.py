"""Chains: replaced whole, by who saw the last one, and gone with their session."""

import pytest

from kvmem.errors import Conflict, CorruptPage, Deleted, InvalidId
from kvmem.session import OsIO
from kvmem.session.place import CHAINS, LOG

BLOB = bytes(range(256)) + b"\n{}\n"


@pytest.fixture
def session(ann):
    return ann.session("s")


def test_a_chain_is_an_actors_own_and_survives_the_process(session, open_store):
    assert session.chains.get() == (None, 0) and session.chains.actors() == ()
    assert session.chains.put(None, BLOB, 0) == 1
    assert session.chains.put("planner", b"", 0) == 1
    assert session.chains.put("Planner", b"P", 0) == 1
    again = open_store().principal("lab", "ann").session("s").chains
    assert again.get() == (BLOB, 1) and again.get("planner") == (b"", 1)
    assert again.get("Planner") == (b"P", 1)
    assert set(again.actors()) == {None, "planner", "Planner"}
    with pytest.raises(InvalidId):
        again.get("a/b")


def test_only_who_saw_the_last_generation_replaces_it(session):
    session.chains.put(None, b"one", 0)
    for wrong in (0, 2):
        with pytest.raises(Conflict, match="generation 1"):
            session.chains.put(None, b"other", wrong)
        with pytest.raises(Conflict):
            session.chains.drop(None, wrong)
    assert session.chains.put(None, b"two", 1) == 2
    assert session.chains.get() == (b"two", 2)
    session.chains.drop(None, 2)
    assert session.chains.get() == (None, 0) and session.chains.actors() == ()
    session.chains.drop("nobody", 0)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "moved", "version"])
def test_a_damaged_chain_reads_as_none_with_a_reason(session, damage):
    chains = session.chains
    chains.put("planner", BLOB, 0)
    chains.put("critic", b"other", 0)
    path = session.place.file(CHAINS) / "actor-planner.chain"
    data = path.read_bytes()
    other = path.with_name("actor-critic.chain").read_bytes()
    changed = {
        "flip": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "cut": data[:-1],
        "empty": b"",
        "moved": other,
        "version": data.replace(b'"version": 1', b'"version": 2'),
    }
    assert chains.fault("planner") is None and chains.fault("nobody") is None
    path.write_bytes(changed[damage])
    assert chains.get("planner") == (None, 0)
    assert "damaged" in chains.fault("planner")
    assert chains.put("planner", BLOB, 0) == 1 and chains.fault("planner") is None


def test_a_put_that_was_cut_off_leaves_the_chain_before(session, open_store):
    session.chains.put(None, b"one", 0)

    class Full(OsIO):
        def write(self, path, data):
            super().write(path, data[:5])
            raise OSError(28, "No space left on device")

    full = open_store(io=Full()).principal("lab", "ann").session("s")
    with pytest.raises(OSError, match="No space"):
        full.chains.put(None, b"two", 1)
    assert session.chains.get() == (b"one", 1)


def test_a_chain_is_not_put_ahead_of_a_log_that_cannot_be_read(session):
    session.append([{"role": "user", "content": "a"}])
    session.append([{"role": "user", "content": "b"}])
    path = session.place.file(LOG)
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"x"'))
    with pytest.raises(CorruptPage):
        session.chains.put(None, b"one", 0)


def test_chains_go_with_their_session(session):
    chains = session.chains
    chains.put(None, b"one", 0)
    session.delete()
    for use in (chains.get, chains.actors, lambda: chains.put(None, b"two", 1)):
        with pytest.raises(Deleted):
            use()
    session.principal.session("s").create()
    assert session.principal.session("s").chains.get() == (None, 0)
    with pytest.raises(Deleted):
        chains.put(None, b"two", 0)
