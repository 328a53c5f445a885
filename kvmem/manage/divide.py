"""Dividing: a solved budget whose groups have the quotas of a manager.

A budget sizes pools by what lifecycles need, and lets every group have every page of
its pool: that is the grouped manager. Under a static split a group has as many virtual
ids as its quota has pages, so that an engine built from the divided budget keeps the
quotas by itself: ids that do not exist cannot be handed out.

The law: the limits of a budget are those of its division. No pool has more pages than
the cap in pages, a draft has pages for exactly the ids of the group that it follows,
paid out of that group's fraction, and the claims are what the divided pools take.

    members = members_of(groups, topology, order, solved.kind)
    divide(solved, members, "static_split").pools[0].num_vpages     # (27306, 27306)
"""

import dataclasses
from collections.abc import Sequence

from kvmem import errors
from kvmem.budget import Budget, GroupPages
from kvmem.budget.checks import require_ids
from kvmem.budget.members import Member
from kvmem.budget.rows import primary
from kvmem.geometry import Term
from kvmem.manage.grouped import NAME as GROUPED
from kvmem.manage.manager import Manager
from kvmem.manage.static_split import NAME as STATIC_SPLIT
from kvmem.manage.static_split import static_split

__all__ = ["divide"]


def divide(
    solved: Budget,
    members: Sequence[Member],
    name: str,
    shares: Sequence[float] | None = None,
) -> Budget:
    """Return the budget with its pools divided by a manager.

    Args:
        solved: as `budget.solve` gives it.
        members: its groups in its pools.
        name: of the manager; "grouped" changes nothing, nor any for a single group.
        shares: fractions of a static split, equal ones if None.

    Raises:
        OutOfPages: a fraction holds no page of its group.
        IncompatiblePlan: a fraction of more pages than ids can tell apart.
        ConfigError: an unknown manager, shares for one that needs none, or members of
            another budget.
    """
    _require_match(solved, members, name, shares)
    if name == GROUPED or len(members) == 1:
        return solved
    lead = primary([member.group for member in members])
    copies = solved.draft_pages // solved.pools[members[lead].pool].pages
    followers = [0] * len(members)
    followers[lead] = copies * solved.draft_page_nbytes
    manager = static_split(
        members,
        solved.used_nbytes - solved.fixed_nbytes,
        shares=shares,
        max_pages=solved.max_pages,
        followers=followers,
    )
    draft_pages = copies * manager.quotas[lead].pages
    require_ids(manager.pools, members[lead].group.page_size, draft_pages)
    return dataclasses.replace(
        solved,
        pools=manager.pools,
        groups=_counted(solved, manager),
        terms=_claims(solved, members, manager, lead),
        draft_pages=draft_pages,
        split_tokens=None,  # of a plan that nobody divided
    )


def _claims(
    solved: Budget, members: Sequence[Member], manager: Manager, lead: int
) -> tuple[Term, ...]:
    """Return the claims of the quotas: a wall is owed whole, whatever the tokens.

    Rows are still counted by the group that leads, and a draft follows them.
    """
    found, terms = [], iter(solved.terms)
    for at, (member, quota) in enumerate(zip(members, manager.quotas, strict=True)):
        for nbytes in filter(None, (member.payload_nbytes, member.padding_nbytes)):
            term = next(terms)
            if at != lead:
                owed = nbytes * quota.pages
                term = dataclasses.replace(term, bytes_per_token=0, fixed_bytes=owed)
            found.append(term)
    return (*found, *terms)


def _counted(solved: Budget, manager: Manager) -> tuple[GroupPages, ...]:
    """Return what the plan counts with, now that a quota is a wall."""
    found = []
    for group, quota in zip(solved.groups, manager.quotas, strict=True):
        per_page = group.tokens // group.pages
        pages = quota.pages
        found.append(dataclasses.replace(group, pages=pages, tokens=pages * per_page))
    return tuple(found)


def _require_match(
    solved: Budget,
    members: Sequence[Member],
    name: str,
    shares: Sequence[float] | None,
) -> None:
    mine = [(m.group.domain, m.group.name, m.page_nbytes, m.pool) for m in members]
    theirs = [(g.domain, g.name, g.page_nbytes, g.pool) for g in solved.groups]
    if name not in (GROUPED, STATIC_SPLIT) or mine != theirs:
        raise errors.ConfigError(
            errors.say(
                f"manager {name!r} for groups {mine} of a budget for {theirs}",
                "a manager divides the pools of the groups that the budget was solved "
                "for",
                f"Use {GROUPED!r} or {STATIC_SPLIT!r}, and the members of the budget",
            )
        )
    if shares is not None and (name == GROUPED or len(members) == 1):
        raise errors.ConfigError(
            errors.say(
                f"shares {tuple(shares)} for {len(members)} groups of {name!r}",
                "one group has everything, and groups that share one free list have no "
                "fixed shares",
                f"Leave them out, or use {STATIC_SPLIT!r} for several groups",
            )
        )
