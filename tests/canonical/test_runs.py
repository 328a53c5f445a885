"""Runs are merged where both sides touch, and nowhere else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem.canonical.runs import CopyRun, fold, join


def test_runs_that_touch_on_one_side_only_stay_apart():
    a = CopyRun(0, 64, 0, 128, nbytes=32, count=4)
    near = CopyRun(32, 64, 64, 128, nbytes=32, count=4)
    touching = CopyRun(32, 64, 32, 128, nbytes=32, count=4)
    other_stride = CopyRun(32, 96, 32, 128, nbytes=32, count=4)
    other_canonical_stride = CopyRun(32, 64, 32, 256, nbytes=32, count=4)
    for apart in (near, other_stride, other_canonical_stride):
        assert len(join([a, apart])) == 2
    assert join([touching, a]) == (CopyRun(0, 64, 0, 128, nbytes=64, count=4),)


def test_runs_without_gaps_become_one_fragment():
    halves = [CopyRun(0, 32, 0, 32, 32, 4), CopyRun(128, 32, 128, 32, 32, 4)]
    assert fold(halves) == (CopyRun(0, 256, 0, 256, 256, 1),)


@pytest.mark.parametrize("count", [1, 4])
def test_runs_of_two_planes_never_touch(count):
    here = CopyRun(0, 64, 0, 128, nbytes=32, count=count)
    there = CopyRun(32, 64, 32, 128, nbytes=32, count=count, plane=1)
    assert len(join([here, there])) == 2
    assert [run.plane for run in join([there, here])] == [0, 1]


@settings(max_examples=100)
@given(
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    holes=st.lists(st.booleans(), min_size=8, max_size=8),
    count=st.integers(1, 3),
    turned=st.booleans(),
)
def test_merging_changes_no_byte(widths, holes, count, turned):
    runs, local, canonical = [], 0, 0
    for nbytes, hole in zip(widths, holes, strict=False):
        runs.append(CopyRun(local, 40, canonical, 50, nbytes, count))
        local, canonical = local + nbytes, canonical + nbytes + hole

    def moved(merged):
        return sorted(
            (a + i, b + i)
            for run in merged
            for a, b, nbytes in run.fragments()
            for i in range(nbytes)
        )

    given_runs = runs[::-1] if turned else runs
    assert moved(join(given_runs)) == moved(runs) == moved(fold(given_runs))
    gaps = sum(holes[: len(runs) - 1])
    assert len(join(given_runs)) == 1 + gaps


def test_a_run_is_cut_between_fragments():
    run = CopyRun(4, 8, 100, 50, nbytes=3, count=4, plane=1)
    assert [*run.cut(1, 3).fragments()] == [*run.fragments()][1:3]
    assert run.cut(1, 3).plane == 1 and run.total_nbytes == 12
