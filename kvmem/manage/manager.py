"""The manager: what each lifecycle group may take of the pages that all share.

A `Member` is a lifecycle group with what one page of it takes in a pool; a `Quota` is
what a manager grants it; a `Manager` is the quotas and the pools they draw from, target
and draft together. Members whose pages are of one size draw from one free list: a page
that a window leaves behind is one that full attention may take.

The law: the pools of a manager never take more bytes than it was given, and a group
never holds more pages than its quota. How quotas are chosen is the business of
`grouped` and `static_split`; what follows from them is the same for both.

    manager = grouped(members, nbytes)
    manager.quotas[0].pages        # the most that group 0 may hold at once
    need(members, [2_049, 512])    # pages of each group for two sequences

G groups, in the order of the members; counts "in vpages" are a group's own pages, of
`extents` physical pages each.
"""

import dataclasses
from collections.abc import Sequence

from kvmem import errors
from kvmem.geometry import Envelope, LifecycleGroup

__all__ = ["Manager", "Member", "PoolPages", "Quota", "members_of", "merge", "need"]
__all__ += ["peak"]


@dataclasses.dataclass(frozen=True)
class Member:
    """A lifecycle group and what one vpage of it takes on a rank.

    Args:
        group: whose pages they are.
        page_nbytes: bytes of a physical page of the pool it draws from.
        extents: physical pages that one vpage takes.
    """

    group: LifecycleGroup
    page_nbytes: int
    extents: int = 1

    def __post_init__(self):
        if self.page_nbytes < 1 or self.extents < 1:
            raise errors.ConfigError(
                errors.say(
                    f"pages of {self.page_nbytes} B, {self.extents} a vpage",
                    "a vpage takes at least one page, of at least one byte",
                    "Build the group's envelope first, then its member",
                )
            )

    @property
    def key(self) -> str:
        """What the group is called in a manager: "target/full", "draft/window128"."""
        return f"{self.group.domain}/{self.group.name}"

    @property
    def vpage_nbytes(self) -> int:
        """Bytes that one vpage takes on a rank."""
        return self.page_nbytes * self.extents


@dataclasses.dataclass(frozen=True)
class PoolPages:
    """One free list: physical pages of one size."""

    page_nbytes: int
    pages: int


@dataclasses.dataclass(frozen=True)
class Quota:
    """What one group is granted.

    Args:
        group: its key, "domain/name".
        pool: index of the free list it draws from.
        extents: physical pages that one vpage takes.
        floor: vpages that no other group may take from it, held or not.
        share: of the bytes, as they were divided.
        pages: vpages it may hold at most.
    """

    group: str
    pool: int
    extents: int
    floor: int
    share: float
    pages: int


@dataclasses.dataclass(frozen=True)
class Manager:
    """Quotas of every group, target and draft, and the pools they draw from."""

    name: str
    quotas: tuple[Quota, ...]
    pools: tuple[PoolPages, ...]

    @property
    def nbytes(self) -> int:
        """What all its pools take on a rank."""
        return sum(pool.pages * pool.page_nbytes for pool in self.pools)

    def index(self, group: str) -> int:
        """Return the place of a group by its key.

        Raises:
            InvalidId: no quota is of that group.
        """
        keys = [quota.group for quota in self.quotas]
        if group not in keys:
            raise errors.InvalidId(
                errors.say(
                    f"the quota of {group!r}",
                    "the manager has no such group",
                    f"Use one of {', '.join(keys)}",
                )
            )
        return keys.index(group)

    def objections(self) -> tuple[str, ...]:
        """Return the laws of the quotas that do not hold, in words."""
        found = []
        for index, pool in enumerate(self.pools):
            mine = [quota for quota in self.quotas if quota.pool == index]
            floors = sum(quota.floor * quota.extents for quota in mine)
            if floors > pool.pages:
                found.append(f"pool {index}: floors of {floors} in {pool.pages} pages")
            found += [
                f"{quota.group}: {quota.pages} vpages of {quota.extents} in pool "
                f"{index} of {pool.pages} pages"
                for quota in mine
                if quota.pages * quota.extents > pool.pages
            ]
        found += [
            f"{quota.group}: a floor of {quota.floor} above its {quota.pages} vpages"
            for quota in self.quotas
            if not 0 <= quota.floor <= quota.pages
        ]
        return tuple(found)


def members_of(
    groups: Sequence[LifecycleGroup], envelopes: Sequence[Envelope]
) -> tuple[Member, ...]:
    """Return the members of a pool whose pages the envelopes describe.

    Envelopes that are cut to the pages of one pool give members of that one pool;
    whole ones give a pool to every size of page.
    """
    return tuple(
        Member(group, built.nbytes // built.extents, built.extents)
        for group, built in zip(groups, envelopes, strict=True)
    )


def merge(members: Sequence[Member]) -> tuple[int, ...]:
    """Return i[G] the pool of each member: one pool for each size of page.

    Raises:
        ConfigError: no member, or two groups of one key.
    """
    keys = [member.key for member in members]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if not members or twice:
        raise errors.ConfigError(
            errors.say(
                f"a manager of {len(members)} groups"
                + f", {', '.join(twice)} more than once" * bool(twice),
                "it has at least one group, and each domain's name once",
                "Pass the groups of group_layers, the draft's with domain='draft'",
            )
        )
    sizes = list(dict.fromkeys(member.page_nbytes for member in members))
    return tuple(sizes.index(member.page_nbytes) for member in members)


def need(members: Sequence[Member], lengths: Sequence[int]) -> tuple[int, ...]:
    """Return i[G] vpages that sequences hold when their last token is written.

    Args:
        members: the groups.
        lengths: tokens of each sequence, the one being written included.
    """
    return tuple(
        sum(_held(member.group, length) for length in lengths) for member in members
    )


def peak(
    members: Sequence[Member], lengths: Sequence[int], step: int = 1
) -> tuple[int, ...]:
    """Return i[G] vpages that sequences hold at most on the way to their lengths.

    A window straddles page boundaries: what it holds swings by a page as it moves, so
    one sample is not what a pool must be sized by.

    Args:
        members: the groups.
        lengths: tokens of each sequence at its end.
        step: tokens that one step writes at most (the chunk of a prefill).
    """
    return tuple(
        sum(
            member.group.lifecycle.peak(length, member.group.page_size, step)
            for length in lengths
        )
        for member in members
    )


def _held(group: LifecycleGroup, length: int) -> int:
    if length < 1:
        return 0
    return group.lifecycle.resident(length, length - 1, group.page_size)
