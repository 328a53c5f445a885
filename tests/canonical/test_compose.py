"""Copies from one side's pages to another's: tables made elsewhere, then bytes."""

import collections
import itertools

import numpy as np
import pytest

from kvmem import canonical, errors
from kvmem.geometry import Topology
from kvmem.geometry.envelope import ORDERS

NHD, HND = "token_major", "split_hnd"
SHARDED = Topology(tp=2, dcp=2)  # "TP 4, DCP 2" where token shards count inside TP
# source, destination, copies, bytes of each: 2 heads of 64 bytes, 4 slots, 8 tokens
TABLE = [
    ((SHARDED, NHD), (Topology(2), HND), 32, 64),
    ((Topology(2), HND), (SHARDED, NHD), 32, 64),
    ((SHARDED, "packed_nhd"), (Topology(2), "packed_hnd"), 16, 128),
    ((Topology(2), "packed_hnd"), (SHARDED, "packed_nhd"), 16, 128),
    ((Topology(2), "packed_nhd"), (Topology(4), "packed_nhd"), 8, 512),
]


@pytest.mark.parametrize("source, destination, count, nbytes", TABLE)
def test_copies_are_those_of_the_table(build, source, destination, count, nbytes):
    group = build.group(heads=2)
    plans = [canonical.plan(group, *side) for side in (source, destination)]
    copies = canonical.compose(*plans, num_tokens=8)
    assert len(copies) == count
    assert {copy.nbytes for copy in copies} == {nbytes}


def test_the_first_copies_deal_the_shards_tokens_in_turn(build):
    group = build.group(heads=2)
    writer = canonical.plan(group, SHARDED, NHD)
    reader = canonical.plan(group, Topology(2), HND)
    first = canonical.compose(writer, reader, num_tokens=8)[:4]
    assert {(copy.rank, copy.page) for copy in first} == {(0, 0)}
    assert [(c.source_rank, c.source_offset, c.offset) for c in first] == [
        (0, 0, 0),
        (1, 0, 64),
        (0, 64, 128),
        (1, 64, 192),
    ]


SIDES = [
    (Topology(1), "packed_nhd", 4),
    (Topology(2), "head_major", 8),
    (Topology(8), "slot_major", 2),
    (Topology(2, 2, 2), "token_major", 4),
    (Topology(1), "layer | token head field", 1),
    (Topology(16, 3), "packed_hnd", 2),
]


def side_pages(oracle, plan, num_tokens):
    """Return u8[rank][page] with the planes of a page end to end."""
    padded = -(-num_tokens // plan.page_tokens) * plan.page_tokens
    logical = oracle.logical(plan.group, padded)
    order, *inside = plan.order.split("|")
    layers = [[la.name] for la in plan.group.layers] if inside else [None]
    parts = []
    for layer in layers:
        only = {"layer": layer} if inside else {}
        axes = f"{order} {inside[0]}" if inside else order
        parts.append(oracle.pages(plan.group, logical, plan.topology, axes, **only))
    return np.concatenate(parts, axis=2)


@pytest.mark.parametrize(
    "source, destination", list(itertools.product(SIDES, SIDES)), ids=str
)
def test_copies_make_the_pages_of_the_destination(build, oracle, source, destination):
    group, num_tokens = build.group(2, 8, dim=8, v_head_dim=4), 13
    plans = [
        canonical.plan(group, topology, order, page_size)
        for topology, order, page_size in (source, destination)
    ]
    pages, expected = (side_pages(oracle, plan, num_tokens) for plan in plans)
    made, touched = np.zeros_like(expected), np.zeros(expected.shape, int)
    for c in canonical.compose(*plans, num_tokens):
        place = np.s_[c.rank, c.page, c.offset : c.offset + c.nbytes]
        end = c.source_offset + c.nbytes
        made[place] = pages[c.source_rank, c.source_page, c.source_offset : end]
        touched[place] += 1
    assert touched.max() == 1
    assert np.array_equal(made, np.where(touched, expected, 0))
    plan = plans[1]
    per_token = collections.Counter()
    for rank, topology in enumerate([plan.topology] * plan.topology.ranks):
        heads = topology.shard(group.fields[0], rank).count
        runs = np.arange(num_tokens) // topology.interleave % topology.dcp
        own = int((runs == topology.dcp_index(rank)).sum())
        per_token[rank] = own * heads * group.record_nbytes // 8
    found = {rank: int(touched[rank].sum()) for rank in range(plan.topology.ranks)}
    assert found == dict(per_token)


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_a_pool_into_its_like_is_whole_pages(build, order):
    plan = canonical.plan(build.group(heads=2), Topology(2), order)
    copies = canonical.compose(plan, plan, num_tokens=8)
    assert len(copies) == 2 * 2
    assert {copy.nbytes for copy in copies} == {plan.page_nbytes}


def test_nothing_is_copied_without_tokens(build):
    plan = canonical.plan(build.group(), Topology(2))
    assert canonical.compose(plan, plan, num_tokens=0) == ()


def test_plans_of_two_models_are_refused(build):
    a = canonical.plan(build.group(heads=4), Topology(2))
    b = canonical.plan(build.group(heads=8), Topology(2))
    with pytest.raises(errors.FormatMismatch, match="plans of one format") as refusal:
        canonical.compose(a, b, num_tokens=8)
    assert "Make both plans from one model's group" in str(refusal.value)


@pytest.mark.parametrize("num_tokens", [1, 5, 7, 9])
def test_holders_take_turns_as_sources(build, oracle, num_tokens):
    group = build.group(1, 2, dim=8, v_head_dim=4, page_size=1)
    source = canonical.plan(group, Topology(10), "packed_hnd")
    whole = canonical.plan(group, Topology(1), "slot_major", page_size=16)
    assert source.period == 5
    pages = side_pages(oracle, source, 16)
    expected = side_pages(oracle, whole, 16)
    made, read = np.zeros_like(expected), collections.Counter()
    for c in canonical.compose(source, whole, num_tokens):
        end = c.source_offset + c.nbytes
        made[c.rank, c.page, c.offset : c.offset + c.nbytes] = pages[
            c.source_rank, c.source_page, c.source_offset : end
        ]
        read[c.source_rank] += c.nbytes
    held = whole.envelope(0).entries[0].slot_stride * num_tokens
    assert np.array_equal(made[0, 0, :held], expected[0, 0, :held])
    for holders in (range(5), range(5, 10)):
        alike = [read[rank] for rank in holders]
        assert max(alike) - min(alike) <= 8 * 4
