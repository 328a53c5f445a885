"""Many threads of one store: what they share is safe among them."""

import sys
import threading

import pytest


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
