"""Holders of one head are compared, and who differs is named."""

import jax
import numpy as np
import pytest

from kvmem import errors, transfer
from kvmem.geometry import Topology


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
