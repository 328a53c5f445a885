"""A state that is cut into pages of one pool: its record, rank to rank and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvmem import canonical, errors, mesh, transfer
from kvmem.geometry import Topology, envelope, group_layers, kinds

LAYERS = [
    kinds.gated_delta(
        "a", 0, key_heads=4, value_heads=8, key_dim=3, value_dim=5, conv_kernel=4
    ),
    kinds.mamba2("b", 1, heads=4, head_dim=3, groups=4, state=5, conv_kernel=2),
]
(GROUP,) = group_layers(LAYERS, page_size=4)
PARTS = {1: [5, 0, 3, 8, 2, 7, 1, 9, 4, 6], 2: [1, 4, 9, 0, 6, 3, 7], 4: [2, 0, 6, 5]}


def side(tp, page_nbytes=None, sharded=False):
    """Return a poisoned pool, the plan, the cut envelope and parts of a state."""
    topology = Topology(tp)
    plan = canonical.plan(GROUP, topology)
    whole = envelope.build(GROUP, topology, 0, "head_major")
    least = max(-(-entry.nbytes // 16) * 16 for entry in whole.entries)
    cut = envelope.cut(whole, page_nbytes or least)
    parts = [*PARTS[tp], *range(10, 40)][: cut.extents]
    pages = jnp.full((tp, 40, cut.nbytes // cut.extents), 255, jnp.uint8)
    if sharded:
        placed = NamedSharding(mesh.make(topology), PartitionSpec("tp"))
        pages = jax.device_put(pages, placed)
    return pages, plan, cut, parts


def record_of(oracle):
    return oracle.stream(GROUP.record_nbytes, "state")


@pytest.mark.parametrize("writer", [1, 2, 4])
@pytest.mark.parametrize("reader", [1, 2, 4])
def test_a_cut_state_goes_from_any_ranks_to_any_others(oracle, writer, reader):
    record = record_of(oracle)
    for tp, sharded in ((writer, True), (reader, False)):
        pages, plan, cut, parts = side(tp, sharded=sharded)
        assert cut.extents > 1
        placed = pages.sharding
        pages = transfer.import_state(pages, parts, record, plan, cut)
        assert pages.sharding == placed
        record = transfer.export_state(pages, parts, plan, cut)
    assert np.array_equal(record, record_of(oracle))


def test_every_entry_stands_where_the_cut_envelope_says(oracle):
    """Read back by hand: extent, offset and bytes of each entry, rank by rank."""
    pages, plan, cut, parts = side(2)
    whole = canonical.canonical_envelope(GROUP, 1)
    record = record_of(oracle)
    held = np.asarray(transfer.import_state(pages, parts, record, plan, cut))
    at = {
        (e.field.layer, e.field.name, e.head0): (e.offset, e.field.head_nbytes)
        for e in whole.entries
    }
    for rank in range(2):
        for entry, part in zip(plan.envelope(rank).entries, cut.entries, strict=True):
            for head in range(entry.nheads):
                field = entry.field
                start, nbytes = at[field.layer, field.name, entry.head0 + head]
                offset = part.offset + head * nbytes
                found = held[rank, parts[part.extent], offset : offset + nbytes]
                assert np.array_equal(found, record[start : start + nbytes])


def test_no_other_page_is_touched(oracle):
    pages, plan, cut, parts = side(1)
    held = np.asarray(transfer.import_state(pages, parts, record_of(oracle), plan, cut))
    others = [page for page in range(40) if page not in parts]
    assert (held[:, others] == 255).all()
    assert not (held[:, parts] == 255).all(axis=2).any()


def test_a_state_that_fits_one_page_is_one_record_all_the_same(oracle):
    pages, plan, cut, parts = side(2, page_nbytes=1 << 13)
    assert cut.extents == 1
    record = record_of(oracle)
    pages = transfer.import_state(pages, parts, record, plan, cut)
    assert np.array_equal(transfer.export_state(pages, parts, plan, cut), record)


def test_what_is_no_state_of_this_pool_is_refused_and_nothing_changes(oracle):
    pages, plan, cut, parts = side(2)
    record = record_of(oracle)
    for bad in (parts[:-1], [*parts[:-1], 40], [*parts[:-1], -1]):
        with pytest.raises(errors.InvalidId, match=f"in {cut.extents} of the physical"):
            transfer.import_state(pages, bad, record, plan, cut)
    with pytest.raises(errors.InvalidId, match="one page cannot hold"):
        transfer.import_state(pages, [parts[0]] * cut.extents, record, plan, cut)
    with pytest.raises(errors.FormatMismatch, match="bytes a row"):
        transfer.import_state(pages, parts, record[:-1], plan, cut)
    with pytest.raises(errors.FormatMismatch, match="parts of"):
        transfer.export_state(pages[..., :-16], parts, plan, cut)
    assert (np.asarray(pages) == 255).all()
