"""What the tests of the pool share: meshes, counted traces, compiled programs."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kvmem import pool as kvpool
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers


@pytest.fixture
def shake():
    """Return aperiodic bytes of a shape: nothing in them repeats by construction."""
    generator = np.random.default_rng(20260728)

    def make(*shape):
        return generator.integers(0, 256, shape, dtype=np.uint8)

    return make


@pytest.fixture
def traced():
    """Return a jitted function that donates its first argument and counts traces."""

    def wrap(function, **kwargs):
        def body(*args):
            wrapped.traces += 1
            return function(*args)

        def wrapped(*args):
            return jitted(*args)

        jitted = jax.jit(body, donate_argnums=0, **kwargs)
        wrapped.traces, wrapped.jitted = 0, jitted
        return wrapped

    return wrap


@pytest.fixture
def sharding_of():
    """Return the sharding of a pool over a mesh of tp forced host devices."""

    def make(tp, axis_type):
        mesh = jax.make_mesh((tp,), ("tp",), axis_types=(axis_type,))
        return NamedSharding(mesh, PartitionSpec("tp"))

    return make


@pytest.fixture(params=["one device", "auto", "explicit"])
def placed_pool(request, sharding_of):
    """Return a maker of pools of 8 ranks: on one device, or on a mesh of 8.

    Its tests hand out to two sequences of up to four pages, and name ids in fours: they
    share their programs.
    """
    axis_types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    sharding = None
    if request.param in axis_types:
        sharding = sharding_of(8, axis_types[request.param])

    def make(num_pages=6, page_nbytes=32, **kwargs):
        return kvpool.init(num_pages, page_nbytes, 8, sharding=sharding, **kwargs)

    return make


@pytest.fixture
def copies_of():
    """Return the instructions of a compiled program that copy a whole array."""

    def find(compiled, dtype, *shape):
        dims = ",".join(map(str, shape))
        whole = re.compile(rf"= {dtype}\[{dims}\]\S* (copy|select|convert)\(")
        return [
            line.strip()
            for line in compiled.as_text().splitlines()
            if whole.search(line)
        ]

    return find


@pytest.fixture
def token_major():
    """Return the envelope of 2 layers, 2 heads of 4 float32, page 4, token-major."""
    specs = [LayerSpec(f"l{i}", i, "gqa", 2, 4, None, "float32") for i in range(2)]
    (group,) = group_layers(specs, 4)
    return envelope.build(group, Topology(), 0, "token_major")
