"""Claims: what several owners ask of one memory, and whether all of it fits.

The law: the claims on one memory together take at most the whole. A plan that would
start and fail under load is refused before anything is allocated, with every figure and
with what each owner can give up.

    require_room("device", 1 << 30, [
        Claim("pools", "target", 600 << 20, "fewer pages"),
        Claim("verify workspace", "draft", 576 << 20, "fewer sequences at once"),
    ])      # IncompatiblePlan: 1,233,125,376 B of 1,073,741,824 B
"""

import dataclasses
from collections.abc import Sequence

from kvmem import errors
from kvmem.budget.pages import Budget
from kvmem.geometry import Term, Topology

__all__ = ["Claim", "host_term", "require_room"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """Bytes that one owner asks for, and how it would ask for fewer.

    `gives` is empty where a claim cannot shrink.
    """

    name: str
    owner: str
    nbytes: int
    gives: str = ""


def require_room(name: str, nbytes: int, claims: Sequence[Claim]) -> int:
    """Return the bytes of `name` that the claims leave.

    Raises:
        IncompatiblePlan: the claims take more than there is; names each with its bytes
            and those that can shrink.
    """
    asked = sum(claim.nbytes for claim in claims)
    if asked <= nbytes:
        return nbytes - asked
    listed = " + ".join(f"{c.nbytes:,} B of {c.name} ({c.owner})" for c in claims)
    cures = [f"{c.name} can shrink: {c.gives}" for c in claims if c.gives]
    raise errors.IncompatiblePlan(
        errors.say(
            listed,
            f"together {asked:,} > {nbytes:,} B of {name}, {asked - nbytes:,} B too "
            "many",
            "; ".join(cures) or "Use a larger memory",
        )
    )


def host_term(
    nbytes: int,
    topology: Topology,
    solved: Budget,
    machine_nbytes: int | None = None,
) -> Term:
    """Return each rank's part of a host tier that all ranks share.

    Args:
        nbytes: of the tier, once for all ranks.
        topology: the ranks.
        solved: their pools.
        machine_nbytes: memory of the machine that holds pools and tier, if declared.

    Raises:
        IncompatiblePlan: pools and tier together ask for more than the machine has.
    """
    if machine_nbytes is not None:
        asked = _on_machine(solved, topology)
        most = machine_nbytes - sum(claim.nbytes for claim in asked)
        gives = f"at most {max(0, most):,} B"
        tier = Claim("host tier", "store", nbytes, gives)
        require_room("this machine's memory", machine_nbytes, [*asked, tier])
    ranks = topology.ranks
    return Term("host tier", "store", 0, fixed_bytes=-(-nbytes // ranks))


def _on_machine(solved: Budget, topology: Topology) -> list[Claim]:
    """Return what the pools of all ranks claim of the one machine that holds them."""
    ranks, draft = topology.ranks, solved.draft_pages * solved.draft_page_nbytes
    rows = [
        ("pools", "target", sum(pool.nbytes for pool in solved.pools), "fewer pages"),
        ("draft pools", "draft", draft, "fewer pages"),
        ("workspaces", "engine", solved.fixed_nbytes, ""),
    ]
    return [
        Claim(
            name if ranks == 1 else f"{name}, {nbytes:,} x {ranks}",
            owner,
            nbytes * ranks,
            gives,
        )
        for name, owner, nbytes, gives in rows
        if nbytes
    ]
