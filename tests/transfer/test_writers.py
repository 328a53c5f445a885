"""One writer a byte, and holders share the writing, whatever pages are exported.

Marked pools say who wrote what: every byte of one rank is 1, those of the others 0.
"""

import jax
import numpy as np
import pytest

from kvmem import transfer
from kvmem.geometry import Topology

IDS = {
    "one page": [3],
    "in order": [0, 1, 2, 3],
    "all even": [0, 2, 4, 6, 8, 10],
    "all multiples of four": [8, 4, 0],
    "backwards": [7, 6, 5, 4, 3],
}


def marked(build, pages, rank):
    """Return a pool of that shape, with ones on one rank."""

    def mark(array):
        ones = np.zeros(array.shape, np.uint8)
        ones[rank] = 1
        return build.put(ones)

    return jax.tree.map(mark, pages)


def shares(build, side, ids, implementation, first=0, count=None):
    """Return u8[rank, token, record]: 1 where a rank's byte is the one exported."""
    found = []
    for rank in range(side.plan.topology.ranks):
        records = transfer.export_records(
            marked(build, side.pages, rank),
            ids,
            side.plan,
            len(ids) * side.plan.page_tokens if count is None else count,
            first,
            implementation=implementation,
        )
        found.append(records)
    return np.stack(found)


TOPOLOGIES = [
    (Topology(4), "head_major"),
    (Topology(6), "token_major"),
    (Topology(10, 2), "packed_nhd"),
    (Topology(6, 2, 2), "slot_major"),
    (Topology(14), "layer | token head field"),
]


@pytest.mark.parametrize("ids", IDS.values(), ids=list(IDS))
@pytest.mark.parametrize("topology, order", TOPOLOGIES, ids=str)
@pytest.mark.cover(2)
def test_every_byte_has_one_writer_and_holders_write_alike(
    build, implementation, topology, order, ids
):
    facts = {"heads": 2, "dim": 4, "v_head_dim": 8}
    side = (build.planes if "|" in order else build.side)(topology, order, **facts)
    written = shares(build, side, ids, implementation)
    assert np.array_equal(written.sum(axis=0), np.ones_like(written[0]))
    largest = max(field.head_nbytes for field in side.plan.group.fields)
    in_all = written.reshape(len(written), -1).sum(axis=1, dtype=int)
    for head in range(2):
        holders = topology.holders(side.plan.group.fields[0], head)
        for shard in range(topology.dcp):
            alike = [r for r in holders if topology.dcp_index(r) == shard]
            assert in_all[alike].max() - in_all[alike].min() <= largest


@pytest.mark.parametrize("topology, order", TOPOLOGIES[:4], ids=str)
def test_who_writes_depends_on_the_place_in_the_table_and_on_no_id(
    build, implementation, topology, order
):
    side = build.side(topology, order, heads=2, dim=4, v_head_dim=8)
    found = [
        shares(build, side, ids, implementation)
        for ids in ([0, 1, 2, 3], [0, 2, 4, 6], [9, 1, 8, 4])
    ]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("first, count", [(0, 14), (1, 13), (3, 8), (1, 2)])
def test_both_executors_elect_the_same_writers(build, first, count):
    side = build.side(Topology(10), "head_major", heads=2, page_size=2, dim=4)
    assert side.plan.period == 5
    ids = [5, 3, 9, 0, 7, 2, 1]
    host, device = (
        shares(build, side, ids, each, first, count) for each in ("host", "device")
    )
    assert np.array_equal(host, device)
    if count == 14:  # dealt on, page after page
        pages = host.reshape(10, len(ids), 2, -1)
        assert not np.array_equal(pages[:, 0], pages[:, 1])


@pytest.mark.parametrize("first, count", [(1, 13), (3, 2), (2, 10), (0, 14)])
def test_a_run_of_tokens_has_one_writer_a_byte_in_every_turn(
    build, implementation, first, count
):
    side = build.side(Topology(10), heads=2, page_size=2, dim=4)
    written = np.zeros((count, side.plan.record_nbytes), int)
    for rank in range(10):
        written += transfer.export_records(
            marked(build, side.pages, rank),
            side.page_ids,
            side.plan,
            count,
            first,
            implementation=implementation,
        )
    assert np.array_equal(written, np.ones_like(written))
    found = transfer.export_records(
        side.pages,
        side.page_ids,
        side.plan,
        count,
        first,
        implementation=implementation,
        verify_replicas=True,
    )
    assert np.array_equal(found, side.records[first : first + count])


@pytest.mark.parametrize("place", ["5 auto", "5 explicit"])
def test_ranks_of_a_mesh_take_turns(build, implementation, place):
    side = build.side(Topology(10), heads=2, page_size=2, dim=4, place=place)
    assert side.plan.period == 5
    found = transfer.export_records(
        side.pages, side.page_ids, side.plan, 48, implementation=implementation
    )
    assert np.array_equal(found, side.records)


def test_threads_keep_each_pages_turn(build):
    side = build.side(Topology(10), heads=2, page_size=2, dim=4)
    found = transfer.export_records(
        side.pages, side.page_ids, side.plan, 45, 1, implementation="host", threads=3
    )
    assert np.array_equal(found, side.records[1:46])
