"""Any writer and any reader meet in equal bytes: topology, page size and page order."""

import itertools

import numpy as np
import pytest

from kvmem import transfer
from kvmem.geometry import Topology
from kvmem.geometry.order import AXES

EVERY_ORDER = [" ".join(axes) for axes in itertools.permutations(AXES)]


def exported(side, implementation="auto"):
    return transfer.export_records(
        side.pages,
        side.page_ids,
        side.plan,
        len(side.records),
        implementation=implementation,
    )


def filled(side, records, implementation="auto"):
    return transfer.import_records(
        side.pages, side.page_ids, records, side.plan, implementation=implementation
    )


@pytest.mark.parametrize("heads", [2, 4])
def test_a_sharded_writer_and_a_whole_reader_meet_in_equal_bytes(
    build, implementation, heads
):
    writer = build.side(
        Topology(tp=2, dcp=2), "split_hnd", page_size=16, num_tokens=128, heads=heads
    )
    reader = build.side(
        Topology(tp=2), "packed_nhd", page_size=64, num_tokens=128, heads=heads,
        filled=False,
    )  # fmt: skip
    records = exported(writer, implementation)
    assert np.array_equal(records, writer.records)
    pages = filled(reader, records, implementation)
    expected = build.side(
        Topology(tp=2), "packed_nhd", page_size=64, num_tokens=128, heads=heads
    )
    held = np.s_[:, reader.page_ids]
    assert np.array_equal(np.array(pages)[held], np.array(expected.pages)[held])
    back = transfer.export_records(pages, reader.page_ids, reader.plan, 128)
    assert np.array_equal(back, records)


@pytest.mark.parametrize("order", EVERY_ORDER)
@pytest.mark.parametrize("topology", [Topology(3), Topology(3, 2, 2)], ids=str)
def test_every_line_of_the_axes_is_an_order(build, order, topology):
    side = build.side(topology, order, dim=9, v_head_dim=5)
    assert np.array_equal(exported(side), side.records)
    blank = build.side(topology, order, dim=9, v_head_dim=5, filled=False)
    pages = filled(blank, side.records)
    again = transfer.export_records(pages, side.page_ids, side.plan, 48)
    assert np.array_equal(again, side.records)


TOPOLOGIES = [
    Topology(tp, dcp, interleave)
    for tp in (1, 2, 4, 8)  # below, at and above four heads
    for dcp, interleave in ((1, 1), (2, 1), (2, 4), (3, 2))
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.cover(2)
def test_every_topology_exports_and_imports_the_same_records(
    build, implementation, topology, page_size
):
    num_tokens = 192
    facts = {"heads": 4, "dim": 4, "num_tokens": num_tokens}
    side = build.side(topology, "packed_hnd", page_size, **facts)
    assert np.array_equal(exported(side, implementation), side.records)
    blank = build.side(topology, "packed_hnd", page_size, filled=False, **facts)
    pages = filled(blank, side.records, implementation)
    held = np.s_[:, side.page_ids]
    assert np.array_equal(np.array(pages)[held], np.array(side.pages)[held])


@pytest.mark.parametrize("interleave", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("first, count", [(0, 96), (7, 40), (23, 2), (95, 1)])
def test_every_interleave_that_divides_a_page_moves_any_run_of_tokens(
    build, interleave, first, count
):
    side = build.side(Topology(1, 4, interleave), page_size=12, num_tokens=96, heads=1)
    found = transfer.export_records(
        side.pages, side.page_ids, side.plan, count, first_token=first
    )
    assert np.array_equal(found, side.records[first : first + count])
