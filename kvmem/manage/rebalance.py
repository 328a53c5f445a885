"""Rebalancing: quotas set anew for the sequences that really come, when all is idle.

Every sequence that ends says how much it reused and how long it was. Means that forget
slowly give a typical row; from it follow the pages that each pool, and each group of a
pool, should have. The law: nothing moves until enough was seen, enough time has passed,
some pool or group is off by more than a factor, and no sequence holds a page; and pools
that shrink do so before any grows, so that at no moment more bytes are taken than the
manager was given.

    seen = observe(seen, knobs, reused=512, history=1_800, capacity=2_048)
    if is_due(seen, knobs):
        target = retarget(members, nbytes, seen)
        if needs_adjustment(manager, target, seen, knobs, elapsed_s=300):
            for step in steps(manager, target, holding=0): ...

The rule and its five numbers are those of TensorRT-LLM's second manager. Lengths are
averaged by their squares: a long sequence ends as rarely as a short one, but stays
longer. Groups of one pool draw from one free list, so none of its pages move: what is
rebalanced there is what each group is due of the cache when pages are short
(`shortage.beyond_shares`).
"""

import dataclasses
import math
from collections.abc import Sequence

from kvmem import errors
from kvmem.budget.members import Member
from kvmem.manage.demand import Batch, Row
from kvmem.manage.grouped import grouped
from kvmem.manage.manager import Manager

__all__ = ["Due", "Knobs", "Observed", "Resize", "dues", "is_due", "needs_adjustment"]
__all__ += ["observe", "retarget", "steps"]


@dataclasses.dataclass(frozen=True)
class Knobs:
    """When pools may be sized anew.

    Args:
        decay: weight that an observation keeps with each later one.
        recompute_every: observations from one look at the targets to the next.
        min_samples: observations before anything moves.
        min_interval_s: seconds from one adjustment to the next.
        threshold: factor by which some pool must be off, either way.
    """

    decay: float = 0.9999
    recompute_every: int = 100
    min_samples: int = 2_000
    min_interval_s: float = 120.0
    threshold: float = 1.25

    def __post_init__(self):
        counts = self.recompute_every >= 1 and self.min_samples >= 1
        if not (0 < self.decay <= 1 and counts and self.threshold >= 1):
            raise errors.ConfigError(
                errors.say(
                    f"{self}",
                    "decay lies in (0, 1], counts are at least 1, and so is the factor",
                    "Leave out what needs no other value",
                )
            )
        if self.min_interval_s < 0:
            raise errors.ConfigError(
                errors.say(
                    f"min_interval_s = {self.min_interval_s}",
                    "an interval is no shorter than nothing",
                    "Give 0 to allow every adjustment",
                )
            )


@dataclasses.dataclass(frozen=True)
class Observed:
    """Sums over sequences that ended, each weighed by its age; `weight` is of all."""

    samples: int = 0
    weight: float = 0.0
    reused: float = 0.0
    history_squared: float = 0.0
    capacity_squared: float = 0.0

    @property
    def row(self) -> Row:
        """The typical sequence on the device: root mean squares of what was seen."""
        history = math.sqrt(self.history_squared / self.weight)
        capacity = math.sqrt(self.capacity_squared / self.weight)
        return Row(round(history), round(capacity))

    @property
    def reused_row(self) -> Row:
        """The typical sequence of a lower tier, which keeps only what is reused."""
        mean = round(self.reused / self.weight)
        return Row(mean, mean)


@dataclasses.dataclass(frozen=True)
class Resize:
    """Give one pool another number of pages.

    A pool that shrinks first evicts what is cached, then moves the pages whose ids the
    smaller pool does not have (`pool.compact`).
    """

    pool: int
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class Due:
    """What one group is due of its pool, in vpages, by the manager before and after."""

    group: str
    before: int
    after: int


def observe(
    seen: Observed, knobs: Knobs, *, reused: int, history: int, capacity: int
) -> Observed:
    """Count one sequence that ended.

    Args:
        seen: what was seen before.
        knobs: the decay.
        reused: tokens it found in the prefix cache.
        history: tokens it had cached at its end.
        capacity: tokens it had room for.
    """
    row = Row(history, capacity)
    if not 0 <= reused <= history:
        raise errors.ConfigError(
            errors.say(
                f"{reused} reused tokens of {history}",
                "a sequence reuses at most what it has",
                "Count the tokens of the prefix hit",
            )
        )
    keep = knobs.decay
    return Observed(
        seen.samples + 1,
        seen.weight * keep + 1,
        seen.reused * keep + reused,
        seen.history_squared * keep + row.history**2,
        seen.capacity_squared * keep + row.capacity**2,
    )


def is_due(seen: Observed, knobs: Knobs) -> bool:
    """Say whether this is an observation after which targets are computed."""
    return seen.samples > 0 and seen.samples % knobs.recompute_every == 0


def retarget(
    members: Sequence[Member],
    nbytes: int,
    seen: Observed,
    *,
    level: str = "device",
    constraints: Sequence[Batch] = (),
    floors: Sequence[int] | None = None,
    grain_nbytes: int = 1,
) -> Manager:
    """Return the manager that what was seen asks for, above the same floors.

    Args:
        members: the groups.
        nbytes: of the level.
        seen: sequences that ended; at least one.
        level: "device", or "lower" for a tier that keeps only what is reused.
        constraints: see `grouped`.
        floors: see `grouped`.
        grain_nbytes: see `grouped`.
    """
    if level not in ("device", "lower") or seen.samples == 0:
        raise errors.ConfigError(
            errors.say(
                f"targets of level {level!r} after {seen.samples} observations",
                "a level is 'device' or 'lower', and targets follow from observations",
                "Observe a sequence first",
            )
        )
    row = seen.row if level == "device" else seen.reused_row
    return grouped(
        members,
        nbytes,
        typical=Batch((row,)),
        constraints=constraints,
        floors=floors,
        grain_nbytes=grain_nbytes,
    )


def needs_adjustment(
    manager: Manager,
    target: Manager,
    seen: Observed,
    knobs: Knobs,
    elapsed_s: float,
) -> bool:
    """Say whether quotas are far enough off, seen often enough, and long enough ago.

    Args:
        manager: as the pools, and the dues of their groups, are.
        target: as they should be.
        seen: the observations behind the target.
        knobs: the thresholds.
        elapsed_s: seconds since the last adjustment.
    """
    if seen.samples < knobs.min_samples or elapsed_s < knobs.min_interval_s:
        return False
    return any(
        max(each.after, each.before) > knobs.threshold * min(each.after, each.before)
        for each in (*_changes(manager, target), *dues(manager, target))
    )


def dues(manager: Manager, target: Manager) -> tuple[Due, ...]:
    """Return what the groups that share a pool are due, before and after.

    A group with a pool of its own is due the whole of it.

    Raises:
        IncompatiblePlan: as of `steps`.
    """
    _require_same_groups(manager, target)
    pools = [quota.pool for quota in manager.quotas]
    return tuple(
        Due(quota.group, manager.due(index), target.due(index))
        for index, quota in enumerate(manager.quotas)
        if pools.count(quota.pool) > 1
    )


def steps(manager: Manager, target: Manager, holding: int) -> tuple[Resize, ...]:
    """Return the changes that lead to the target, those that shrink first.

    Args:
        manager: as the pools are.
        target: as they should be.
        holding: sequences that hold pages now.

    Raises:
        Busy: a sequence holds pages.
        IncompatiblePlan: a manager of other groups, or one whose pools do not follow
            need.
    """
    if holding:
        raise errors.Busy(
            errors.say(
                "sizing the pools anew",
                f"{holding} sequences hold pages, which would have to move under them",
                "Wait until all have ended, or suspend them first",
            )
        )
    return tuple(sorted(_changes(manager, target), key=lambda s: s.after > s.before))


def _require_same_groups(manager: Manager, target: Manager) -> None:
    if manager.name != target.name or [
        (quota.group, quota.pool) for quota in manager.quotas
    ] != [(quota.group, quota.pool) for quota in target.quotas]:
        raise errors.IncompatiblePlan(
            errors.say(
                f"from {manager.name} of {len(manager.quotas)} groups to {target.name} "
                f"of {len(target.quotas)}",
                "pools are sized anew for the groups they have, by the grouped manager",
                "Build both with `grouped` from the same members",
            )
        )


def _changes(manager: Manager, target: Manager) -> list[Resize]:
    _require_same_groups(manager, target)
    pairs = zip(manager.pools, target.pools, strict=True)
    return [
        Resize(index, old.pages, new.pages)
        for index, (old, new) in enumerate(pairs)
        if old.pages != new.pages
    ]
