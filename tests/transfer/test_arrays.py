"""Pools of several arrays: every plane sliced by itself, moved by both executors."""

import dataclasses

import jax
import numpy as np
import pytest

from kvmem import canonical, errors, transfer
from kvmem.geometry import Topology

ORDERS = [
    "layer | token head field",
    "layer | field head token",
    "layer | head field token",
    "layer field | token head",
    "field | layer head token",
    "layer | field | token head",
    " | layer field | head token",
]
SIDES = [
    (Topology(1), 4, {}),
    (Topology(3), 8, {}),
    (Topology(9), 4, {}),
    (Topology(3, 2, 2), 4, {}),
    (Topology(3), 1, {"dim": 9, "v_head_dim": 5}),
    (Topology(9, 2), 2, {"v_head_dim": 4, "dtype": "bfloat16"}),
]


def copied(side):
    return [np.array(array) for array in side.pages]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("topology, page_size, group", SIDES, ids=str)
@pytest.mark.cover(2)
def test_arrays_of_planes_hold_the_same_records(
    build, implementation, order, topology, page_size, group
):
    side = build.planes(topology, order, page_size, **group)
    found = transfer.export_records(
        side.pages, side.page_ids, side.plan, 48, implementation=implementation
    )
    assert np.array_equal(found, side.records)
    blank = build.planes(topology, order, page_size, filled=False, **group)
    pages = transfer.import_records(
        blank.pages,
        side.page_ids,
        side.records,
        side.plan,
        implementation=implementation,
    )
    again = transfer.export_records(pages, side.page_ids, side.plan, 48)
    assert np.array_equal(again, side.records)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first, count", [(0, 48), (5, 2), (13, 30), (47, 1)])
@pytest.mark.cover(2)
def test_an_import_into_planes_changes_no_other_byte(
    build, implementation, order, first, count
):
    facts = {"dim": 9, "v_head_dim": 5, "spare_nbytes": 32}
    full = build.planes(Topology(3), order, **facts)
    side = build.planes(Topology(3), order, filled=False, **facts)
    expected = copied(side)
    source = copied(full)
    for token, rank in np.ndindex(count, 3):
        page, slot = divmod(first + token, 4)
        for entry in side.plan.envelope(rank).entries:
            plane, array = entry.plane, entry.plane.index
            if side.pages[array].ndim == 3:
                start = entry.address(slot)
                at = np.s_[rank, side.page_ids[page], start : start + entry.nbytes]
            else:
                start = plane.address(side.page_ids[page]) + entry.address(slot)
                at = np.s_[rank, start : start + entry.nbytes]
            expected[array][at] = source[array][at]
    after = transfer.import_records(
        side.pages,
        side.page_ids,
        full.records[first : first + count],
        side.plan,
        first,
        implementation=implementation,
    )
    assert isinstance(after, tuple)
    assert all(map(np.array_equal, map(np.array, after), expected))


@pytest.mark.parametrize("place", ["3 auto", "3 explicit"])
@pytest.mark.parametrize("order", ORDERS[:1] + ORDERS[-2:])
@pytest.mark.cover(2)
def test_planes_on_a_mesh_move_the_same_bytes(build, implementation, place, order):
    side = build.planes(Topology(9), order, place=place)
    options = {"implementation": implementation, "verify_replicas": True}
    found = transfer.export_records(side.pages, side.page_ids, side.plan, 48, **options)
    assert np.array_equal(found, side.records)
    blank = build.planes(Topology(9), order, place=place, filled=False)
    pages = transfer.import_records(
        list(blank.pages),
        side.page_ids,
        side.records[3:41],
        side.plan,
        3,
        implementation=implementation,
    )
    assert [a.sharding for a in pages] == [a.sharding for a in side.pages]
    found = transfer.export_records(pages, side.page_ids, side.plan, 38, 3)
    assert np.array_equal(found, side.records[3:41])


def test_arrays_and_one_array_meet_in_equal_records(build, implementation):
    one = build.side(Topology(3), "packed_hnd", page_size=8)
    many = build.planes(Topology(9), ORDERS[0], page_size=2, filled=False)
    records = transfer.export_records(one.pages, one.page_ids, one.plan, 48)
    pages = transfer.import_records(
        many.pages, many.page_ids, records, many.plan, implementation=implementation
    )
    expected = build.planes(Topology(9), ORDERS[0], page_size=2)
    for found, want in zip(pages, expected.pages, strict=True):
        held = np.s_[:, many.page_ids]
        assert np.array_equal(np.array(found)[held], np.array(want)[held])


@pytest.fixture
def side(build):
    return build.planes(Topology(3), ORDERS[0])


def refused(side, error, phrase, pages=None, plan=None):
    with pytest.raises(error, match=phrase) as refusal:
        transfer.export_records(
            side.pages if pages is None else pages,
            side.page_ids,
            plan or side.plan,
            48,
        )
    message = str(refusal.value)
    assert ": " in message and message.endswith(".")
    return message


def test_a_list_of_arrays_with_no_declaration_is_refused(build, side):
    one = build.side(Topology(3)).plan
    message = refused(
        side, errors.FormatMismatch, "2 arrays with a plan for 1", plan=one
    )
    assert "declared by the order, never guessed" in message
    assert "layer | token head field" in message


def test_one_array_with_a_plan_for_several_is_refused(side):
    refused(side, errors.FormatMismatch, "1 arrays with a plan for 2", side.pages[0])
    refused(side, errors.FormatMismatch, "1 arrays with a plan for 2", side.pages[:1])


def test_arrays_of_different_pools_are_refused(build, side):
    first, second = side.pages
    short = build.put(np.array(second)[:, :-1])
    refused(side, errors.IncompatiblePlan, "one number of pages", (first, short))
    moved = jax.device_put(second, jax.devices()[1])
    refused(side, errors.IncompatiblePlan, "one sharding", (first, moved))
    thin = build.put(np.array(second)[:, :, :-16])
    refused(side, errors.FormatMismatch, "with a plan for 256", (first, thin))


def test_regions_are_one_row_of_bytes_a_rank(build, side):
    regions = build.planes(Topology(3), ORDERS[-2])
    message = refused(
        regions, errors.FormatMismatch, r"u8\[ranks, bytes\]", pages=side.pages
    )
    assert "2 regions of 17 pages" in message
    flat = tuple(build.put(np.array(a)[:, :-16]) for a in regions.pages)
    refused(regions, errors.FormatMismatch, "an array of", pages=flat)
    refused(side, errors.FormatMismatch, "pages of uint8", pages=regions.pages)


def test_a_page_outside_of_every_array_is_refused(side):
    ids = side.page_ids.copy()
    ids[3] = 17
    with pytest.raises(errors.InvalidId, match="physical pages 0 to 16"):
        transfer.export_records(side.pages, ids, side.plan, 48)


def test_a_run_that_leaves_its_plane_is_refused(side):
    plan = side.plan
    first, *rest = plan.held[0]
    starts = plan.envelope(0).plane_starts
    moved = canonical.CopyRun(
        first.local_offset + starts[1],
        first.local_stride,
        first.canonical_offset,
        first.canonical_stride,
        first.nbytes,
        first.count,
    )
    with pytest.raises(errors.IncompatiblePlan, match="outside of its planes"):
        dataclasses.replace(plan, held=((moved, *rest), *plan.held[1:]))
