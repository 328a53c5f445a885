"""Plan: the runs of every rank, and which rank writes which canonical byte.

Three laws, checked whenever a plan is made, so that a broken plan cannot exist: the
runs of a rank tile its page (padding aside), the elected writers' runs tile the
canonical page, and a writer writes only bytes that it holds. Every canonical byte has
one writer; the holders of a head share its bytes so that no two of them differ by more
than one field of one record, for a single page too.

    p = plan(group, Topology(tp=9), order="head_major")
    p.runs[4], p.writers[4]     # what rank 4 reads back; what it alone exports

Tiling proves that a plan is a bijection, not that it is the right one: `judge` does.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from kvmem import errors
from kvmem.canonical.mapping import CopyRun, join, rows
from kvmem.canonical.units import check_tiling, common_unit, expand
from kvmem.geometry import envelope
from kvmem.geometry.envelope import Envelope, Plane
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.topology import Topology

__all__ = ["CopyPlan", "Who", "check", "plan"]

Runs = tuple[CopyRun, ...]
# Whose runs: all that are elected, all that hold, or everything one rank holds.
Who = Literal["writers", "holders"] | int


@dataclasses.dataclass(frozen=True)
class CopyPlan:
    """How the pages of one group on one topology become token records, and back.

    Args:
        group: the layers, with the page size of this side.
        order: the page order of this side.
        runs: for each rank all that it holds; an import writes these.
        writers: for each rank its elected part; an export reads these.
        num_pages: pages of the pool, where the order's regions depend on it.

    Raises:
        IncompatiblePlan: runs that leave a gap or overlap; every objection at once.
    """

    group: LifecycleGroup
    topology: Topology
    order: str
    runs: tuple[Runs, ...]
    writers: tuple[Runs, ...]
    num_pages: int | None = None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # The facts that a plan is derived from: thousands of runs need no hashing.
        return hash((self.group, self.topology, self.order))

    def __post_init__(self):
        objections = check(self)
        if objections:
            raise errors.IncompatiblePlan(
                errors.say(
                    f"a copy plan for group {self.group.name!r} on {self.topology}",
                    "; ".join(objections),
                    "Derive it with canonical.plan",
                )
            )

    @property
    def record_nbytes(self) -> int:
        """Bytes of one token's record."""
        return self.group.record_nbytes

    @property
    def page_tokens(self) -> int:
        """Tokens whose state one page keeps over all ranks."""
        return self.group.page_size * self.topology.dcp

    @functools.cached_property
    def page_nbytes(self) -> int:
        """Bytes of one page on one rank, padding included."""
        return self.envelope(0).nbytes

    def lists(self, who: Who) -> tuple[Runs, ...]:
        """Return a list of runs a rank: the writers', the holders', or one rank's."""
        if who == "writers":
            return self.writers
        if who == "holders":
            return self.runs
        return tuple(runs if r == who else () for r, runs in enumerate(self.runs))

    def envelope(self, rank: int) -> Envelope:
        """Return the meaning of a page on `rank`."""
        return envelope.build(
            self.group, self.topology, rank, self.order, self.num_pages
        )

    @functools.cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that a page is spread over, equal on every rank."""
        return self.envelope(0).planes

    @functools.cached_property
    def num_arrays(self) -> int:
        """Arrays that a pool of this order has."""
        return 1 + max(plane.index for plane in self.planes)

    def units_of(self, runs: Iterable[CopyRun]) -> tuple[np.ndarray, np.ndarray]:
        """Return (local unit, canonical unit) of every block that runs move."""
        return expand(runs, self.unit_nbytes, self.envelope(0).plane_starts)

    @functools.cached_property
    def unit_nbytes(self) -> int:
        """Bytes of the largest block that no run, row or page cuts."""
        every = [run for runs in (*self.runs, *self.writers) for run in runs]
        envelopes = [self.envelope(rank) for rank in range(self.topology.ranks)]
        return common_unit(envelopes, every, self.record_nbytes)

    @functools.cached_property
    def replicated(self) -> tuple[int, ...]:
        """Ranks that hold bytes another rank writes."""
        return tuple(
            rank for rank, runs in enumerate(self.runs) if runs != self.writers[rank]
        )


@functools.lru_cache(maxsize=256)
def plan(
    group: LifecycleGroup,
    topology: Topology,
    order: str = "head_major",
    page_size: int | None = None,
    num_pages: int | None = None,
) -> CopyPlan:
    """Return the plan of `group` on `topology`.

    Args:
        order: the page order of this side.
        page_size: slots in a page of this side; None: the group's own.
        num_pages: pages of the pool; only orders with regions need it.

    Raises:
        IncompatiblePlan: heads or an interleave that the topology cannot serve.
        ConfigError: an unknown page order, or a page without slots.
    """
    if page_size is not None:
        group = dataclasses.replace(group, page_size=page_size)
    held = [
        rows(group, topology, rank, order, num_pages=num_pages)
        for rank in range(topology.ranks)
    ]
    return CopyPlan(
        group,
        topology,
        order,
        runs=tuple(_joined(runs, group.record_nbytes) for runs in held),
        writers=tuple(_joined(runs, group.record_nbytes) for runs in _elect(held)),
        num_pages=num_pages,
    )


def check(plan: CopyPlan) -> tuple[str, ...]:
    """Return the laws that a plan breaks, () when it is sound."""
    ranks = plan.topology.ranks
    if not len(plan.runs) == len(plan.writers) == ranks:
        return (f"{len(plan.runs)} lists of runs for {ranks} ranks",)
    return check_tiling(
        [plan.envelope(rank) for rank in range(ranks)],
        plan.runs,
        plan.writers,
        plan.record_nbytes,
        plan.page_tokens,
    )


def _joined(runs: Iterable[CopyRun], record_nbytes: int) -> Runs:
    """Merge runs that touch within one token; a fragment stays one token's bytes."""
    by_token: dict[int, list[CopyRun]] = {}
    for run in runs:
        by_token.setdefault(run.canonical_offset // record_nbytes, []).append(run)
    return tuple(run for token in sorted(by_token) for run in join(by_token[token]))


def _elect(held: Sequence[Runs]) -> list[Runs]:
    """Give each uncoalesced row to its holders in turn: one writer a byte."""
    elected: list[list[CopyRun]] = [[] for _ in held]
    for ranks, by_width in _shared_rows(held).items():
        num_rows = {
            nbytes: sum(by_holder[0].count for by_holder in copies)
            for nbytes, copies in by_width.items()
        }
        shares = _shares(len(ranks), num_rows)
        for nbytes, copies in by_width.items():
            stops = list(itertools.accumulate(shares[nbytes], initial=0))
            for i, rank in enumerate(ranks):
                mine = [by_holder[i] for by_holder in copies]
                elected[rank] += _slice(mine, stops[i], stops[i + 1])
    return [tuple(runs) for runs in elected]


def _shares(holders: int, rows_by_width: dict[int, int]) -> dict[int, list[int]]:
    """Return how many rows of each width every holder writes.

    The rows of a width are divided evenly; those left over go, widest first, to whoever
    has the fewest bytes so far, so that two holders never differ by more than one row.
    """
    load = [0] * holders
    shares = {}
    for nbytes, num_rows in sorted(rows_by_width.items(), reverse=True):
        even, left = divmod(num_rows, holders)
        share = [even] * holders
        for _ in range(left):
            i = load.index(min(load))
            share[i] += 1
            load[i] += nbytes
        shares[nbytes] = share
    return shares


def _shared_rows(
    held: Sequence[Runs],
) -> dict[tuple[int, ...], dict[int, list[list[CopyRun]]]]:
    """Sort rows by holders and width: each row is listed once, with a copy a holder."""
    copies: dict[tuple[int, int, int], list[tuple[int, CopyRun]]] = {}
    for rank, runs in enumerate(held):
        for run in runs:
            place = (run.canonical_offset, run.canonical_stride, run.nbytes)
            copies.setdefault(place, []).append((rank, run))
    shared: dict[tuple[int, ...], dict[int, list[list[CopyRun]]]] = {}
    for (_, _, nbytes), found in sorted(copies.items(), key=lambda item: item[0]):
        ranks = tuple(rank for rank, _ in found)
        by_width = shared.setdefault(ranks, {})
        by_width.setdefault(nbytes, []).append([run for _, run in found])
    return shared


def _slice(runs: Sequence[CopyRun], first: int, stop: int) -> Iterable[CopyRun]:
    """Yield fragments [first, stop) of runs laid end to end."""
    start = 0
    for run in runs:
        low, high = max(first - start, 0), min(stop - start, run.count)
        if low < high:
            yield run.cut(low, high)
        start += run.count
