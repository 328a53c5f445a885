"""One writer a byte, and holders share the writing, whatever pages are exported."""

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


def shares(build, side, ids, implementation):
    """Return u8[rank, token, record]: 1 where a rank's byte is the one exported."""
    found = []
    for rank in range(side.plan.topology.ranks):
        marked = np.zeros(side.pages.shape, np.uint8)
        marked[rank] = 1
        records = transfer.export_records(
            build.put(marked),
            ids,
            side.plan,
            len(ids) * side.plan.page_tokens,
            implementation=implementation,
        )
        found.append(records)
    return np.stack(found)


@pytest.mark.parametrize("ids", IDS.values(), ids=list(IDS))
@pytest.mark.parametrize(
    "topology, order",
    [
        (Topology(4), "head_major"),
        (Topology(6), "token_major"),
        (Topology(10, 2), "packed_nhd"),
        (Topology(6, 2, 2), "slot_major"),
    ],
    ids=str,
)
def test_every_byte_has_one_writer_and_holders_write_alike(
    build, implementation, topology, order, ids
):
    side = build.side(topology, order, heads=2, dim=4, v_head_dim=8)
    written = shares(build, side, ids, implementation)
    assert np.array_equal(written.sum(axis=0), np.ones_like(written[0]))
    largest = max(field.head_nbytes for field in side.plan.group.fields)
    by_page = written.reshape(len(written), len(ids), -1).sum(axis=2, dtype=int)
    for head in range(2):
        holders = topology.holders(side.plan.group.fields[0], head)
        for shard in range(topology.dcp):
            alike = [r for r in holders if topology.dcp_index(r) == shard]
            spread = by_page[alike].max(axis=0) - by_page[alike].min(axis=0)
            assert spread.max() <= largest  # in every page, by itself
    assert (by_page == by_page[:, :1]).all()  # no id gives a page to anyone
