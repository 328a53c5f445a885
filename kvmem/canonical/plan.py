"""Plan: the runs of every rank, and which rank writes which canonical byte.

Three laws, checked whenever a plan or an election is made, so that a broken one cannot
exist: the runs of a rank tile its page (padding aside), the elected writers' runs tile
the canonical page, and a writer writes only bytes that it holds. Writers share the
bytes of a batch of pages evenly (`elect`).

    p = plan(group, Topology(tp=9), order="head_major")
    p.runs[4], p.writers()[4]    # what rank 4 reads back; what it alone exports

Tiling proves that a plan is a bijection, not that it is the right one: `judge` does.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal

import numpy as np

from kvmem import errors
from kvmem.canonical.elect import ALONE, Runs, Turn, elect, period, sharers
from kvmem.canonical.mapping import page_tokens, rows
from kvmem.canonical.runs import CopyRun, join
from kvmem.canonical.units import check_tiling, common_unit, expand
from kvmem.geometry import envelope
from kvmem.geometry.envelope import Envelope, Plane
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.topology import Topology

__all__ = ["CopyPlan", "Who", "check", "plan"]

# Whose runs: those elected for a page, all that hold, or everything one rank holds.
Who = Turn | Literal["holders"] | int


@dataclasses.dataclass(frozen=True)
class CopyPlan:
    """How the pages of one group on one topology become token records, and back.

    Args:
        group: the layers, with the page size of this side.
        order: the page order of this side.
        held: for each rank its rows: one a layer, head, field and token span.
        num_pages: pages of the pool, where the order's regions depend on it.

    Raises:
        IncompatiblePlan: runs that leave a gap or overlap; every objection at once.
    """

    group: LifecycleGroup
    topology: Topology
    order: str
    held: tuple[Runs, ...]
    num_pages: int | None = None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # The facts that a plan is derived from: thousands of runs need no hashing.
        return hash((self.group, self.topology, self.order))

    def __post_init__(self):
        self.writers()

    @functools.cached_property
    def runs(self) -> tuple[Runs, ...]:
        """For each rank all that it holds; an import writes these."""
        return _joined(self.held, self.record_nbytes)

    def writers(self, turn: Turn = ALONE) -> tuple[Runs, ...]:
        """Return for each rank its elected part of a page; an export reads these."""
        return _writers(self, turn)

    def turns(self, num_pages: int) -> tuple[Turn, ...]:
        """Return the elections of a batch: page i is dealt by number i % len(turns)."""
        pages = (num_pages - 1) % self.period + 1
        return tuple(Turn(page, pages) for page in range(self.period))

    @functools.cached_property
    def period(self) -> int:
        """Pages after which an election repeats."""
        return period(self.held)

    @property
    def record_nbytes(self) -> int:
        """Bytes of one token's record."""
        return self.group.record_nbytes

    @property
    def page_tokens(self) -> int:
        """Tokens that one page keeps over all ranks; one checkpoint of a state."""
        return page_tokens(self.group, self.topology)

    @functools.cached_property
    def page_nbytes(self) -> int:
        """Bytes of one page on one rank, padding included."""
        return self.envelope(0).nbytes

    def lists(self, who: Who) -> tuple[Runs, ...]:
        """Return a list of runs a rank: a page's writers', the holders', one rank's."""
        if isinstance(who, Turn):
            return self.writers(who)
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
        every = [run for runs in self.held for run in runs]
        envelopes = [self.envelope(rank) for rank in range(self.topology.ranks)]
        return common_unit(envelopes, every, self.record_nbytes)

    @functools.cached_property
    def replicated(self) -> tuple[int, ...]:
        """Ranks that hold bytes which another rank holds too."""
        return sharers(self.held)


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
    held = tuple(
        rows(group, topology, rank, order, num_pages=num_pages)
        for rank in range(topology.ranks)
    )
    return CopyPlan(group, topology, order, held, num_pages)


def check(plan: CopyPlan, turn: Turn = ALONE) -> tuple[str, ...]:
    """Return the laws that a plan breaks in one election, () when it is sound."""
    ranks = plan.topology.ranks
    if len(plan.held) != ranks:
        return (f"{len(plan.held)} lists of runs for {ranks} ranks",)
    return check_tiling(
        [plan.envelope(rank) for rank in range(ranks)],
        plan.runs,
        _joined(elect(plan.held, turn), plan.record_nbytes),
        plan.record_nbytes,
        plan.page_tokens,
    )


@functools.lru_cache(maxsize=1024)
def _writers(plan: CopyPlan, turn: Turn) -> tuple[Runs, ...]:
    """Return an election that keeps the laws, or refuse it."""
    objections = check(plan, turn)
    if objections:
        raise errors.IncompatiblePlan(
            errors.say(
                f"a copy plan for group {plan.group.name!r} on {plan.topology}",
                "; ".join(objections),
                "Derive it with canonical.plan",
            )
        )
    return _joined(elect(plan.held, turn), plan.record_nbytes)


def _joined(lists: Iterable[Runs], record_nbytes: int) -> tuple[Runs, ...]:
    """Merge each rank's runs that touch within one token: a fragment stays in one."""
    merged = []
    for runs in lists:
        by_token: dict[int, list[CopyRun]] = {}
        for run in runs:
            by_token.setdefault(run.canonical_offset // record_nbytes, []).append(run)
        tokens = sorted(by_token)
        merged.append(tuple(run for token in tokens for run in join(by_token[token])))
    return tuple(merged)
