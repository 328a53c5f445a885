"""Shortage: what a group that lacks pages may evict, its own and from others.

All groups of a pool draw from one free list, so a state that lacks pages may take those
of cached attention pages: one state slot of K extents may cost thousands of tokens
(sglang #34441 is a server that starved beside a full cache because it could not). Three
limits: a group over its quota can only give up its own; another group's pages help only
down to its floor; and nothing is evicted that is not needed.

The law: after evicting what `evictions` names, `admit` grants the request; and evicting
one vpage less of any group, it does not.

    evictions(manager, room, needs, evictable)     # (0, 21): 21 pages of group 1
    least_tokens(nbytes=34_971_520, token_nbytes=27_648)      # 1,265

A cache that knows which of its pages are cold asks in steps: whether all of it would do
(`granted_at_most`), what is lacking still (`admit`), and whose pages are of least use
(`beyond_shares`). Cached texts are of use whole: a group's share is what it keeps of
each, so cached pages beyond the share are those that the others have no text for.
"""

import dataclasses
import math
from collections.abc import Sequence

from kvmem import errors
from kvmem.manage.admission import Admission, Room, Shortage, admit, give_back
from kvmem.manage.manager import Manager

__all__ = ["Evictions", "beyond_shares", "evictions", "granted_at_most"]
__all__ += ["least_tokens"]


@dataclasses.dataclass(frozen=True)
class Evictions:
    """Cached vpages of each group to evict, i[G], and what is granted after that."""

    counts: tuple[int, ...]
    admission: Admission


def evictions(
    manager: Manager,
    room: Room,
    needs: Sequence[int],
    evictable: Sequence[int],
    order: Sequence[int] | None = None,
) -> Evictions | Shortage:
    """Return the least that must be evicted for `needs` to be granted.

    Args:
        manager: the quotas.
        room: what is left; cached vpages count as held.
        needs: i[G] vpages asked of each group.
        evictable: i[G] vpages that only the cache holds, and that the request does not
            reuse.
        order: groups in the order in which they give; by default the ones that ask,
            then the others, those with most bytes to give first.

    Returns:
        The evictions, all zero when none is needed; or the shortage that would remain
        if everything were evicted: then preempt, or wait.
    """
    if isinstance(short := granted_at_most(manager, room, needs, evictable), Shortage):
        return short
    counts = [0] * len(manager.quotas)
    givers = tuple(order) if order is not None else _order(manager, needs, evictable)
    for group in givers:
        if isinstance(_after(manager, room, needs, counts), Admission):
            break
        counts[group] = evictable[group]
    for group in reversed(givers):  # who came last gives only what the others cannot
        counts[group] = _least(manager, room, needs, counts, group)
    answer = _after(manager, room, needs, counts)
    if isinstance(answer, Shortage):  # an order that leaves groups out
        return answer
    return Evictions(tuple(counts), answer)


def granted_at_most(
    manager: Manager, room: Room, needs: Sequence[int], evictable: Sequence[int]
) -> Admission | Shortage:
    """Say whether `needs` may be taken once everything evictable is gone.

    Args: as of `evictions`.

    Raises:
        InvalidId: more evictable vpages than are held.
    """
    _require_held(manager, room, evictable)
    return admit(manager, give_back(manager, room, evictable), needs)


def beyond_shares(manager: Manager, evictable: Sequence[int]) -> tuple[int, ...]:
    """Return i[G]: the cached vpages of each group beyond its share of all cached.

    Args:
        manager: the shares, which add up to 1 over the groups of a pool that they
            divide; shares of 1 each leave nobody beyond.
        evictable: i[G] vpages that only the cache holds.
    """
    sizes = manager.vpage_nbytes
    total = sum(count * size for count, size in zip(evictable, sizes, strict=True))
    rows = zip(manager.quotas, evictable, sizes, strict=True)
    return tuple(
        max(0, count - math.ceil(quota.share * total / size))
        for quota, count, size in rows
    )


def least_tokens(nbytes: int, token_nbytes: int, dcp: int = 1) -> int:
    """Return the fewest cached tokens whose bytes make up for `nbytes` on a rank.

    Args:
        nbytes: that are lacking.
        token_nbytes: of one token's row in the pool.
        dcp: ranks that share the tokens; each keeps every dcp-th row.
    """
    return -(-nbytes * dcp // token_nbytes)


def _order(
    manager: Manager, needs: Sequence[int], evictable: Sequence[int]
) -> tuple[int, ...]:
    def place(group: int) -> tuple[bool, int, int]:
        pages = evictable[group] * manager.quotas[group].extents
        return needs[group] == 0, -pages, group

    return tuple(sorted(range(len(manager.quotas)), key=place))


def _after(
    manager: Manager, room: Room, needs: Sequence[int], counts: Sequence[int]
) -> Admission | Shortage:
    return admit(manager, give_back(manager, room, counts), needs)


def _least(
    manager: Manager,
    room: Room,
    needs: Sequence[int],
    counts: Sequence[int],
    group: int,
) -> int:
    """Return the fewest vpages of one group, the others' counts as they are."""
    low, high = 0, counts[group]
    while low < high:
        middle = (low + high) // 2
        tried = [*counts[:group], middle, *counts[group + 1 :]]
        if isinstance(_after(manager, room, needs, tried), Admission):
            high = middle
        else:
            low = middle + 1
    return low


def _require_held(manager: Manager, room: Room, evictable: Sequence[int]) -> None:
    rows = zip(manager.quotas, room.held, evictable, strict=True)
    over = [quota.group for quota, held, count in rows if not 0 <= count <= held]
    if over:
        raise errors.InvalidId(
            errors.say(
                f"evictable vpages {tuple(evictable)} where {room.held} are held",
                f"cached vpages count as held, of {', '.join(over)} too",
                "Count what only the cache holds, once",
            )
        )
