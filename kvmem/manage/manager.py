"""The manager: what each lifecycle group may take of the pages that all share.

A `Member` is a lifecycle group in its pool; a `Quota` is what a manager grants it; a
`Manager` is the quotas and the pools they draw from, target and draft together. Members
whose pages are of one size draw from one free list: a page that a window leaves behind
is one that full attention may take.

The law: the pools of a manager never take more bytes than it was given, and a group
never holds more pages than its quota. How quotas are chosen is the business of
`grouped` and `static_split`; what follows from them is the same for both.

    members = members_of(groups, topology, "head_major", "unified")
    manager = grouped(members, nbytes)
    manager.quotas[0].pages        # the most that group 0 may hold at once
    need(members, [2_049, 512])    # pages of each group for two sequences

G groups, in the order of the members; counts "in vpages" are a group's own pages, of
`extents` physical pages each.
"""

import dataclasses
from collections.abc import Sequence

from kvmem import errors
from kvmem.budget import PoolPages
from kvmem.budget.members import Member
from kvmem.geometry import LifecycleGroup

__all__ = ["Manager", "Quota", "as_built", "assemble", "key_of", "need", "peak"]
__all__ += ["require_members"]


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
        return sum(pool.nbytes for pool in self.pools)

    @property
    def vpage_nbytes(self) -> tuple[int, ...]:
        """i[G]: what one vpage of each group takes of a rank."""
        return tuple(
            self.pools[quota.pool].page_nbytes * quota.extents for quota in self.quotas
        )

    def due(self, index: int) -> int:
        """Return the vpages that a group's share of all bytes makes, one at least."""
        due_nbytes = int(self.quotas[index].share * self.nbytes)
        return max(1, due_nbytes // self.vpage_nbytes[index])

    def with_shares(self, shares: Sequence[float]) -> "Manager":
        """Return the same quotas with other shares, one a group."""
        quotas = tuple(
            dataclasses.replace(quota, share=share)
            for quota, share in zip(self.quotas, shares, strict=True)
        )
        return dataclasses.replace(self, quotas=quotas)

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


def key_of(group: LifecycleGroup) -> str:
    """Return what a group is called in a manager: "target/full", "draft/window128"."""
    return f"{group.domain}/{group.name}"


def require_members(members: Sequence[Member]) -> None:
    """Refuse groups that are no parts of one plan.

    Raises:
        ConfigError: no member, two groups of one key, or pages of several sizes in one
            pool, as when members of two plans are put together.
    """
    keys = [key_of(member.group) for member in members]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if not keys or twice:
        raise errors.ConfigError(
            errors.say(
                f"a manager of {len(keys)} groups"
                + f", {', '.join(twice)} more than once" * bool(twice),
                "it has at least one group, and each domain's name once",
                "Pass the groups of group_layers, the draft's with domain='draft'",
            )
        )
    sizes = {(member.pool, member.page_nbytes) for member in members}
    if sorted(pool for pool, _ in sizes) != list(range(len(sizes))):
        raise errors.ConfigError(
            errors.say(
                f"pools and pages {sorted(sizes)}",
                "pools are numbered from 0, and the pages of one are of one size",
                "Make the members of target and draft in one call of members_of",
            )
        )


def assemble(
    name: str, members: Sequence[Member], quotas: Sequence[Quota], pages: Sequence[int]
) -> Manager:
    """Return the manager of these quotas, with pools of so many `pages`."""
    pools = []
    for index, count in enumerate(pages):
        inside = tuple(i for i, quota in enumerate(quotas) if quota.pool == index)
        pools.append(
            PoolPages(
                page_nbytes=members[inside[0]].page_nbytes,
                pages=count,
                groups=inside,
                num_vpages=tuple(quotas[i].pages for i in inside),
                extents=tuple(quotas[i].extents for i in inside),
            )
        )
    return Manager(name, tuple(quotas), tuple(pools))


def as_built(name: str, keys: Sequence[str], pool: PoolPages) -> Manager:
    """Return the quotas that a pool keeps by itself: ids that exist, and no more.

    Args:
        name: of the manager that the pool was divided by.
        keys: of its groups.
        pool: the one that all of them draw from.
    """
    rows = zip(keys, pool.num_vpages, pool.extents, strict=True)
    quotas = tuple(
        Quota(key, 0, extents, 0, count * extents / pool.pages, count)
        for key, count, extents in rows
    )
    return Manager(name, quotas, (pool,))


def need(members: Sequence[Member], lengths: Sequence[int]) -> tuple[int, ...]:
    """Return i[G] vpages that sequences hold when their last token is written.

    Args:
        members: the groups.
        lengths: tokens of each sequence, the one being written included.
    """
    return tuple(
        sum(_held(member.virtual, length) for length in lengths) for member in members
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
            member.group.lifecycle.peak(length, member.virtual.page_size, step)
            for length in lengths
        )
        for member in members
    )


def _held(group: LifecycleGroup, length: int) -> int:
    if length < 1:
        return 0
    return group.lifecycle.resident(length, length - 1, group.page_size)
