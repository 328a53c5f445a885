"""Rows of bytes in the host's memory: ordinary, or pinned by the accelerator's driver.

The law: `num_slots` rows of `row_nbytes` are all that a memory ever takes, and the
memory that was asked for is the one in use, or it is refused in words.

    memory = make("pinned_host", num_slots=64, row_nbytes=737_280)
    memory.write(slot, row)
    memory.read([slot], out)             # out u8[1, row_nbytes]
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from kvmem.errors import ConfigError, say

MemoryKind = Literal["pageable", "pinned_host"]


class HostMemory(Protocol):
    """Slots of one row each."""

    kind: MemoryKind

    def write(self, slot: int, row: np.ndarray) -> None:
        """Copy u8[row_nbytes] into a slot."""

    def read(self, slots: Sequence[int], out: np.ndarray) -> None:
        """Copy slots into the rows of `out`, u8[len(slots), row_nbytes]."""

    def free(self, slot: int) -> None:
        """Forget a slot's row."""


def make(kind: MemoryKind, num_slots: int, row_nbytes: int) -> HostMemory:
    """Return `num_slots` rows in the asked kind of memory.

    Raises:
        ConfigError: no such kind, or the backend's device does not have it.
    """
    if kind == "pageable":
        return Pageable(num_slots, row_nbytes)
    if kind == "pinned_host":
        return Pinned()
    raise ConfigError(
        say(
            f"host memory of kind {kind!r}",
            "kinds are pageable and pinned_host",
            "Use one of the two",
        )
    )


class Pageable:
    """One slab of ordinary memory; the system gives pages as they are first written."""

    kind: MemoryKind = "pageable"

    def __init__(self, num_slots: int, row_nbytes: int):
        """Reserve the slab's addresses."""
        self._slab = np.empty((num_slots, row_nbytes), np.uint8)

    def write(self, slot: int, row: np.ndarray) -> None:
        """Copy u8[row_nbytes] into a slot."""
        self._slab[slot] = row

    def read(self, slots: Sequence[int], out: np.ndarray) -> None:
        """Copy slots into the rows of `out`."""
        np.take(self._slab, np.asarray(slots, np.intp), axis=0, out=out, mode="clip")

    def free(self, slot: int) -> None:
        """Nothing to do: the slab stays."""


class Pinned:
    """Rows as jax arrays of memory kind "pinned_host", one a slot."""

    kind: MemoryKind = "pinned_host"

    def __init__(self):
        """Ask the backend's first device for its pinned memory."""
        import jax

        self._jax = jax
        device = jax.local_devices()[0]
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if self.kind not in kinds:
            raise ConfigError(
                say(
                    f"pinned_host memory of {device.device_kind} ({device.platform})",
                    f"its memories are {', '.join(kinds)}",
                    'Use store.host_kind="pageable"',
                )
            )
        self._place = jax.sharding.SingleDeviceSharding(device, memory_kind=self.kind)
        self._rows: dict[int, Any] = {}

    def write(self, slot: int, row: np.ndarray) -> None:
        """Copy u8[row_nbytes] into a slot; the copy is made when this returns."""
        # A CPU backend takes aligned rows as they are, may_alias=False or not.
        placed = self._jax.device_put(row.copy(), self._place)
        self._rows[slot] = placed.block_until_ready()

    def read(self, slots: Sequence[int], out: np.ndarray) -> None:
        """Copy slots into the rows of `out`."""
        for row, slot in zip(out, slots, strict=True):
            row[:] = np.asarray(self._rows[slot])

    def free(self, slot: int) -> None:
        """Give the row's pinned memory back."""
        del self._rows[slot]
