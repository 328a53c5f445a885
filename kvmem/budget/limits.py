"""Limits: caps on the bytes of one rank, and how each came about.

The law: a limit is bytes of one rank. A figure for all ranks is divided, a figure for
each of them is multiplied and compared with the machine; of several limits the smallest
wins, and where ranks differ it names the rank.

    total_limit("memory_total", 50 << 30, Topology(tp=4)).nbytes     # 13,421,772,800
    uneven_limits("memory", [3 << 30, 24 << 30])[0].reason           # "rank 0 of 2"
"""

import dataclasses
from collections.abc import Sequence

from kvmem import errors
from kvmem.geometry import Topology

__all__ = [
    "Limit",
    "device_limit",
    "fraction_limit",
    "limit",
    "rank_limit",
    "total_limit",
    "uneven_limits",
]


@dataclasses.dataclass(frozen=True)
class Limit:
    """A cap on what the pools of one rank may take, and how it came about.

    `rank` is the one rank that it is of, None when it is every rank's.
    """

    name: str
    nbytes: int
    reason: str
    rank: int | None = None


def limit(name: str, nbytes: int, reason: str = "as given, for each rank") -> Limit:
    """Return a cap of `nbytes` on each rank."""
    return Limit(name, nbytes, reason)


def total_limit(name: str, nbytes: int, topology: Topology) -> Limit:
    """Return the cap of each rank when `nbytes` is for all ranks together."""
    ranks = topology.ranks
    return Limit(name, nbytes // ranks, f"{nbytes:,} B in all, over {ranks} ranks")


def rank_limit(
    name: str, nbytes: int, topology: Topology, machine_nbytes: int
) -> Limit:
    """Return a cap for each rank, where all ranks share one machine.

    Raises:
        IncompatiblePlan: all ranks together ask for more than the machine has.
    """
    ranks, asked = topology.ranks, nbytes * topology.ranks
    if asked > machine_nbytes:
        raise errors.IncompatiblePlan(
            errors.say(
                f"{nbytes:,} B for each of {ranks} ranks",
                f"{nbytes:,} x {ranks} = {asked:,} B is more than the "
                f"{machine_nbytes:,} B of this machine",
                f"Give at most {machine_nbytes // ranks:,} B a rank, or a figure for "
                f"all of them of at most {machine_nbytes:,} B",
            )
        )
    return Limit(name, nbytes, f"for each of {ranks} ranks, {asked:,} B in all")


def uneven_limits(
    name: str, nbytes: Sequence[int], topology: Topology
) -> tuple[Limit, ...]:
    """Return one cap a rank, where devices differ; every rank gets the least of them.

    Args:
        name: of the limits.
        nbytes: bytes of each rank, in the order of ranks.
        topology: the ranks.

    Raises:
        ConfigError: more or fewer figures than ranks.
    """
    ranks = topology.ranks
    if len(nbytes) != ranks:
        raise errors.ConfigError(
            errors.say(
                f"{name} with {len(nbytes)} figures for {ranks} ranks",
                "each rank has one",
                f"Give {ranks} numbers of bytes, in the order of ranks",
            )
        )
    return tuple(
        Limit(name, each, f"of rank {rank} among {ranks}", rank)
        for rank, each in enumerate(nbytes)
    )


def fraction_limit(name: str, free_nbytes: int, fraction: float) -> Limit:
    """Return the cap of a fraction of the bytes that are free.

    Raises:
        ConfigError: a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise errors.ConfigError(
            errors.say(
                f"{name} = {fraction}",
                "a fraction of the free bytes lies in (0, 1]",
                "Give for example 0.9",
            )
        )
    return Limit(
        name, int(free_nbytes * fraction), f"{fraction} of {free_nbytes:,} B free"
    )


def device_limit(
    name: str, device_nbytes: int, weight_nbytes: int, reserve_nbytes: int
) -> Limit:
    """Return what a device has left for pools after this rank's weights and a reserve.

    Raises:
        OutOfPages: nothing is left.
    """
    left = device_nbytes - weight_nbytes - reserve_nbytes
    reason = (
        f"{device_nbytes:,} B less {weight_nbytes:,} B of weights "
        f"less {reserve_nbytes:,} B reserved"
    )
    if left <= 0:
        raise errors.OutOfPages(
            errors.say(
                f"{name} of {device_nbytes:,} B",
                f"{reason} leaves {left:,} B for pages",
                "Use a larger device, a larger TP, or a smaller reserve",
            )
        )
    return Limit(name, left, reason)
