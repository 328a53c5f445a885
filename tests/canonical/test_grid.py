"""Grids cover each run once, and a regular page is one of them."""

import dataclasses
import itertools

import pytest

from kvmem import canonical
from kvmem.canonical.grid import RunGrid, grids
from kvmem.canonical.runs import CopyRun
from kvmem.geometry import Topology
from kvmem.geometry.envelope import ORDERS


def cells(grid):
    """Return every run of a grid, by its definition."""
    found = []
    for place in itertools.product(*map(range, grid.counts)):
        local = sum(i * s for i, s in zip(place, grid.local_steps, strict=True))
        whole = sum(i * s for i, s in zip(place, grid.canonical_steps, strict=True))
        corner = grid.corner
        found.append(
            CopyRun(
                corner.local_offset + local,
                corner.local_stride,
                corner.canonical_offset + whole,
                corner.canonical_stride,
                corner.nbytes,
                corner.count,
            )
        )
    return found


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("topology", [Topology(1), Topology(3), Topology(9, 2, 2)])
@pytest.mark.parametrize("dim", [16, 9])
def test_grids_cover_each_run_once(build, order, topology, dim):
    group = build.group(5, 3, dim=dim, v_head_dim=8, page_size=4)
    plan = canonical.plan(group, topology, order)
    for runs in (*plan.runs, *plan.writers()):
        found = grids(runs, plan.record_nbytes)
        covered = [run for grid in found for run in cells(grid)]
        assert sorted(covered, key=str) == sorted(runs, key=str)


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("tp", [1, 3, 9])
def test_a_page_of_equal_layers_is_one_copy_a_rank(build, order, tp):
    plan = canonical.plan(build.group(30, 3, dim=64, page_size=16), Topology(tp), order)
    assert {len(grids(r, plan.record_nbytes)) for r in plan.writers()} == {1}


@pytest.mark.parametrize("tp, who", [(3, canonical.Turn()), (9, "holders")])
def test_ranks_that_lie_one_after_another_are_one_copy(build, tp, who):
    plan = canonical.plan(build.group(30, 3, dim=64, page_size=16), Topology(tp))
    moved = [
        dataclasses.replace(run, local_offset=run.local_offset + rank * 10**9)
        for rank, runs in enumerate(plan.lists(who))
        for run in runs
    ]
    (grid,) = grids(moved, plan.record_nbytes)
    assert sorted(cells(grid), key=str) == sorted(moved, key=str)


def test_uneven_runs_keep_their_own_grids():
    runs = [CopyRun(o, 64, o, 4096, 16, 4) for o in (0, 16, 32, 1000)]
    found = grids(runs, 4096)
    assert [g.counts for g in found] == [(3,), ()]
    assert found[0] == RunGrid(runs[0], (3,), (16,), (16,))


@pytest.mark.parametrize("steps", [(16, 32), (32, 16)], ids=str)
def test_grids_fold_only_where_they_step_alike_on_both_sides(steps):
    local, canonical_step = steps
    runs = [
        CopyRun(start + i * step, 64, 2 * start + i * other, 4096, 8, 4)
        for start, step, other in ((0, 16, 16), (1000, local, canonical_step))
        for i in range(2)
    ]
    found = grids(runs, 4096)
    assert [grid.counts for grid in found] == [(2,), (2,)]
    assert sorted((r for g in found for r in cells(g)), key=str) == sorted(
        runs, key=str
    )


def test_a_grid_never_steps_from_token_to_token():
    runs = [CopyRun(64 * t, 16, 128 * t, 128, 16, 1) for t in range(4)]
    assert [g.counts for g in grids(runs, 128)] == [()] * 4


def test_runs_of_two_planes_keep_their_own_grids():
    runs = [
        CopyRun(64 * i, 64, 64 * i, 4096, 16, 4, plane)
        for plane in (0, 1)
        for i in range(3)
    ]
    assert [(g.counts, g.corner.plane) for g in grids(runs, 4096)] == [
        ((3,), 0),
        ((3,), 1),
    ]
