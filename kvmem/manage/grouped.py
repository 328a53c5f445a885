"""The grouped manager: pages follow what each lifecycle needs.

Groups whose pages are of one size draw from one free list, and any of them may take all
of it but the floors of the others: no ratio has to be right. Pools of different pages
divide the bytes by the need of a typical batch, and are sized anew when the sequences
that really come are of other lengths (rebalance.py).

    grouped(members, 40 << 30, typical=Batch((Row(8_191, 8_192),) * 8))
"""

from collections.abc import Sequence

from kvmem.budget.members import Member
from kvmem.manage import demand, sizing
from kvmem.manage.demand import Batch
from kvmem.manage.manager import Manager, Quota, assemble, key_of, require_members

__all__ = ["NAME", "grouped"]

NAME = "grouped"


def grouped(
    members: Sequence[Member],
    nbytes: int,
    *,
    shares: Sequence[float] | None = None,
    typical: Batch | None = None,
    constraints: Sequence[Batch] = (),
    floors: Sequence[int] | None = None,
    grain_nbytes: int = 1,
) -> Manager:
    """Return quotas by lifecycle need.

    Args:
        members: the groups in their pools, target and draft.
        nbytes: what all pools may take on a rank.
        shares: weights that a person set, one a group.
        typical: a batch as it usually runs; gives the weights if no person did.
        constraints: batches that must always fit.
        floors: vpages kept for each group, where `constraints` say less.
        grain_nbytes: what each pool takes is a multiple of this: 1 for arrays of any
            length, `sizing.device_grain(nbytes)` where memory comes in grains.

    Raises:
        OutOfPages: the floors do not fit.
        ConfigError: no groups, or shares or floors of another number.
    """
    require_members(members)
    kept = demand.floors(members, constraints)
    if floors is not None:
        kept = tuple(max(pair) for pair in zip(kept, floors, strict=True))
    weights = demand.shares(
        members,
        given=shares,
        typical=typical,
        constraints=constraints,
        grain_nbytes=grain_nbytes,
    )
    rows = tuple(zip(members, weights, kept, strict=True))
    parts = [
        _part([row for row in rows if row[0].pool == pool])
        for pool in sorted({member.pool for member in members})
    ]
    pages = sizing.split(nbytes, parts, grain_nbytes)
    quotas = [
        Quota(
            key_of(member.group),
            member.pool,
            member.extents,
            floor,
            weight,
            pages[member.pool] // member.extents,
        )
        for member, weight, floor in rows
    ]
    return assemble(NAME, members, quotas, pages)


def _part(rows: Sequence[tuple[Member, float, int]]) -> sizing.Part:
    """Return one pool's part in the division: its groups' weights and floors added."""
    return sizing.Part(
        (rows[0][0].page_nbytes,),
        sum(weight for _, weight, _ in rows),
        sum(floor * member.extents for member, _, floor in rows),
        " + ".join(key_of(member.group) for member, _, _ in rows),
    )
