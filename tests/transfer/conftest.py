"""Pools filled without a mapping: pages sliced from a logical array, at random ids."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kvmem import canonical
from kvmem.canonical import CopyPlan
from kvmem.geometry import LayerSpec, group_layers

SPARE_PAGES = 5


@dataclasses.dataclass(frozen=True)
class Side:
    """One engine's pool, its page table, and what its tokens should be."""

    pages: jax.Array | tuple[jax.Array, ...]  # u8[R, P, E], or an array a plane
    page_ids: np.ndarray  # i64[M]
    plan: CopyPlan
    records: np.ndarray  # u8[tokens of the whole pages, record]


@dataclasses.dataclass(frozen=True)
class Builders:
    """Sides of a transfer by topology, order, page size and placement."""

    oracle: object

    @staticmethod
    def group(layers=2, heads=3, dim=8, page_size=4, **spec):
        specs = [
            LayerSpec(f"layers.{i}", i, kv_heads=heads, head_dim=dim, **spec)
            for i in range(layers)
        ]
        (group,) = group_layers(specs, page_size=page_size)
        return group

    def side(
        self,
        topology,
        order="head_major",
        page_size=4,
        num_tokens=48,
        place="one device",
        spare_nbytes=0,
        filled=True,
        **group,
    ) -> Side:
        """Return a pool that holds `num_tokens` tokens, other bytes random."""
        plan = canonical.plan(self.group(page_size=page_size, **group), topology, order)
        logical = self.oracle.logical(plan.group, num_tokens)
        sliced = self.oracle.pages(plan.group, logical, topology, order)
        rng = np.random.default_rng(7)
        ranks, table_pages, _ = sliced.shape
        shape = (ranks, table_pages + SPARE_PAGES, plan.page_nbytes + spare_nbytes)
        pages = rng.integers(0, 256, shape, np.uint8)
        page_ids = rng.permutation(shape[1])[:table_pages]
        if filled:
            pages[:, page_ids, : plan.page_nbytes] = sliced
        records = self.oracle.records(plan.group, logical)
        return Side(self.put(pages, place), page_ids, plan, records)

    def planes(
        self, topology, order, page_size=4, num_tokens=48, filled=True, spare_nbytes=0,
        place="one device", **group,
    ) -> Side:  # fmt: skip
        """Return a side whose order has bars: each plane sliced by itself."""
        *outside, page = (part.split() for part in order.split("|"))
        arrays, regions = (*outside, [], [])[:2]
        facts = self.group(page_size=page_size, **group)
        table_pages = num_tokens // (page_size * topology.dcp)
        num_pages = table_pages + SPARE_PAGES
        rng = np.random.default_rng(11)
        page_ids = rng.permutation(num_pages)[:table_pages]
        logical = self.oracle.logical(facts, num_tokens)
        places = {
            "layer": [layer.name for layer in facts.layers],
            "field": ["k", "v"],
        }
        made = []
        for array in itertools.product(*(places[axis] for axis in arrays)):
            blocks = []
            for region in itertools.product(*(places[axis] for axis in regions)):
                names = zip((*arrays, *regions), (*array, *region), strict=True)
                only = {axis: [name] for axis, name in names}
                axes = " ".join((*arrays, *regions, *page))
                sliced = self.oracle.pages(facts, logical, topology, axes, **only)
                spare = 0 if regions else spare_nbytes
                shape = (topology.ranks, num_pages, sliced.shape[2] + spare)
                block = rng.integers(0, 256, shape, np.uint8)
                if filled:
                    block[:, page_ids, : sliced.shape[2]] = sliced
                blocks.append(block)
            if regions:
                flat = [block.reshape(topology.ranks, -1) for block in blocks]
                made.append(np.concatenate(flat, axis=1))
            else:
                made.append(blocks[0])
        plan = canonical.plan(
            facts, topology, order, num_pages=num_pages if regions else None
        )
        pages = tuple(self.put(array, place) for array in made)
        records = self.oracle.records(facts, logical)
        return Side(pages, page_ids, plan, records)

    @staticmethod
    def put(pages: np.ndarray, place: str = "one device") -> jax.Array:
        """Place a pool: "one device", or "N auto" / "N explicit" devices of a mesh."""
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if place != "one device":
            count, kind = place.split()
            axis_type = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
            devices = jax.devices()[: int(count)]
            mesh = jax.make_mesh((int(count),), ("tp",), (axis_type,), devices=devices)
            sharding = NamedSharding(mesh, PartitionSpec("tp"))
        # device_put may borrow numpy's memory, which jax then refuses to donate: a pool
        # is the output of a program, as in an engine.
        owned = jax.jit(lambda p: p ^ np.uint8(0), out_shardings=sharding)
        return owned(jax.device_put(pages, sharding))


@pytest.fixture(scope="session")
def build(oracle) -> Builders:
    return Builders(oracle)


@pytest.fixture(params=["host", "device"])
def implementation(request) -> str:
    return request.param
