"""Export and import against pages sliced from a logical array, by both executors."""

import jax
import numpy as np
import pytest

from kvmem import canonical, transfer
from kvmem.geometry import Topology
from kvmem.geometry.envelope import ORDERS

WINDOWS = [(0, 48), (0, 1), (3, 1), (4, 4), (5, 2), (3, 6), (13, 30), (47, 1), (20, 0)]


def export(side, implementation, **options):
    num_tokens = options.pop("num_tokens", len(side.records))
    return transfer.export_records(
        side.pages,
        side.page_ids,
        side.plan,
        num_tokens,
        implementation=implementation,
        **options,
    )


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("tp", [1, 3, 9])
def test_every_order_and_topology_exports_the_same_records(
    build, implementation, tp, order
):
    side = build.side(Topology(tp), order)
    assert np.array_equal(export(side, implementation), side.records)


@pytest.mark.parametrize("first, count", WINDOWS)
@pytest.mark.parametrize("tp, page_size", [(3, 4), (9, 8), (1, 1)])
@pytest.mark.cover(2)
def test_any_run_of_tokens_is_exported(
    build, implementation, tp, page_size, first, count
):
    side = build.side(Topology(tp), page_size=page_size)
    records = export(side, implementation, num_tokens=count, first_token=first)
    assert np.array_equal(records, side.records[first : first + count])


def test_a_writer_of_neighbouring_tokens_exports_each_of_them_alone(
    build, implementation
):
    # One rank writes the end of one record and the start of the next: they touch.
    side = build.side(
        Topology(3), "slot_major", page_size=2, heads=1, dim=8, v_head_dim=12
    )
    for token in range(8):
        found = export(side, implementation, num_tokens=1, first_token=token)
        assert np.array_equal(found, side.records[token : token + 1])


@pytest.mark.parametrize("first, count", WINDOWS)
@pytest.mark.parametrize(
    "tp, order, page_size", [(3, "head_major", 4), (9, "token_major", 8)]
)
@pytest.mark.cover(2)
def test_any_run_of_tokens_is_imported_and_no_other_byte_changes(
    build, implementation, tp, order, page_size, first, count
):
    # Rows of 36 and 20 bytes have padding between them; spare bytes follow the page.
    facts = {"spare_nbytes": 32, "dim": 9, "v_head_dim": 5}
    full = build.side(Topology(tp), order, page_size, **facts)
    side = build.side(Topology(tp), order, page_size, filled=False, **facts)
    before = np.array(side.pages)
    rows = full.records[first : first + count]
    after = transfer.import_records(
        side.pages,
        side.page_ids,
        rows,
        side.plan,
        first,
        implementation=implementation,
    )
    expected = before.copy()
    for token in range(first, first + count):
        page = side.page_ids[token // page_size]
        for rank in range(tp):
            for entry in side.plan.envelope(rank).entries:
                at = entry.address(token % page_size)
                of_slot = np.s_[rank, page, at : at + entry.nbytes]
                expected[of_slot] = np.array(full.pages)[of_slot]
    assert np.array_equal(np.array(after), expected)


@pytest.mark.parametrize(
    "writer, reader",
    [
        ((3, 4, "head_major"), (1, 8, "token_major")),
        ((3, 4, "token_major"), (9, 4, "head_major")),
        ((1, 16, "slot_major"), (3, 2, "packed_hnd")),
        ((9, 8, "split_hnd"), (1, 1, "packed_nhd")),
    ],
    ids=str,
)
def test_what_one_topology_writes_every_other_one_reads(
    build, implementation, writer, reader
):
    (tp, page_size, order), (tp_r, page_size_r, order_r) = writer, reader
    written = build.side(Topology(tp), order, page_size)
    records = export(written, implementation)
    expected = build.side(Topology(tp_r), order_r, page_size_r)
    side = build.side(Topology(tp_r), order_r, page_size_r, filled=False)
    pages = transfer.import_records(
        side.pages, side.page_ids, records, side.plan, implementation=implementation
    )
    assert np.array_equal(np.array(pages)[:, side.page_ids], table(expected))


def table(side):
    return np.array(side.pages)[:, side.page_ids]


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_token_shards_export_and_import_the_same_records(
    build, implementation, interleave
):
    topology = Topology(3, 2, interleave)
    side = build.side(topology)
    assert np.array_equal(export(side, implementation), side.records)
    middle = export(side, implementation, first_token=5, num_tokens=18)
    assert np.array_equal(middle, side.records[5:23])
    blank = build.side(topology, filled=False)
    pages = transfer.import_records(
        blank.pages,
        blank.page_ids,
        side.records,
        blank.plan,
        implementation=implementation,
    )
    assert np.array_equal(np.array(pages)[:, side.page_ids], table(side))


@pytest.mark.parametrize("place", ["3 auto", "3 explicit"])
@pytest.mark.parametrize("tp", [3, 9])
@pytest.mark.cover(2)
def test_a_pool_on_a_mesh_moves_the_same_bytes(build, implementation, place, tp):
    side = build.side(Topology(tp), place=place)
    assert np.array_equal(export(side, implementation), side.records)
    blank = build.side(Topology(tp), place=place, filled=False)
    sharding = blank.pages.sharding
    pages = transfer.import_records(
        blank.pages,
        blank.page_ids,
        side.records[3:41],
        blank.plan,
        3,
        implementation=implementation,
    )
    assert pages.sharding == sharding
    found = transfer.export_records(
        pages, side.page_ids, side.plan, 38, 3, implementation=implementation
    )
    assert np.array_equal(found, side.records[3:41])


@pytest.mark.parametrize("place", ["2 auto", "2 explicit"])
def test_a_pool_that_devices_hold_twice_is_written_on_both(
    build, implementation, place
):
    side = build.side(Topology(1), filled=False)
    records = build.side(Topology(1)).records
    mesh_sharding = build.put(np.zeros((2, 1, 1), np.uint8), place).sharding
    everywhere = jax.sharding.NamedSharding(
        mesh_sharding.mesh, jax.sharding.PartitionSpec()
    )
    pages = transfer.import_records(
        jax.device_put(side.pages, everywhere),
        side.page_ids,
        records,
        side.plan,
        implementation=implementation,
    )
    assert len(pages.addressable_shards) == 2
    for shard in pages.addressable_shards:
        one = jax.device_put(np.asarray(shard.data), jax.devices()[0])
        found = transfer.export_records(one, side.page_ids, side.plan, 48)
        assert np.array_equal(found, records)


@pytest.mark.parametrize("widths", [(9, 5, "float32"), (3, 1, "bfloat16")], ids=str)
def test_odd_widths_move_too(build, implementation, widths):
    dim, v_dim, dtype = widths
    side = build.side(Topology(3), dim=dim, v_head_dim=v_dim, dtype=dtype)
    assert np.array_equal(export(side, implementation), side.records)
    blank = build.side(
        Topology(3), dim=dim, v_head_dim=v_dim, dtype=dtype, filled=False
    )
    pages = transfer.import_records(
        blank.pages,
        blank.page_ids,
        side.records,
        side.plan,
        implementation=implementation,
    )
    again = transfer.export_records(pages, side.page_ids, side.plan, 48)
    assert np.array_equal(again, side.records)


def test_an_out_that_is_given_is_filled_and_returned(build, implementation):
    side = build.side(Topology(3))
    out = np.zeros((2 * 48, side.plan.record_nbytes), np.uint8)
    found = export(side, implementation, out=out[48:])
    assert found.base is out
    assert np.array_equal(out[48:], side.records)
    assert not out[:48].any()


def test_import_reads_records_that_are_read_only_or_strided(build, implementation):
    side = build.side(Topology(1))
    blank = build.side(Topology(1), filled=False)
    doubled = np.repeat(side.records, 2, axis=0)
    doubled.flags.writeable = False
    pages = transfer.import_records(
        blank.pages,
        blank.page_ids,
        doubled[::2],
        blank.plan,
        implementation=implementation,
    )
    found = transfer.export_records(pages, side.page_ids, side.plan, 48)
    assert np.array_equal(found, side.records)


def test_mutants_that_tile_are_killed_by_the_judge(build, mutants, implementation):
    side = build.side(Topology(3))
    rotated = mutants.rotated(side.plan)
    records = transfer.export_records(
        side.pages, side.page_ids, rotated, 48, implementation=implementation
    )
    objections = canonical.judge(side.records, records, side.plan.group)
    assert {o.law for o in objections} == {"placement"}
    assert len(objections) == 2 * 3 * 2


def test_threads_move_the_same_bytes(build):
    side = build.side(Topology(3), page_size=2)
    blank = build.side(Topology(3), page_size=2, filled=False)
    assert np.array_equal(export(side, "host", threads=3), side.records)
    pages = transfer.import_records(
        blank.pages, blank.page_ids, side.records, blank.plan, threads=3
    )
    found = transfer.export_records(pages, side.page_ids, side.plan, 48)
    assert np.array_equal(found, side.records)
