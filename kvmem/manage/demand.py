"""Demand: how many pages a batch of sequences takes of each group, and in what ratio.

A `Row` is where one sequence stands: tokens in the cache, tokens it has room for. A
`Batch` is rows that may begin with one text, whose pages are counted once. From a batch
follow pages, from pages bytes, and from bytes the share of each group.

    demand.pages(Batch((Row(2_048, 2_049),)), group)      # 65, or 5 of a window of 128
    demand.shares(members, typical=batch)                 # (0.071…, 0.928…)

The order in which ratios are found is that of TensorRT-LLM's second manager: given by a
person, else of a typical batch, else of the batches that must fit, else of one sequence
of 2,049 tokens.
"""

import dataclasses
import fractions
import math
from collections.abc import Sequence

from kvmem import errors
from kvmem.budget.members import Member
from kvmem.geometry import LifecycleGroup
from kvmem.manage.manager import peak

__all__ = ["DEFAULT", "Batch", "Row", "floors", "pages", "rows_floor", "shares"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Where a sequence stands: `history` tokens cached, room for `capacity`."""

    history: int
    capacity: int

    def __post_init__(self):
        if not 0 <= self.history <= self.capacity:
            raise errors.ConfigError(
                errors.say(
                    f"{self.history} tokens in a cache with room for {self.capacity}",
                    "a sequence has room for what it has",
                    "Give 0 <= history <= capacity",
                )
            )


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that run together; all begin with the same `shared` tokens."""

    rows: tuple[Row, ...]
    shared: int = 0

    def __post_init__(self):
        shortest = min((row.capacity for row in self.rows), default=0)
        if not self.rows or not 0 <= self.shared <= shortest:
            raise errors.ConfigError(
                errors.say(
                    f"{self.shared} shared tokens of {len(self.rows)} rows",
                    f"the shortest row has room for {shortest} tokens",
                    "Give at least one row, and share at most what each of them holds",
                )
            )


DEFAULT = Batch((Row(2_048, 2_049),))


def pages(batch: Batch, group: LifecycleGroup) -> int:
    """Return the vpages that a batch holds of a group.

    A whole page of the shared text counts once, as long as any row still reads it.
    """
    life, size = group.lifecycle, group.page_size
    if life.kind == "state":
        return len(batch.rows)
    common = batch.shared // size
    stale = [life.stale(row.history, size) for row in batch.rows]
    unread = range(max(r.start for r in stale), min(r.stop for r in stale))
    total = common - _overlap(unread, common)
    for row, gone in zip(batch.rows, stale, strict=True):
        shared = common - _overlap(gone, common)
        total += life.resident(row.capacity, row.history, size) - shared
    return total


def floors(members: Sequence[Member], constraints: Sequence[Batch]) -> tuple[int, ...]:
    """Return i[G] vpages that hold every batch of `constraints`, at least one each."""
    return tuple(
        max([1, *(pages(batch, member.virtual) for batch in constraints)])
        for member in members
    )


def rows_floor(
    members: Sequence[Member], rows: int, max_length: int, step: int = 1
) -> tuple[int, ...]:
    """Return i[G] vpages with which `rows` sequences never stop one another for good.

    A group whose pages are bounded (window, state) has its peak for every row, so that
    no row waits for a window of another; a group that grows with the text has the pages
    of one longest sequence, so that the oldest always ends and gives its pages back.
    """
    one = peak(members, [max_length], step)
    return tuple(
        count if member.group.lifecycle.kind == "full" else count * rows
        for member, count in zip(members, one, strict=True)
    )


def shares(
    members: Sequence[Member],
    *,
    given: Sequence[float] | None = None,
    typical: Batch | None = None,
    constraints: Sequence[Batch] = (),
    grain_nbytes: int = 1,
) -> tuple[float, ...]:
    """Return the share of each group of the bytes, by the first source that exists.

    Args:
        members: the groups.
        given: weights that a person set, one a group.
        typical: a batch as it usually runs.
        constraints: batches that must fit.
        grain_nbytes: what a group takes is rounded up to.

    Raises:
        ConfigError: weights of another number than groups, or not positive.
    """
    if given is not None:
        _require_weights(given, len(members))
        weights = tuple(fractions.Fraction(weight) for weight in given)
    else:
        if typical is not None or not constraints:
            batches: Sequence[Batch] = (typical or DEFAULT,)
        else:
            batches = constraints
        counts = floors(members, batches)
        taken = [m.nbytes * n for m, n in zip(members, counts, strict=True)]
        weights = tuple(-(-n // grain_nbytes) * grain_nbytes for n in taken)
    return tuple(float(fractions.Fraction(weight) / sum(weights)) for weight in weights)


def _overlap(ordinals: range, count: int) -> int:
    """Return how many of `ordinals` are below `count`."""
    return max(0, min(ordinals.stop, count) - ordinals.start)


def _require_weights(weights: Sequence[float], groups: int) -> None:
    sound = all(weight > 0 and math.isfinite(weight) for weight in weights)
    if len(weights) != groups or not sound:
        raise errors.ConfigError(
            errors.say(
                f"shares {tuple(weights)} for {groups} groups",
                "every group has a share, above zero and finite",
                "Give one positive number a group, in the order of the groups",
            )
        )
