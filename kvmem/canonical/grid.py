"""Grids: runs that stand at even distances, as one strided array each.

A head-major page of thirty layers has ninety runs a rank, all alike; as one grid they
are one numpy copy. `grids` finds the lattices in any list of runs, so no page order is
a special case.

    grids(plan.writers()[0], plan.record_nbytes)
    # (RunGrid(corner=CopyRun(...), counts=(30, 2), local_steps=..., ...),)
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from kvmem.canonical.runs import CopyRun

__all__ = ["RunGrid", "grids"]


@dataclasses.dataclass(frozen=True)
class RunGrid:
    """A run repeated on a lattice, outermost axis first.

    Cell (i, j, ...) is `corner` moved by i * steps[0] + j * steps[1] + ... on each
    side. All cells lie in one plane and begin at one token: only the corner's own
    fragments step in tokens.
    """

    corner: CopyRun
    counts: tuple[int, ...] = ()
    local_steps: tuple[int, ...] = ()
    canonical_steps: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes of one page's array: lattice, fragments, bytes."""
        return (*self.counts, self.corner.count, self.corner.nbytes)

    @property
    def local_strides(self) -> tuple[int, ...]:
        """Byte strides of `shape` in the rank's page."""
        return (*self.local_steps, self.corner.local_stride, 1)

    @property
    def canonical_strides(self) -> tuple[int, ...]:
        """Byte strides of `shape` in the canonical page."""
        return (*self.canonical_steps, self.corner.canonical_stride, 1)


def grids(runs: Iterable[CopyRun], record_nbytes: int) -> tuple[RunGrid, ...]:
    """Return grids that cover each run once."""

    def likeness(run: CopyRun) -> tuple[int, ...]:
        token = run.canonical_offset // record_nbytes
        strides = (run.local_stride, run.canonical_stride)
        return (token, run.plane, run.count, run.nbytes, *strides)

    ordered = sorted(
        runs, key=lambda r: (likeness(r), r.canonical_offset, r.local_offset)
    )
    found: list[RunGrid] = []
    for _, alike in itertools.groupby(ordered, likeness):
        level = [RunGrid(run) for run in alike]
        while len(folded := _fold(level)) < len(level):
            level = folded
        found += level
    return tuple(found)


def _fold(level: Sequence[RunGrid]) -> list[RunGrid]:
    """Fold each stretch of equal grids at equal distances into one grid."""
    folded, i = [], 0
    while i < len(level):
        j, step = i + 1, None
        while j < len(level) and _alike(level[i], level[j]):
            distance = _distance(level[j - 1], level[j])
            if step not in (None, distance):
                break
            step, j = distance, j + 1
        folded.append(level[i] if step is None else _stack(level[i], j - i, step))
        i = j
    return folded


def _alike(a: RunGrid, b: RunGrid) -> bool:
    return (a.counts, a.local_steps, a.canonical_steps) == (
        b.counts,
        b.local_steps,
        b.canonical_steps,
    )


def _distance(a: RunGrid, b: RunGrid) -> tuple[int, int]:
    return (
        b.corner.local_offset - a.corner.local_offset,
        b.corner.canonical_offset - a.corner.canonical_offset,
    )


def _stack(grid: RunGrid, count: int, step: tuple[int, int]) -> RunGrid:
    return RunGrid(
        grid.corner,
        (count, *grid.counts),
        (step[0], *grid.local_steps),
        (step[1], *grid.canonical_steps),
    )
