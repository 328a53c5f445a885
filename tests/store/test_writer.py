import threading
import time

import pytest

from kvmem.errors import Busy
from kvmem.store.writer import Writer


@pytest.fixture
def gate():
    """An event that a stuck job waits for; it is opened at the end."""
    event = threading.Event()
    yield event
    event.set()


def stuck(gate, then=lambda lease: "late"):
    def work(lease):
        gate.wait(30)
        return then(lease)

    return work


def test_jobs_run_one_after_another_in_the_order_of_their_calls():
    writer, seen = Writer(60), []
    futures = [writer.submit(lambda lease, n=n: seen.append(n)) for n in range(50)]
    assert [future.result() for future in futures] == [None] * 50
    assert seen == list(range(50)) and writer.in_flight == 0


def test_a_result_comes_back_and_a_failure_is_raised_where_it_is_asked_for():
    writer = Writer(60)
    assert writer.submit(lambda lease: 7).result() == 7
    failed = writer.submit(lambda lease: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert writer.submit(lambda lease: 8).result() == 8
    assert writer.first_unseen_failure() is None


def test_a_failure_that_nobody_asked_about_is_kept_for_close():
    writer = Writer(60)
    writer.submit(lambda lease: 1 / 0)
    writer.submit(lambda lease: [][1])
    writer.drain()
    assert isinstance(writer.first_unseen_failure(), ZeroDivisionError)
    assert writer.first_unseen_failure() is None


def test_the_thread_lives_no_longer_than_the_work():
    writer = Writer(60)
    before = set(threading.enumerate())  # other tests' threads may end meanwhile
    writer.submit(lambda lease: None).result()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


def test_a_write_that_hangs_holds_up_the_next_for_its_lease_and_no_longer(gate):
    writer = Writer(0.2)
    hung = writer.submit(stuck(gate))
    behind = writer.submit(lambda lease: "next")
    started = time.monotonic()
    assert behind.result() == "next"
    assert 0.15 < time.monotonic() - started < 5
    with pytest.raises(Busy, match=r"more than 0.2 s.*longer lease_s"):
        hung.result()
    assert writer.submit(lambda lease: "again").result() == "again"


def test_the_future_of_a_write_that_hangs_fails_when_its_lease_ends(gate):
    hung = Writer(0.2).submit(stuck(gate))
    assert isinstance(hung.exception(), Busy)


def test_a_lease_begins_when_the_write_does(gate):
    writer = Writer(0.6)
    slow = [writer.submit(lambda lease: time.sleep(0.25) or "slow") for _ in range(4)]
    assert [each.result() for each in slow] == ["slow"] * 4


def test_a_late_write_is_not_published(gate):
    writer, published, outcome = Writer(0.1), [], []

    def late(lease):
        gate.wait(30)
        try:
            with lease.hold():
                published.append("late")
        except Busy as refused:
            outcome.append(refused)

    hung = writer.submit(late)
    assert isinstance(hung.exception(), Busy)
    gate.set()
    deadline = time.monotonic() + 5
    while not outcome and time.monotonic() < deadline:
        time.sleep(0.01)
    assert outcome and not published


def test_what_is_published_in_time_begins_the_lease_anew():
    def parts(lease):
        for _ in range(4):
            time.sleep(0.2)
            with lease.hold():
                pass
        return "four"

    assert Writer(0.4).submit(parts).result() == "four"


def test_drain_waits_for_all_that_is_in_flight_and_not_for_what_hangs(gate):
    writer, done = Writer(0.2), []
    writer.submit(stuck(gate))
    writer.submit(lambda lease: done.append(1))
    writer.drain()
    assert done == [1] and writer.in_flight == 0


def test_a_callback_may_wait_for_a_job_of_its_own():
    writer, done = Writer(60), threading.Event()

    def again(_):
        assert writer.submit(lambda lease: "second").result(20) == "second"
        assert writer.in_flight == 0
        done.set()

    first = writer.submit(lambda lease: time.sleep(0.05) or "first")
    others = [writer.submit(lambda lease: "other") for _ in range(3)]
    first.add_done_callback(again)
    assert done.wait(20)
    assert [each.result() for each in others] == ["other"] * 3


def test_a_callback_may_look_at_the_writer_of_a_write_that_was_given_up(gate):
    writer, seen = Writer(0.1), []
    hung = writer.submit(stuck(gate))
    hung.add_done_callback(lambda _: seen.append(writer.submit(lambda _: 7).result()))
    assert isinstance(hung.exception(), Busy)
    assert seen == [7]


def test_a_drained_writer_has_told_every_future():
    writer = Writer(60)
    for _ in range(50):
        futures = [writer.submit(lambda lease: None) for _ in range(3)]
        writer.drain()
        assert all(each.done() for each in futures)


def test_a_callers_own_timeout_is_kept(gate):
    hung = Writer(60).submit(stuck(gate))
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        hung.result(timeout=0.1)
    assert time.monotonic() - started < 5
    assert not hung.seen


def test_a_job_that_was_cancelled_before_its_turn_does_not_run(gate):
    writer, ran = Writer(60), []
    writer.submit(stuck(gate))
    waiting = writer.submit(lambda lease: ran.append(1))
    assert waiting.cancel()
    gate.set()
    writer.drain()
    assert ran == []
