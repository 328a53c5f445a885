"""Many threads of one store: what they share is safe among them."""

import sys
import threading

import pytest

from kvmem import errors
from kvmem.session import SessionStore, views


@pytest.fixture
def eager():
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.case("SES-11")
def test_sessions_that_are_made_at_once_do_not_disturb_each_other(me, eager):
    barrier, wrong = threading.Barrier(8), []

    def work(number: int):
        barrier.wait()
        try:
            for i in range(12):
                session = me.session(f"s{number}-{i}")
                me.recall("tea", session=session)
                session.append([{"role": "user", "content": "hello"}])
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []
    assert len(me.sessions()) == 96
    assert {me.session(name).clock for name in me.sessions()} == {1}


@pytest.mark.case("SES-26")
@pytest.mark.parametrize("ops", [20, pytest.param(200, marks=pytest.mark.long)])
def test_what_threads_record_is_their_actors(tmp_path, ops):
    store = SessionStore.open(tmp_path, durability="process")
    me = store.principal("lab", "ann", require_actor=True)
    for actor in ("A", "B"):
        for i in range(3):
            me.remember(f"green tea {i} of {actor}", peer=actor, actor=actor)
    barrier, wrong = threading.Barrier(16), []

    def work(actor: str, number: int):
        session = me.session("shared")
        barrier.wait()
        for i in range(ops):
            with me.acting_as(actor):
                session.append([{"role": "user", "content": f"{actor} {number} {i}"}])
                if i % 4 == 0:
                    found = me.recall("green tea", session=session)
                    wrong.extend(e for e in found.entries if e.peer != actor)
        try:
            session.append([{"role": "user", "content": "nobody"}])
            wrong.append("an append of nobody")
        except errors.ActorRequired:
            pass

    threads = [
        threading.Thread(target=work, args=(actor, i))
        for actor in ("A", "B")
        for i in range(8)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    messages = me.session("shared").messages()
    assert wrong == [] and len(messages) == 16 * ops
    assert all(m.actor == m.text.split()[0] for m in messages)
    for actor in ("A", "B"):
        uris = me.session("shared").ledger(actor)
        assert uris and {views.peer_of(uri) for uri in uris} == {actor}
