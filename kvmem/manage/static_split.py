"""The static split: every group has a fixed fraction of the bytes, and only that.

Equal fractions unless a person gives others. What a group does not use, no other may
take: simple to reason about, and up to half of the memory idle when one of two groups
is a short window (experiments/manager_choice.py).

    static_split(members, 40 << 30)                  # each group 40 GiB / G
    static_split(members, 40 << 30, shares=(3, 1))
"""

import fractions
import itertools
from collections.abc import Sequence

from kvmem import errors
from kvmem.budget.members import Member
from kvmem.manage import demand
from kvmem.manage.manager import Manager, Quota, assemble, key_of, require_members

__all__ = ["NAME", "static_split"]

NAME = "static_split"


def static_split(
    members: Sequence[Member],
    nbytes: int,
    *,
    shares: Sequence[float] | None = None,
    floors: Sequence[int] | None = None,
    max_pages: int | None = None,
    followers: Sequence[int] | None = None,
) -> Manager:
    """Return quotas of fixed fractions.

    Args:
        members: the groups, target and draft.
        nbytes: what all pools may take on a rank.
        shares: weights, one a group; equal ones if None.
        floors: vpages that each group must get; at least one.
        max_pages: a cap on the pages of every pool, which its groups divide as bytes.
        followers: bytes outside the pools that follow each vpage of a group (a draft's
            pages behind the target's ids) and are paid out of its fraction; none if
            None.

    Raises:
        OutOfPages: a fraction holds less than its group's floor.
        ConfigError: no groups, or shares of another number.
    """
    require_members(members)
    given = (1,) * len(members) if shares is None else shares
    weights = demand.shares(members, given=given)
    parts = _cut(nbytes, given)
    behind = followers if followers is not None else (0,) * len(members)
    prices = [m.nbytes + more for m, more in zip(members, behind, strict=True)]
    counts = [part // price for part, price in zip(parts, prices, strict=True)]
    if max_pages is not None:
        counts = _capped(members, counts, given, max_pages)
    wanted = floors if floors is not None else (1,) * len(members)
    _require_floors(members, parts, counts, prices, wanted, max_pages)
    quotas, pages = [], [0] * (1 + max(member.pool for member in members))
    for member, count, weight in zip(members, counts, weights, strict=True):
        key, extents = key_of(member.group), member.extents
        quotas.append(Quota(key, member.pool, extents, count, weight, count))
        pages[member.pool] += count * extents
    return assemble(NAME, members, quotas, pages)


def _capped(
    members: Sequence[Member],
    counts: Sequence[int],
    weights: Sequence[float],
    max_pages: int,
) -> list[int]:
    """Return vpages that keep every pool within `max_pages`, cut by weight as bytes."""
    found = list(counts)
    for pool in {member.pool for member in members}:
        inside = [i for i, member in enumerate(members) if member.pool == pool]
        if sum(counts[i] * members[i].extents for i in inside) <= max_pages:
            continue
        parts = _cut(max_pages, [weights[i] for i in inside])
        for i, part in zip(inside, parts, strict=True):
            found[i] = min(counts[i], part // members[i].extents)
    return found


def _cut(nbytes: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut bytes by weight; the parts add up to the whole, exactly."""
    exact = [fractions.Fraction(weight) for weight in weights]
    ends = [int(nbytes * end / sum(exact)) for end in itertools.accumulate(exact)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def _require_floors(
    members: Sequence[Member],
    parts: Sequence[int],
    counts: Sequence[int],
    prices: Sequence[int],
    wanted: Sequence[int],
    max_pages: int | None,
) -> None:
    rows = zip(members, parts, counts, prices, wanted, strict=True)
    low = [
        f"{key_of(member.group)} gets {part:,} B, {count} pages of {price:,} B, "
        f"and needs {floor}"
        for member, part, count, price, floor in rows
        if count < floor
    ]
    capped = "" if max_pages is None else f", each pool of at most {max_pages:,} pages"
    if low:
        raise errors.OutOfPages(
            errors.say(
                f"{sum(parts):,} B in fixed fractions{capped}",
                "; ".join(low),
                "Give more bytes or pages, other shares, or manager='grouped'",
            )
        )
