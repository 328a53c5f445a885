"""Records of latents, index keys, windows and states: pages laid down by hand.

A page here is what its rank holds, field by field, each row padded as pages pad it;
records are slices of the same logical arrays, each row once.
"""

import itertools

import numpy as np
import pytest

from kvmem import canonical
from kvmem.geometry import LayerSpec, Topology, group_layers, kinds

PAGE = 4
LAYERS = {
    "latents": [
        kinds.latent("a", 0, rank=16, rope_dim=8, scale=1.0),
        kinds.latent("b", 1, rank=128, rope_dim=8, scale=1.0, fp8=True),
    ],
    "latents of a sliding window": [
        kinds.latent("a", 0, rank=16, rope_dim=8, scale=1.0, window=32)
    ],
    "index keys": [
        kinds.latent("a", 0, rank=16, rope_dim=8, scale=1.0),
        kinds.indexer("a.indexer", 0, dim=128),
    ],
    "windows and padded heads": [
        LayerSpec("a", 0, kv_heads=2, head_dim=9, window=8),
        LayerSpec("b", 1, kv_heads=2, head_dim=5, stored_head_dim=24, window=8),
    ],
    "states": [
        kinds.mamba2(
            "a", 0, heads=4, head_dim=3, groups=2, state=5, conv_kernel=4
        ),
        kinds.gated_delta(
            "b", 1, key_heads=2, value_heads=4, key_dim=3, value_dim=5, conv_kernel=2
        ),
    ],
}  # fmt: skip
TOPOLOGIES = [
    Topology(1),
    Topology(2),
    Topology(4),
    Topology(8),
    Topology(1, 2),
    Topology(4, 2, 2),
    Topology(2, 3, 4),
]


def groups_of(what):
    return group_layers(LAYERS[what], page_size=PAGE)


def round_up(nbytes):
    return -(-nbytes // 16) * 16


def logical_of(oracle, group, slots):
    return {
        (f.layer, f.name): oracle.stream(
            slots * f.rows * f.head_nbytes, f"{f.layer}/{f.name}"
        ).reshape(slots, f.rows, f.head_nbytes)
        for f in group.fields
    }


def records_of(group, logical):
    """Return u8[slot, record]: layer, head, field; a head that a field lacks is not."""
    parts = []
    for layer in group.layers:
        for head in range(max(field.rows for field in layer.fields)):
            for field in layer.fields:
                if head < field.rows:
                    parts.append(logical[layer.name, field.name][:, head])
    return np.concatenate(parts, axis=1)


def page_of(oracle, group, logical, topology, rank):
    """Return a rank's page in order "layer head field token"."""
    if group.is_state:
        owned = [0]
    elif group.lifecycle.kind == "window":
        owned = range(PAGE)
    else:
        tokens = np.arange(PAGE * topology.dcp)
        mine = tokens // topology.interleave % topology.dcp == rank % topology.dcp
        owned = tokens[mine].tolist()
    page = b""
    for layer in group.layers:
        heads = {
            f.name: [0] if f.heads == 0
            else oracle.heads(f.heads, topology.tp, rank // topology.dcp)
            for f in layer.fields
        }  # fmt: skip
        for at in range(max(map(len, heads.values()))):
            for field in layer.fields:
                if at >= len(heads[field.name]):
                    continue
                head = heads[field.name][at]
                width = field.stored_nbytes or field.head_nbytes
                width = width if field.is_scale else round_up(width)
                for token in owned:
                    row = logical[layer.name, field.name][token, head].tobytes()
                    page += row + bytes(width - len(row))
                page += bytes(round_up(len(page)) - len(page))
    return page


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("what", LAYERS)
def test_every_kind_becomes_the_same_records_at_every_topology(
    build, oracle, what, topology
):
    for group in groups_of(what):
        plan = canonical.plan(group, topology)
        slots = PAGE * (topology.dcp if group.lifecycle.kind == "full" else 1)
        slots = 1 if group.is_state else slots
        assert plan.page_tokens == slots
        logical = logical_of(oracle, group, slots)
        expected = records_of(group, logical)
        gathered = bytearray(expected.size)
        for rank in range(topology.ranks):
            page = page_of(oracle, group, logical, topology, rank)
            assert len(page) == plan.page_nbytes
            build.gather(plan.writers()[rank], page, gathered)
            back = bytearray(len(page))
            build.scatter(plan.runs[rank], expected.tobytes(), back)
            assert back == page
        assert gathered == expected.tobytes()
        assert canonical.check(plan) == ()


@pytest.mark.parametrize("what", LAYERS)
def test_no_topology_is_part_of_a_record(what):
    for group in groups_of(what):
        plans = [canonical.plan(group, topology) for topology in TOPOLOGIES]
        assert len({plan.record_nbytes for plan in plans}) == 1
        ids = {canonical.format_id((plan.group,)) for plan in plans}
        assert len(ids) == 1


def test_every_token_shard_keeps_a_state_and_they_share_its_writing():
    (group,) = groups_of("states")
    whole = canonical.plan(group, Topology(2))
    sharded = canonical.plan(group, Topology(2, 2))
    assert sharded.runs == tuple(
        itertools.chain.from_iterable((runs, runs) for runs in whole.runs)
    )
    written = [sum(r.total_nbytes for r in runs) for runs in sharded.writers()]
    assert sum(written) == group.record_nbytes
    largest = max(field.head_nbytes for field in group.fields)
    for pair in (written[:2], written[2:]):
        assert abs(pair[0] - pair[1]) <= largest


def test_a_recurrent_state_of_eight_ranks_composes_into_one(oracle):
    """Six regions: three convolution tails and the matrices, by value and key heads."""
    layer = kinds.gated_delta(
        "a", 0, key_heads=8, value_heads=8, key_dim=4, value_dim=4, conv_kernel=3
    )
    (group,) = group_layers([layer], page_size=PAGE)
    one = canonical.plan(group, Topology(1))
    for eight in (
        canonical.plan(group, Topology(8)),
        canonical.plan(group, Topology(4, 2)),
    ):
        logical = logical_of(oracle, group, 1)
        pages = [
            page_of(oracle, group, logical, eight.topology, rank)
            for rank in range(eight.topology.ranks)
        ]
        made = bytearray(one.page_nbytes)
        for c in canonical.compose(eight, one, num_tokens=1):
            source = pages[c.source_rank][c.source_offset : c.source_offset + c.nbytes]
            made[c.offset : c.offset + c.nbytes] = source
        assert made == page_of(oracle, group, logical, Topology(1), 0)
