"""The table [pool]: how pages are made, and every cap on what they take.

PoolConfig(page_size=16, memory="2GiB").limits(Topology(tp=2), weight_nbytes=0)
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from kvmem import budget, errors, geometry, settings
from kvmem.budget import Limit
from kvmem.geometry import Topology
from kvmem.manage import Knobs
from kvmem.settings import Nbytes

__all__ = ["PoolConfig"]


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """How pages are made, and what the pools of one rank may take.

    Several limits may stand together: the smallest wins, and the plan names it.

    Args:
        page_size: tokens of a page.
        order: page order, a name or axes outermost first.
        kind: "unified": one pool for every kind of state; "split": one for each size
            of page.
        manager: "grouped" (every group may have any page of its pool), "static_split"
            (fixed fractions) or "auto"; None: as the model prefers.
        shares: fractions of a static split, a weight a group; (): equal ones.
        window_ratio: rows of window layers a row of full attention; None: as many as
            serve.max_batch sequences of serve.max_length read.
        memory: bytes that the pools may take on each rank.
        memory_by_rank: the same where ranks differ, one figure a rank; the least
            decides.
        memory_total: bytes for all ranks together.
        device_memory: bytes of one rank's device, weights included.
        reserve: bytes of device_memory that are kept for other things.
        fraction: share that pools may take of what weights and reserve leave.
        machine_memory: bytes of the one machine that all ranks share; what the
            smallest limit asks for, once a rank, must fit (of device_memory with the
            weights and the reserve).
        pages: a cap in pages, of every pool.
        poison: fill fresh pools with NaN bytes.
        checked: check every law of the books after every step.
        certified: prove at start that pages become the canonical records they should.
        rebalance: when the shares of a grouped pool follow the texts that came.
    """

    page_size: int = 16
    order: str = "head_major"
    kind: Literal["unified", "split"] = "unified"
    manager: Literal["auto", "grouped", "static_split"] | None = None
    shares: tuple[float, ...] = ()
    window_ratio: float | None = None
    memory: Nbytes | None = None
    memory_by_rank: tuple[Nbytes, ...] = ()
    memory_total: Nbytes | None = None
    device_memory: Nbytes | None = None
    reserve: Nbytes = Nbytes(0)
    fraction: float = 1.0
    machine_memory: Nbytes | None = None
    pages: int | None = None
    poison: bool = False
    checked: bool = False
    certified: bool = False
    rebalance: Knobs = dataclasses.field(default_factory=Knobs)

    def __post_init__(self):
        settings.settle(self)
        geometry.envelope.parse_order(self.order)
        settings.require_positive(page_size=self.page_size, pages=self.pages)
        idle = []
        if self.device_memory is None:
            idle += ["reserve"] * bool(self.reserve)
            idle += ["fraction"] * (self.fraction != 1.0)
        taken = self.memory, self.memory_total, self.device_memory
        if not self.memory_by_rank and all(each is None for each in taken):
            idle += ["machine_memory"] * (self.machine_memory is not None)
        if idle:
            raise errors.ConfigError(
                errors.say(
                    f"{', '.join(idle)} alone",
                    "reserve and fraction are of device_memory, and machine_memory "
                    "is shared by ranks that take bytes of it",
                    "Give device_memory too, or for machine_memory one of memory, "
                    "memory_by_rank, memory_total and device_memory",
                )
            )

    def limits(
        self, topology: Topology, weight_nbytes: int | None
    ) -> tuple[Limit, ...]:
        """Return every cap on the bytes of one rank's pools, () when none is set.

        Args:
            topology: the ranks that share the cache.
            weight_nbytes: bytes of one rank's weights; None: not known.

        Raises:
            ConfigError: device_memory for weights whose size is not known.
            IncompatiblePlan: all ranks together ask for more than their machine has.
            OutOfPages: the weights leave nothing of the device.
        """
        limits = []
        if self.memory is not None:
            limits.append(budget.limit("memory", self.memory))
        if self.memory_by_rank:
            limits += budget.uneven_limits(
                "memory_by_rank", self.memory_by_rank, topology
            )
        if self.memory_total is not None:
            limits.append(
                budget.total_limit("memory_total", self.memory_total, topology)
            )
        if self.device_memory is not None:
            if weight_nbytes is None:
                raise errors.ConfigError(
                    errors.say(
                        f"pool.device_memory = {self.device_memory:,} B",
                        "what a device leaves is less its weights, and of this model "
                        "only the cache is known",
                        "Give pool.memory: what pools may take on each rank",
                    )
                )
            limits += self._device_limits(self.device_memory, weight_nbytes)
        if self.machine_memory is not None:
            self._require_machine(limits, topology, weight_nbytes, self.machine_memory)
        return tuple(limits)

    def _require_machine(
        self,
        limits: Sequence[Limit],
        topology: Topology,
        weight_nbytes: int | None,
        machine_nbytes: int,
    ) -> None:
        """Refuse the smallest limit if the machine has less than that for each rank."""
        least = min(limits, key=lambda each: each.nbytes)
        beside = 0
        if least.name in ("device_memory", "fraction"):
            beside = weight_nbytes + self.reserve
        budget.rank_limit(least.name, least.nbytes + beside, topology, machine_nbytes)

    def _device_limits(self, nbytes: int, weight_nbytes: int) -> list[Limit]:
        """Return what a device leaves, and the share of it if one is set."""
        left = budget.device_limit("device_memory", nbytes, weight_nbytes, self.reserve)
        if self.fraction == 1.0:
            return [left]
        return [left, budget.fraction_limit("fraction", left.nbytes, self.fraction)]
