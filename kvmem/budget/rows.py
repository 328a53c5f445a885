"""Rows: what every group needs beside a number of pages of the first one.

Rows are counted by a group that keeps all tokens, where there is one. Another such
group has as many; a state group has one page a sequence whatever the tokens; a window
group grows with the rows until it holds what all sequences can read, and no further,
and no ratio leaves it less than one sequence reads, or than the rows have. So the bytes
of a plan only grow with its rows, and the most rows that fit are found by halving.
"""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

from kvmem.budget.members import Member
from kvmem.geometry import LifecycleGroup, Topology

__all__ = ["Frame", "Load", "Need", "most", "need_of", "primary"]


@dataclasses.dataclass(frozen=True)
class Load:
    """What runs at once, which decides the pages of states and windows."""

    sequences: int | None
    snapshots: int
    max_length: int | None
    step: int
    window_ratio: float | None


@dataclasses.dataclass(frozen=True)
class Need:
    """Pages of one group when the first group has n: fixed + min(cap, n * per_row).

    Never fewer than `least`, or than `n * least_per_row` where that is less.
    """

    per_row: Fraction
    fixed: int = 0
    cap: int | None = None
    rounds_up: bool = True
    least: int = 0
    least_per_row: Fraction = Fraction(0)

    def at(self, rows: int) -> int:
        """Return the pages beside `rows` pages of the first group."""
        return int(self.cost(rows))

    def cost(self, rows: int) -> Fraction:
        """Return what these rows pay for: a part of a page is not handed out."""
        grown = rows * self.per_row
        grown = _whole(grown) if self.rounds_up else grown
        grown = max(grown, self._floor(rows))
        return self.fixed + (grown if self.cap is None else min(grown, self.cap))

    def is_capped(self, rows: int) -> bool:
        """Say whether these rows need a number that is not `rows * per_row`."""
        if not self.per_row or rows * self.per_row < self._floor(rows):
            return True
        return self.cap is not None and self.at(rows) >= self.cap

    def _floor(self, rows: int) -> Fraction:
        return min(Fraction(self.least), _whole(rows * self.least_per_row))


@dataclasses.dataclass(frozen=True)
class Frame:
    """Members, what they need for a number of rows, and the draft that follows them."""

    members: tuple[Member, ...]
    needs: tuple[Need, ...]
    first: int
    follower_nbytes: int  # of a draft's own pool, for each page of the first pool
    kind: str

    def pages(self, rows: int) -> tuple[int, ...]:
        """Return the physical pages of each pool for a number of rows."""
        found = [0] * (1 + max(member.pool for member in self.members))
        for member, need in zip(self.members, self.needs, strict=True):
            found[member.pool] += member.extents * need.at(rows)
        return tuple(found)

    def page_nbytes(self, pool: int) -> int:
        """Return the bytes of a page of a pool, those that follow it included."""
        own = next(m.page_nbytes for m in self.members if m.pool == pool)
        leads = pool == self.members[self.first].pool
        return own + leads * self.follower_nbytes

    def nbytes(self, rows: int) -> int:
        """Return the bytes that a number of rows pays for, at least all pools'."""
        total = Fraction(0)
        for member, need in zip(self.members, self.needs, strict=True):
            each = member.extents * self.page_nbytes(member.pool)
            total += need.cost(rows) * each
        return -int(-total // 1)

    def step_nbytes(self, rows: int) -> int:
        """Return what the next page, or row of a split plan, would take."""
        if self.kind == "unified":
            return self.page_nbytes(0)
        return self.nbytes(rows + 1) - self.nbytes(rows)


def primary(groups: Sequence[LifecycleGroup]) -> int:
    """Return the group that rows are counted by: one that keeps all tokens, if any."""
    for kind in ("full", "window", "state"):
        for index, group in enumerate(groups):
            if group.domain == "target" and group.lifecycle.kind == kind:
                return index
    raise AssertionError("roles were checked before")


def need_of(
    group: LifecycleGroup,
    groups: Sequence[LifecycleGroup],
    first: int,
    topology: Topology,
    load: Load,
) -> Need:
    """Return what a group needs beside pages of the first group."""
    lead, kind = groups[first], group.lifecycle.kind
    per_row = Fraction(lead.page_size, group.page_size)
    if kind == lead.lifecycle.kind or kind == "full":
        return Need(Fraction(1) if kind == "state" else per_row)
    if kind == "state":
        return Need(Fraction(0), fixed=load.sequences + load.snapshots)
    peak, size = 1, group.page_size * topology.dcp  # tokens of a virtual page
    if load.max_length is not None:
        peak = group.lifecycle.peak(load.max_length, size, load.step)
    if load.window_ratio is not None:
        ratio = Fraction(str(load.window_ratio))
        return Need(per_row * ratio, rounds_up=False, least=peak, least_per_row=per_row)
    if load.sequences is None or load.max_length is None:
        return Need(per_row)
    return Need(per_row, cap=load.sequences * peak)


def _whole(pages: Fraction) -> Fraction:
    return Fraction(-int(-pages // 1))


def most(fits: Callable[[int], bool], high: int) -> int:
    """Return the largest n in [0, high] that fits, when fewer fit wherever more do."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
