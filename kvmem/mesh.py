"""The mesh: the ranks of a topology on the devices of this process.

The law: every rank has a device of its own, in rank order, on axes ("tp", "dcp"); too
few devices is an error that says how many there are and which setting brings more.

    mesh = make(Topology(tp=4))          # Mesh('tp': 4, 'dcp': 1)
"""

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from kvmem import errors
from kvmem.geometry import Topology

__all__ = ["AXES", "DCP", "TP", "make"]

TP = "tp"  # ranks along it hold different heads
DCP = "dcp"  # ranks along it hold different tokens of the same heads
AXES = (TP, DCP)
_FLAG = "--xla_force_host_platform_device_count"


def make(
    topology: Topology,
    devices: Sequence[jax.Device] | None = None,
    axis_type: AxisType = AxisType.Auto,
) -> Mesh:
    """Return the mesh of a topology: device i is rank i.

    Args:
        topology: the ranks.
        devices: at least as many; None: those that jax sees. Starts jax's backend.
        axis_type: of both axes.

    Raises:
        IncompatiblePlan: fewer devices than ranks.
    """
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) < topology.ranks:
        raise errors.IncompatiblePlan(
            errors.say(
                f"a mesh of tp={topology.tp} dcp={topology.dcp}",
                f"each of {topology.ranks} ranks has a device of its own, and "
                f"{len(devices)} found on platform {devices[0].platform!r}",
                _cure(topology.ranks, devices[0].platform),
            )
        )
    grid = np.array(devices[: topology.ranks]).reshape(topology.tp, topology.dcp)
    return Mesh(grid, AXES, axis_types=(axis_type,) * len(AXES))


def _cure(needed: int, platform: str) -> str:
    """Say what brings `needed` devices on this platform."""
    if platform != "cpu":
        return f"Use at most the devices there are, or a machine with {needed}"
    setting = f'XLA_FLAGS="{_FLAG}={needed}"'
    if f"{_FLAG}={needed}" in os.environ.get("XLA_FLAGS", "").split():
        return (
            f"{setting} came after jax had started: set it in the environment of the "
            "process, or before the first import of jax"
        )
    return f"Set {setting} before jax starts"
