"""Topology: how many ranks share the cache, and which heads each of them holds.

`tp` counts head shards and `dcp` token shards; a rank is tp_index * dcp + dcp_index.
The law: every head has at least one holder, every holder of a head keeps equal bytes,
and a size that would leave a head without a whole owner is refused with the sizes that
work.

    Topology(tp=9).shard(field_of_3_heads, rank=4)    # HeadShard(start=1, count=1)

The device mesh stays at the edge: this is arithmetic on integers.
"""

import dataclasses
from typing import NamedTuple

from kvmem import errors
from kvmem.geometry.fields import Field

__all__ = ["HeadShard", "Topology"]


class HeadShard(NamedTuple):
    """The global heads [start, start + count) that one rank holds."""

    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class Topology:
    """Ranks of one engine: `tp` head shards times `dcp` token shards.

    Args:
        tp: head shards.
        dcp: token shards.
        interleave: neighbouring tokens that stay on one token shard.
    """

    tp: int = 1
    dcp: int = 1
    interleave: int = 1

    def __post_init__(self):
        for name in ("tp", "dcp", "interleave"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise errors.ConfigError(
                    errors.say(
                        f"topology.{name} = {value!r}",
                        "ranks are counted from one",
                        f"Give {name} an integer >= 1",
                    )
                )

    @classmethod
    def nested(
        cls, tp: int, dcp: int = 1, interleave: int = 1, pp: int = 1, pcp: int = 1
    ) -> "Topology":
        """Return the topology of an engine that counts token shards inside its TP.

        "TP 8, DCP 2" there is `Topology(4, 2)`; rank numbers are equal. The ranks of
        another prefill-context replica (pcp) hold equal bytes: this is the topology of
        any one of them.

        Raises:
            IncompatiblePlan: pipeline stages, or a DCP that does not divide the TP.
        """
        if pp != 1:
            raise errors.IncompatiblePlan(
                errors.say(
                    f"{pp} pipeline stages",
                    "a record holds every layer, and a stage holds some",
                    "Use one stage, or a model of each stage's layers",
                )
            )
        if min(tp, dcp, pcp) < 1 or tp % dcp:
            raise errors.IncompatiblePlan(
                errors.say(
                    f"TP {tp} with DCP {dcp} inside and {pcp} replicas",
                    "token shards are counted inside TP, so DCP divides it",
                    "Give a DCP that divides TP, or make Topology(tp, dcp) directly",
                )
            )
        return cls(tp // dcp, dcp, interleave)

    @property
    def ranks(self) -> int:
        """Ranks in all, tp * dcp."""
        return self.tp * self.dcp

    def tp_index(self, rank: int) -> int:
        """Return the head shard of `rank`."""
        return rank // self.dcp

    def dcp_index(self, rank: int) -> int:
        """Return the token shard of `rank`."""
        return rank % self.dcp

    def replicas(self, field: Field) -> int:
        """Return how many head shards hold each row of `field`."""
        self.require(field)
        if field.heads == 0:
            return self.tp
        return max(1, self.tp // field.heads)

    def shard(self, field: Field, rank: int) -> HeadShard:
        """Return the global heads of `field` that `rank` holds."""
        self.require(field)
        if field.heads == 0:
            return HeadShard(0, 1)
        if self.tp <= field.heads:
            count = field.heads // self.tp
            return HeadShard(self.tp_index(rank) * count, count)
        return HeadShard(self.tp_index(rank) // self.replicas(field), 1)

    def holders(self, field: Field, head: int) -> tuple[int, ...]:
        """Return the ranks that hold `head`, ascending, in every token shard."""
        return tuple(
            rank
            for rank in range(self.ranks)
            if head - self.shard(field, rank).start
            in range(self.shard(field, rank).count)
        )

    def require(self, field: Field) -> None:
        """Refuse a field whose heads this topology cannot divide or replicate."""
        heads = field.heads
        if heads == 0 or heads % self.tp == 0 or self.tp % heads == 0:
            return
        divisors = [d for d in range(1, heads + 1) if heads % d == 0]
        raise errors.IncompatiblePlan(
            errors.say(
                f"{heads} KV heads of layer {field.layer!r} on TP {self.tp}",
                "a head lies whole on its ranks, so TP divides the heads or is a "
                "multiple of them",
                f"Use TP {', '.join(map(str, divisors))} or a multiple of {heads}",
            )
        )
