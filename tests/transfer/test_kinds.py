"""Latents, index keys, windows and states through both executors, rank to rank."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, transfer
from kvmem.geometry import LayerSpec, Topology, group_layers, kinds

GROUPS = {
    group.name: group
    for group in group_layers(
        [
            kinds.latent("a", 0, rank=128, rope_dim=8, scale=1.0, fp8=True),
            kinds.indexer("a.indexer", 0, dim=128),
            kinds.latent("b", 1, rank=16, rope_dim=8, scale=1.0, window=32),
            LayerSpec("c", 2, kv_heads=2, head_dim=9, stored_head_dim=16, window=8),
            kinds.mamba2("d", 3, heads=4, head_dim=3, groups=2, state=5, conv_kernel=4),
        ],
        page_size=4,
    )
}
TOPOLOGIES = [Topology(1), Topology(2), Topology(4), Topology(4, 2, 2), Topology(2, 3)]


def pool(plan, num_pages):
    """Return a pool of poison: NaN in every float dtype."""
    return jnp.full((plan.topology.ranks, num_pages, plan.page_nbytes), 255, jnp.uint8)


def test_every_kind_is_here():
    assert set(GROUPS) == {"full", "indexer", "window32", "window8", "state"}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    "topology",
    [
        TOPOLOGIES[0],
        pytest.param(TOPOLOGIES[1], marks=pytest.mark.long),  # as (2, 3) splits heads
        *TOPOLOGIES[2:],
    ],
    ids=str,
)
def test_records_of_every_kind_go_in_and_come_out_by_both_executors(
    oracle, name, topology
):
    plan = canonical.plan(GROUPS[name], topology)
    count = 3 * plan.page_tokens
    records = oracle.stream(count * plan.record_nbytes, name)
    records = records.reshape(count, plan.record_nbytes)
    filled = {
        each: transfer.import_records(
            pool(plan, 7), [5, 0, 3], records, plan, implementation=each
        )
        for each in ("host", "device")
    }
    assert np.array_equal(*map(np.asarray, filled.values()))
    untouched = np.asarray(filled["host"])[:, [1, 2, 4, 6]]
    assert (untouched == 255).all()
    for each, pages in filled.items():
        found = transfer.export_records(
            pages,
            [5, 0, 3],
            plan,
            count,
            implementation=each,
            verify_replicas=True,
        )
        assert np.array_equal(found, records)
        first, some = (1, 1) if GROUPS[name].is_state else (3, plan.page_tokens)
        part = transfer.export_records(
            pages, [5, 0, 3], plan, some, first, implementation=each
        )
        assert np.array_equal(part, records[first : first + some])


@pytest.mark.parametrize("order", ["slot_major", "token_major", "packed_hnd"])
def test_a_state_is_one_record_a_page_in_any_order(oracle, order):
    group = GROUPS["state"]
    records = oracle.stream(2 * group.record_nbytes).reshape(2, -1)
    for topology in TOPOLOGIES:
        plan = canonical.plan(group, topology, order)
        assert plan.page_tokens == 1
        pages = transfer.import_records(pool(plan, 3), [2, 1], records, plan)
        found = transfer.export_records(pages, [1, 2], plan, 2)
        assert np.array_equal(found, records[::-1])
