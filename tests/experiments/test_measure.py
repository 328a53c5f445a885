"""Sides are timed in turns, and the machine is described as it was."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

from experiments import measure
from experiments.measure import Load, Rounds, Timed


def test_sides_run_in_turns_and_warm_up_is_not_kept():
    order = []
    jobs = {
        "a": lambda: order.append("a") or Timed(len(order)),
        "b": lambda: order.append("b") or Timed(10.0 * len(order)),
    }
    rounds = measure.interleave(jobs, rounds=3, warm_up=2)
    assert order == ["a", "b"] * 5
    assert rounds.seconds == {"a": (5, 7, 9), "b": (60.0, 80.0, 100.0)}
    assert rounds.num_rounds == 3


def test_a_ratio_is_the_median_of_neighbours_in_time():
    rounds = Rounds({"a": (1.0, 10.0, 100.0), "b": (2.0, 5.0, 400.0)})
    # not median(a) / median(b) = 10 / 5: the rounds' own ratios are 0.5, 2 and 0.25
    assert rounds.ratio("a", "b") == 0.5
    assert (rounds.median("a"), rounds.best("b")) == (10.0, 2.0)


def test_a_job_is_timed_until_its_arrays_are_there():
    rounds = measure.interleave({"x": lambda: jnp.arange(1000).sum()}, rounds=2)
    assert all(0 < took < 10 for took in rounds.seconds["x"])


def test_calibration_reads_like_a_machine():
    found = measure.calibrate(rounds=1)
    assert 0.1 < found.memcpy_gb_per_s < 1000
    assert 1e5 < found.dict_lookups_per_s < 1e9
    assert 0.1 < found.scatter_us < 1e6


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        (Load(5.0, 2, 0.0), None),  # the load average remembers our own work
        (Load(0.0, 2, 0.25), None),
        (Load(0.0, 2, 0.26), "other processes used 0.26 of 2 cores"),
        (Load(0.9, 2, None), None),
        (Load(1.1, 2, None), "load average 1.10 on 2 cores"),
    ],
)
def test_busy_is_what_others_use(load, busy):
    assert (load.busy is None) if busy is None else load.busy.startswith(busy)


def test_work_of_others_is_seen_and_our_own_is_not():
    spin = [sys.executable, "-c", "while True: pass"]
    other = subprocess.Popen(spin)
    try:
        assert measure.observe_load(0.5).others_cores > measure.BUSY_CORES
    finally:
        other.kill()
        other.wait()


def test_where_the_system_does_not_tell_the_load_average_speaks(monkeypatch):
    monkeypatch.setattr(measure, "_cpu_seconds", lambda: None)
    assert measure.observe_load(0.01).others_cores is None
