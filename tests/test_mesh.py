"""A rank has a device, or the message says how to get one."""

import os
import subprocess
import sys

import pytest
from jax.sharding import AxisType

from kvmem import errors, mesh
from kvmem.geometry import Topology


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_device_i_is_rank_i(axis_type: AxisType):
    topology = Topology(tp=2, dcp=3)
    made = mesh.make(topology, axis_type=axis_type)
    assert made.axis_names == ("tp", "dcp")
    assert made.axis_types == (axis_type, axis_type)
    for rank, device in enumerate(made.devices.flat):
        at = (topology.tp_index(rank), topology.dcp_index(rank))
        assert device.id == rank and made.devices[at] is device


_TOO_FEW = """
import os, sys
import jax
{start}
{late}
from kvmem import errors, mesh
from kvmem.geometry import Topology
try:
    mesh.make(Topology(tp=4))
except errors.IncompatiblePlan as error:
    print(error)
"""


@pytest.mark.case("JAX-09")
@pytest.mark.parametrize("start", ["", "jax.devices()"], ids=["before", "after"])
def test_one_device_for_four_ranks_names_counts_and_the_setting(start: str):
    message = _run_on_one_device(_TOO_FEW.format(start=start, late=""))
    assert "each of 4 ranks" in message and "1 found on platform 'cpu'" in message
    assert 'Set XLA_FLAGS="--xla_force_host_platform_device_count=4"' in message


@pytest.mark.case("JAX-09")
def test_a_setting_that_came_too_late_is_called_late():
    late = "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'"
    message = _run_on_one_device(_TOO_FEW.format(start="jax.devices()", late=late))
    assert "1 found" in message and "came after jax had started" in message


@pytest.mark.case("JAX-09")
def test_a_mistyped_setting_is_not_taken_for_the_right_one():
    late = "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=40'"
    message = _run_on_one_device(_TOO_FEW.format(start="jax.devices()", late=late))
    assert 'device_count=4" before jax starts' in message


def test_on_an_accelerator_the_cure_is_not_a_cpu_flag():
    class Gpu:
        platform = "gpu"

    with pytest.raises(errors.IncompatiblePlan, match="a machine with 4"):
        mesh.make(Topology(tp=4), devices=[Gpu()])


def _run_on_one_device(code: str) -> str:
    env = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=1")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout
