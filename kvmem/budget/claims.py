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
    ranks, pools = topology.ranks, solved.used_nbytes * topology.ranks
    if machine_nbytes is not None and pools + nbytes > machine_nbytes:
        raise errors.IncompatiblePlan(
            errors.say(
                f"a host tier of {nbytes:,} B for {ranks} ranks together",
                f"with pools of {solved.used_nbytes:,} x {ranks} = {pools:,} B that is "
                f"{pools + nbytes:,} B, more than the {machine_nbytes:,} B of this "
                "machine",
                f"Give the tier at most {max(0, machine_nbytes - pools):,} B, or the "
                "pools less",
            )
        )
    return Term("host tier", "store", 0, fixed_bytes=-(-nbytes // ranks))
