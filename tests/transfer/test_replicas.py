"""Holders of one head are compared, and who differs is named."""

import re

import jax
import numpy as np
import pytest

from kvmem import canonical, errors, transfer
from kvmem.geometry import Topology, group_layers, kinds


@pytest.mark.parametrize("topology", [Topology(9), Topology(6, 2)], ids=str)
def test_holders_that_agree_pass_and_one_that_differs_is_named(
    build, implementation, topology
):
    side = build.side(topology)
    verified = transfer.export_records(
        side.pages,
        side.page_ids,
        side.plan,
        48,
        implementation=implementation,
        verify_replicas=True,
    )
    assert np.array_equal(verified, side.records)
    slot = side.plan.envelope(5).entries[1].address(1)  # layer 0, field v, slot 1
    pages = np.array(side.pages)
    pages[5, side.page_ids[2], slot] ^= 1
    token = 9 if topology.dcp == 1 else 16 + 3  # rank 5 keeps the odd tokens
    head, others = (1, "3, 4|3, 5|4, 5") if topology.dcp == 1 else (1, "7|5")
    with pytest.raises(
        errors.CorruptPage, match=rf"rank \d differs from ranks \[({others})\]"
    ) as refusal:
        transfer.export_records(
            jax.device_put(pages),
            side.page_ids,
            side.plan,
            48,
            implementation=implementation,
            verify_replicas=True,
        )
    assert f"layer layers.0 head {head} field v, token {token}" in str(refusal.value)


@pytest.mark.parametrize("rank", range(6))
def test_a_byte_that_differs_is_found_on_any_rank_and_in_any_row(
    build, implementation, rank
):
    side = build.side(Topology(6), heads=2, num_tokens=8)
    for entry in side.plan.envelope(rank).entries:
        for token in range(8):
            pages = np.array(side.pages)
            at = entry.address(token % 4) + entry.nbytes - 1
            pages[rank, side.page_ids[token // 4], at] ^= 4
            with pytest.raises(errors.CorruptPage, match=f"token {token}"):
                transfer.export_records(
                    jax.device_put(pages),
                    side.page_ids,
                    side.plan,
                    8,
                    implementation=implementation,
                    verify_replicas=True,
                )


def test_token_shards_that_hold_one_state_are_named_with_each_other(implementation):
    (group,) = group_layers(
        [kinds.mamba2("a", 0, heads=2, head_dim=4, groups=2, state=4, conv_kernel=2)],
        page_size=4,
    )
    plan = canonical.plan(group, Topology(2, 2))
    pages = np.zeros((4, 3, plan.page_nbytes), np.uint8)
    entry = plan.envelope(3).entries[0]
    pages[3, 1, entry.offset] = 9
    with pytest.raises(errors.CorruptPage) as refusal:
        transfer.export_records(
            jax.device_put(pages),
            [0, 1],
            plan,
            2,
            implementation=implementation,
            verify_replicas=True,
        )
    ranks = re.search(r"rank (\d) differs from ranks \[(\d)\]", str(refusal.value))
    assert {int(rank) for rank in ranks.groups()} == {2, 3}
    assert "token 1" in str(refusal.value)
