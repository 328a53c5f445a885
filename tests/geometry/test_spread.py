import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem.errors import IncompatiblePlan
from kvmem.geometry import LayerSpec, Lifecycle, Spread, Topology, group_layers

LAYERS = [
    LayerSpec("full", 0, kv_heads=2, head_dim=8, dtype="float32"),
    LayerSpec("local", 1, kv_heads=2, head_dim=8, dtype="float32", window=8),
]


def groups(page_size=4):
    target = group_layers(LAYERS, page_size)
    return *target, *group_layers(LAYERS[:1], page_size, domain="draft")


@pytest.mark.case("LAY-08")
def test_a_group_that_every_rank_needs_is_not_sharded_by_mistake():
    full, window, draft = (Spread.of(g, Topology(dcp=4)) for g in groups())
    positions = np.arange(16)
    mine = positions[full.owner(positions) == 1]
    assert mine.tolist() == [1, 5, 9, 13]
    assert full.slot(mine).tolist() == [0, 1, 2, 3]
    for whole in (window, draft):
        assert whole.is_whole and whole.shards == 1
        assert (whole.owner(positions) == 0).all()
        np.testing.assert_array_equal(whole.slot(positions), positions)
        assert whole.local_lengths(16) == (16,)


@pytest.mark.case("LAY-09")
@pytest.mark.parametrize(
    ("length", "dcp", "interleave", "lengths"),
    [
        (37, 4, 1, (10, 9, 9, 9)),
        (37, 4, 4, (12, 9, 8, 8)),
        (100, 8, 16, (16,) * 6 + (4, 0)),
    ],
)
def test_local_lengths_with_any_interleave(length, dcp, interleave, lengths):
    assert Spread(dcp, interleave).local_lengths(length) == lengths


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 200))
def test_each_position_has_one_owner_who_keeps_it_at_the_next_free_slot(
    dcp, interleave, length
):
    spread, positions = Spread(dcp, interleave), np.arange(length)
    for shard, count in enumerate(spread.local_lengths(length)):
        mine = positions[spread.owner(positions) == shard]
        assert spread.slot(mine).tolist() == list(range(count))
        np.testing.assert_array_equal(spread.position(np.arange(count), shard), mine)


def test_a_virtual_page_covers_as_many_tokens_in_every_group():
    topology = Topology(tp=2, dcp=4, interleave=2)
    full, window, draft = groups()
    spreads = [Spread.of(group, topology) for group in (full, window, draft)]
    counted = [s.virtual(g) for s, g in zip(spreads, groups(), strict=True)]
    assert [group.page_size for group in counted] == [16] * 3
    assert [s.parts(g) for s, g in zip(spreads, groups(), strict=True)] == [1, 4, 4]


def test_a_state_is_one_page_on_every_token_shard():
    state = dataclasses.replace(groups()[0], lifecycle=Lifecycle("state"))
    spread = Spread.of(state, Topology(dcp=2))
    assert (spread.is_whole, spread.parts(state)) == (True, 1)


def test_without_token_shards_an_interleave_means_nothing():
    assert Spread.of(groups()[0], Topology(tp=2, interleave=3)) == Spread()


def test_an_interleave_that_cuts_a_page_is_refused_where_tokens_are_spread():
    topology = Topology(dcp=2, interleave=3)
    with pytest.raises(IncompatiblePlan, match="Use interleave 1, 2, 4"):
        Spread.of(groups()[0], topology)
    assert Spread.of(groups()[1], topology).is_whole
