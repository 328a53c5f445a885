"""Admission: all the pages a sequence needs, of every group and domain, or none.

`admit` is a question about numbers: it looks at every group, the draft's too, before
anything is taken, and what is granted leaves the floors of the other groups whole.
`take_all` is the deed: it takes group by group, and when one fails, whatever was taken
goes back, in reverse, before anybody hears of it.

The law: after a `Shortage` the room is what it was; after an `Admission` every group
has its claim, no quota is exceeded, and every floor can still be filled.

    answer = admit(manager, room, needs)
    if isinstance(answer, Shortage): ...      # evict, preempt, or wait: shortage.py
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmem import errors
from kvmem.manage.manager import Manager, Quota

__all__ = ["Admission", "Room", "Shortage", "admit", "give_back", "take_all", "unused"]


class Room(NamedTuple):
    """What is left: physical pages free in each pool, vpages that each group holds.

    Cached pages count as held by their group until they are evicted.
    """

    free: tuple[int, ...]
    held: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Admission:
    """Granted: the vpages of each group, and the room once they are taken."""

    claims: tuple[int, ...]
    room: Room


@dataclasses.dataclass(frozen=True)
class Shortage:
    """Refused, and nothing was taken.

    Args:
        group: key of the group that the request stops at.
        law: "quota" when the group would hold more than its quota, "pool" when its
            pool lacks pages.
        missing: vpages over the quota, or physical pages that the pool lacks.
        reason: the same in words, with the numbers.
    """

    group: str
    law: str
    missing: int
    reason: str


def unused(manager: Manager) -> Room:
    """Return the room of a manager nobody has taken from."""
    free = tuple(pool.pages for pool in manager.pools)
    return Room(free, (0,) * len(manager.quotas))


def admit(manager: Manager, room: Room, needs: Sequence[int]) -> Admission | Shortage:
    """Say whether `needs` may be taken: of every group, or of none.

    Args:
        manager: the quotas.
        room: what is left.
        needs: i[G] vpages asked of each group; 0 where nothing is.
    """
    _require_counts(manager, needs)
    short = _over_quota(manager, room, needs) or _over_pool(manager, room, needs)
    if short is not None:
        return short
    free = list(room.free)
    for quota, count in zip(manager.quotas, needs, strict=True):
        free[quota.pool] -= count * quota.extents
    held = tuple(had + count for had, count in zip(room.held, needs, strict=True))
    return Admission(tuple(needs), Room(tuple(free), held))


def give_back(manager: Manager, room: Room, claims: Sequence[int]) -> Room:
    """Return the room after `claims` i[G] vpages are given back.

    Raises:
        InvalidId: a group gives back more than it holds.
    """
    _require_counts(manager, claims)
    free, held = list(room.free), list(room.held)
    for i, (quota, count) in enumerate(zip(manager.quotas, claims, strict=True)):
        if count > held[i]:
            raise errors.InvalidId(
                errors.say(
                    f"giving back {count} vpages of {quota.group}",
                    f"it holds {held[i]}",
                    "Give a claim back once",
                )
            )
        free[quota.pool] += count * quota.extents
        held[i] -= count
    return Room(tuple(free), tuple(held))


def take_all[Taken](
    needs: Sequence[int],
    take: Callable[[int, int], Taken | None],
    give_back: Callable[[int, Taken], object],
) -> tuple[Taken | None, ...] | None:
    """Take what every group needs, or leave everything as it was.

    Args:
        needs: i[G] vpages asked of each group; a group asked for none is not called.
        take: (group, count) -> the pages taken, None when they cannot be had.
        give_back: (group, taken) returns them.

    Returns:
        What was taken of each group, None for one asked for none; or None at all.
    """
    taken: list[tuple[int, Taken]] = []
    is_whole = False
    try:
        for group, count in enumerate(needs):
            if count:
                got = take(group, count)
                if got is None:
                    return None
                taken.append((group, got))
        is_whole = True
    finally:
        if not is_whole:
            for group, got in reversed(taken):
                give_back(group, got)
    found = dict(taken)
    return tuple(found.get(group) for group in range(len(needs)))


def _over_quota(manager: Manager, room: Room, needs: Sequence[int]) -> Shortage | None:
    """Return the first group that would hold more than its quota."""
    for quota, held, count in zip(manager.quotas, room.held, needs, strict=True):
        over = held + count - quota.pages
        if count and over > 0:
            return Shortage(
                quota.group,
                "quota",
                over,
                f"{quota.group} holds {held} vpages and asks for {count}: its quota is "
                f"{quota.pages}",
            )
    return None


def _over_pool(manager: Manager, room: Room, needs: Sequence[int]) -> Shortage | None:
    """Return what the first pool lacks, after the floors of those who did not ask.

    Who asks for no more than its own floor is not held up by anybody's floor.
    """
    rows = tuple(zip(manager.quotas, room.held, needs, strict=True))
    for index, free in enumerate(room.free):
        mine = [row for row in rows if row[0].pool == index]
        asked = sum(count * quota.extents for quota, _, count in mine)
        kept = sum(_unfilled(quota, held + count) for quota, held, count in mine)
        before = sum(_unfilled(quota, held) for quota, held, _ in mine)
        if before - kept == asked:
            kept = 0
        if asked and asked + kept > free:
            largest = max(mine, key=lambda row: row[2] * row[0].extents)[0]
            return Shortage(
                largest.group,
                "pool",
                asked + kept - free,
                f"{asked} pages asked of pool {index}, {kept} kept for floors, "
                f"{free} free",
            )
    return None


def _unfilled(quota: Quota, held: int) -> int:
    """Return the pages that a group's floor still waits for."""
    return max(0, quota.floor - held) * quota.extents


def _require_counts(manager: Manager, counts: Sequence[int]) -> None:
    if len(counts) != len(manager.quotas) or any(count < 0 for count in counts):
        raise errors.ConfigError(
            errors.say(
                f"vpages {tuple(counts)} for {len(manager.quotas)} groups",
                "a count of each group, none below zero",
                "Give 0 for a group that is not asked",
            )
        )
