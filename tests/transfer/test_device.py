"""The device executor's programs: few of them, and the donated pool stays in place."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kvmem import transfer
from kvmem.geometry import Topology
from kvmem.transfer import device
from kvmem.transfer.window import Window


def test_pages_of_one_bucket_share_one_program(build):
    side = build.side(Topology(3), dim=24)
    for first, count in [(0, 9), (5, 9), (0, 16), (3, 10)]:  # 3 or 4 pages
        found = transfer.export_records(
            side.pages,
            side.page_ids,
            side.plan,
            count,
            first,
            implementation="device",
        )
        assert np.array_equal(found, side.records[first : first + count])
    facts = device._facts(side.pages, side.plan)
    importer = device._importer(facts)
    pages = side.pages
    for first, count in [(0, 9), (5, 9), (0, 16), (3, 10)]:
        rows = side.records[first : first + count]
        pages = transfer.import_records(
            pages, side.page_ids, rows, side.plan, first, implementation="device"
        )
    assert importer._cache_size() == 1


@pytest.mark.parametrize("num_tokens", [1, 16])
@pytest.mark.parametrize("tp", [1, 3])
def test_an_import_copies_no_pool(build, num_tokens, tp):
    side = build.side(Topology(tp), num_tokens=1_024)
    facts = device._facts(side.pages, side.plan)
    window = Window(0, num_tokens, side.plan.page_tokens)
    ids = device._bucket(side.page_ids, window, facts.planes.num_pages)
    table = device._table(side.plan, ("holders",), facts, to_records=False)
    records = np.zeros((len(ids) * 4, side.plan.record_nbytes), np.uint8)
    bounds = np.asarray([0, num_tokens], np.int32)
    lowered = device._importer(facts).lower(side.pages, ids, records, bounds, table)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == side.pages.nbytes
    assert memory.temp_size_in_bytes < side.pages.nbytes // 4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_ranks_may_lie_over_two_mesh_axes(build, kind):
    topology = Topology(3, 2)
    side = build.side(topology)
    mesh = jax.make_mesh((3, 2), ("tp", "dcp"), (kind, kind), devices=jax.devices()[:6])
    over_both = NamedSharding(mesh, PartitionSpec(("tp", "dcp")))
    for implementation in ("host", "device"):
        pages = jax.device_put(np.array(side.pages), over_both)
        found = transfer.export_records(
            pages, side.page_ids, side.plan, 48, implementation=implementation
        )
        assert np.array_equal(found, side.records)
        pages = transfer.import_records(
            pages,
            side.page_ids,
            side.records[::-1],
            side.plan,
            implementation=implementation,
        )
        found = transfer.export_records(pages, side.page_ids, side.plan, 48)
        assert np.array_equal(found, side.records[::-1])
