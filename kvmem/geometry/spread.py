"""Spread: which rank keeps a token of a sequence, and at which slot.

Full attention of the target is spread over the dcp ranks, in runs of `interleave`
neighbouring tokens: run n lies on rank n % dcp. What every rank needs whole is not:
windows, recurrent states and whatever belongs to a draft, whose slot is the position.
The laws: each position has one owner, who keeps it at the next free slot, so local
slots have no holes; the runs divide the page, so that a page of one rank holds whole
runs; and a page id means the same tokens on every rank.

    Spread(dcp=4, interleave=4).local_lengths(37)         # (12, 9, 8, 8)
    Spread.of(window_group, Topology(dcp=4)).is_whole     # True

A virtual page covers `page_size * dcp` tokens in every group. Of a spread group it is
one physical page id, with `page_size` slots on each rank; of a paged group that is kept
whole it is dcp physical pages of `page_size` tokens each, equal on all ranks.
"""

import dataclasses

from kvmem import errors
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.topology import Topology

__all__ = ["Spread"]


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the tokens of one group lie on the ranks of one head shard.

    Args:
        dcp: ranks among which a sequence lies.
        interleave: neighbouring tokens that stay on one of them.
        is_whole: every one of them keeps all the tokens.

    The methods take integers or arrays of them, on the host or on a device.
    """

    dcp: int = 1
    interleave: int = 1
    is_whole: bool = False

    @classmethod
    def of(cls, group: LifecycleGroup, topology: Topology) -> "Spread":
        """Return how a group is spread on a topology.

        Raises:
            IncompatiblePlan: an interleave that does not divide the pages of a group
                that is spread.
        """
        width, size = topology.interleave, group.page_size
        if topology.dcp == 1:
            return cls()
        if group.is_replicated:
            return cls(topology.dcp, is_whole=True)
        if size % width:
            allowed = [d for d in range(1, size + 1) if size % d == 0]
            raise errors.IncompatiblePlan(
                errors.say(
                    f"interleave {width} on pages of {size} slots, DCP {topology.dcp}",
                    "the tokens of a page lie whole on its ranks, so the interleave "
                    "divides the page",
                    f"Use interleave {', '.join(map(str, allowed))}",
                )
            )
        return cls(topology.dcp, width)

    @property
    def shards(self) -> int:
        """Parts that a sequence is cut into: 1 where every rank keeps all of it."""
        return 1 if self.is_whole else self.dcp

    def owner(self, position):
        """Return which of the shards keeps a position."""
        return position // self.interleave % self.shards

    def slot(self, position):
        """Return the local slot of a position, counted from the sequence's first."""
        if self.shards == 1:
            return position
        run, width = self.shards * self.interleave, self.interleave
        return position // run * width + position % width

    def position(self, slot, shard):
        """Return the position that local slot `slot` of a shard keeps."""
        if self.shards == 1:
            return slot
        width = self.interleave
        return (slot // width * self.shards + shard) * width + slot % width

    def local_lengths(self, length: int) -> tuple[int, ...]:
        """Return how many of the first `length` tokens each shard keeps."""
        width = self.interleave
        whole, rest = divmod(length, self.shards * width)
        return tuple(
            whole * width + min(max(rest - shard * width, 0), width)
            for shard in range(self.shards)
        )

    def virtual(self, group: LifecycleGroup) -> LifecycleGroup:
        """Return the group as tables count it: `page_size` tokens a virtual page."""
        return dataclasses.replace(group, page_size=group.page_size * self.dcp)

    def parts(self, group: LifecycleGroup) -> int:
        """Return the runs of `page_size` tokens that are physical pages of their own.

        They are parts of one virtual page, beside what an envelope is cut into.
        """
        return self.dcp if self.is_whole and not group.is_state else 1
