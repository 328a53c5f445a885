"""Runs: equal bytes on both sides of a mapping, repeated at fixed strides.

`join` merges runs whose fragments touch on both sides, `fold` also runs without gaps:
then a page of one rank is as few copies as its order allows. The law: neither changes
which byte goes where.

    fold([CopyRun(0, 32, 0, 32, 32, 4), CopyRun(128, 32, 128, 32, 32, 4)])
    # (CopyRun(0, 256, 0, 256, nbytes=256, count=1),)
"""

import dataclasses
from collections.abc import Iterable, Iterator

__all__ = ["CopyRun", "fold", "join"]


@dataclasses.dataclass(frozen=True)
class CopyRun:
    """Equal bytes on both sides, repeated at fixed strides.

    Fragment i is [local_offset + i * local_stride, + nbytes) of the rank's page, in its
    envelope's plane number `plane`, and [canonical_offset + i * canonical_stride, +
    nbytes) of the canonical page.
    """

    local_offset: int
    local_stride: int
    canonical_offset: int
    canonical_stride: int
    nbytes: int
    count: int
    plane: int = 0

    @property
    def total_nbytes(self) -> int:
        """Bytes of all fragments."""
        return self.nbytes * self.count

    def fragments(self) -> Iterator[tuple[int, int, int]]:
        """Yield (local offset, canonical offset, nbytes) of each fragment."""
        for i in range(self.count):
            yield (
                self.local_offset + i * self.local_stride,
                self.canonical_offset + i * self.canonical_stride,
                self.nbytes,
            )

    def cut(self, first: int, stop: int) -> "CopyRun":
        """Return the run of fragments [first, stop) alone."""
        return dataclasses.replace(
            self,
            local_offset=self.local_offset + first * self.local_stride,
            canonical_offset=self.canonical_offset + first * self.canonical_stride,
            count=stop - first,
        )


def join(runs: Iterable[CopyRun]) -> tuple[CopyRun, ...]:
    """Merge runs whose fragments touch on both sides, by local offset."""
    starts = {_start(run): run for run in runs}
    ends = {_end(run) for run in starts.values()}
    joined = []
    for start, run in starts.items():
        if start in ends:
            continue  # reached from the run before it
        nbytes, tail = run.nbytes, run
        while (follower := starts.get(_end(tail))) is not None:
            nbytes, tail = nbytes + follower.nbytes, follower
        joined.append(dataclasses.replace(run, nbytes=nbytes))
    return tuple(sorted(joined, key=_local_order))


def fold(runs: Iterable[CopyRun]) -> tuple[CopyRun, ...]:
    """Turn runs without gaps into one fragment each, and merge those that touch."""
    return tuple(map(_solid, join(map(_solid, runs))))


def _local_order(run: CopyRun) -> tuple[int, ...]:
    return (run.plane, run.local_offset, run.canonical_offset)


def _solid(run: CopyRun) -> CopyRun:
    if run.count > 1 and run.local_stride == run.canonical_stride == run.nbytes:
        total = run.total_nbytes
        run = dataclasses.replace(run, nbytes=total, count=1)
    if run.count == 1:  # a stride between one fragment says nothing
        run = dataclasses.replace(
            run, local_stride=run.nbytes, canonical_stride=run.nbytes
        )
    return run


def _lattice(run: CopyRun) -> tuple[int, ...]:
    if run.count == 1:
        return (run.plane, 1)
    return (run.plane, run.count, run.local_stride, run.canonical_stride)


def _start(run: CopyRun) -> tuple[int, ...]:
    return (*_lattice(run), run.local_offset, run.canonical_offset)


def _end(run: CopyRun) -> tuple[int, ...]:
    return (
        *_lattice(run),
        run.local_offset + run.nbytes,
        run.canonical_offset + run.nbytes,
    )
