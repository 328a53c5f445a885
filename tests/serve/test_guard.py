"""What stands before an engine's verbs: threads, interrupts, half-done steps."""

import os
import signal
import threading

import pytest

from kvmem import errors
from kvmem.serve.guard import Guard, interrupts_deferred
from kvmem.serve.request import SamplingParams


def greedy(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_deferred():
            interrupt()
            done.append("the rest of the block")
    assert done
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_second_thread_is_refused_and_the_first_goes_on():
    guard, inside, leave = Guard(), threading.Event(), threading.Event()

    def first():
        with guard("step"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    with pytest.raises(errors.Busy, match="another thread"):
        with guard("step"):
            pass
    leave.set()
    thread.join()
    with guard("step"):
        pass


def test_a_verb_that_broke_off_is_named_at_the_next_call():
    guard = Guard()
    with pytest.raises(RuntimeError):
        with guard("step"):
            raise RuntimeError("half-way")
    with pytest.raises(errors.CorruptPage, match="RuntimeError: half-way"):
        with guard("step"):
            pass


def test_a_refusal_made_before_anything_changed_breaks_nothing():
    guard = Guard()
    with pytest.raises(errors.OutOfPages):
        with guard("add", asks_first=True):
            raise errors.OutOfPages("no")
    with guard("step"):
        pass


def test_ctrl_c_in_the_middle_of_generate_leaves_an_engine_that_goes_on(
    engine, monkeypatch
):
    made = engine()
    (want,) = made.generate([1, 2, 3], greedy(12))
    stepper, calls = made.stepper, []

    def interrupted(pool, batch):
        calls.append(batch)
        if len(calls) == 4:
            interrupt()  # the pool is donated, and its successor not yet assigned
        return stepper(pool, batch)

    interrupted.pack = stepper.pack
    monkeypatch.setattr(made, "stepper", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.generate([9, 8, 7, 6], greedy(30))
    assert not made.has_work and made.accounts.in_use == 0
    (again,) = made.generate([1, 2, 3], greedy(12))
    assert again.output_ids == want.output_ids


def test_an_engine_whose_step_broke_off_says_so(engine, monkeypatch):
    made = engine()

    def broken(*_):
        raise RuntimeError("device lost")

    broken.pack = made.stepper.pack
    monkeypatch.setattr(made, "stepper", broken)
    made.add([1, 2], greedy(3))
    with pytest.raises(RuntimeError, match="device lost"):
        made.step()
    with pytest.raises(errors.CorruptPage, match="device lost"):
        made.step()


def test_an_engine_refuses_a_second_thread(engine, monkeypatch):
    made, seen = engine(), []
    stepper = made.stepper

    def slow(pool, batch):
        def other():
            try:
                made.step()
            except errors.Busy as error:
                seen.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return stepper(pool, batch)

    slow.pack = stepper.pack
    monkeypatch.setattr(made, "stepper", slow)
    assert len(made.generate([4, 5], greedy(3))[0].output_ids) == 3
    assert seen
