"""Cut: an envelope larger than a page is parted between its entries."""

import random

import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers, kinds


def state_envelope(layers=3, heads=4):
    specs = [
        kinds.gated_delta(
            f"s{i}",
            i,
            key_heads=heads // 2,
            value_heads=heads,
            key_dim=16,
            value_dim=24,
            conv_kernel=4,
        )
        for i in range(layers)
    ]
    (group,) = group_layers(specs, 16)
    return envelope.build(group, Topology(), 0)


@pytest.mark.parametrize("page", [1536, 2048, 4096, 1 << 20])
def test_every_entry_lies_whole_in_one_extent_and_none_overlap(page):
    whole = state_envelope()
    cut = envelope.cut(whole, page)
    assert cut.nbytes == cut.extents * page
    taken = {}
    for entry in cut.entries:
        assert entry.offset % 16 == 0 and entry.offset + entry.nbytes <= page
        assert 0 <= entry.extent < cut.extents
        for byte in range(entry.offset, entry.offset + entry.nbytes):
            assert taken.setdefault((entry.extent, byte), entry) is entry
    assert len(taken) == whole.payload_nbytes
    assert [e.field for e in cut.entries] == [e.field for e in whole.entries]


def test_extents_waste_less_than_one_entry_each():
    whole = state_envelope()
    largest = max(entry.nbytes for entry in whole.entries)
    cut = envelope.cut(whole, 2048)
    assert cut.nbytes - whole.nbytes < cut.extents * (largest + 16) + 2048


def test_an_entry_that_no_page_holds_is_refused_with_the_page_that_would():
    with pytest.raises(errors.IncompatiblePlan, match="at least 1,536 B"):
        envelope.cut(state_envelope(), 1024)


def test_the_pages_of_tokens_are_never_parted():
    (group,) = group_layers([LayerSpec("l", 0)], 16)
    whole = envelope.build(group, Topology(), 0)
    assert envelope.cut(whole, whole.nbytes).extents == 1
    larger = envelope.cut(whole, whole.nbytes + 4096)
    assert [e.offset for e in larger.entries] == [e.offset for e in whole.entries]
    with pytest.raises(errors.IncompatiblePlan, match=f"at least {whole.nbytes:,} B"):
        envelope.cut(whole, whole.nbytes - 16)


@pytest.mark.parametrize("page", [1, 5, 64])
def test_scales_stand_behind_their_block_at_their_own_width(page):
    layers = [
        kinds.latent("l", 0, rank=128, rope_dim=16, scale=0.1),
        kinds.indexer("i", 0, dim=128),
    ]
    _, group = group_layers(layers, page)
    built = envelope.build(group, Topology(), 0, "layer head field token")
    values, scales = built.entries
    assert (values.offset, scales.offset) == (0, 128 * page)
    assert page == 1 or (values.slot_stride, scales.slot_stride) == (128, 4)
    assert built.nbytes == -(-132 * page // 16) * 16


def test_rows_declared_wider_take_their_room_and_heads_stand_apart():
    spec = LayerSpec("l", 0, kv_heads=2, head_dim=80, stored_head_dim=128)
    (group,) = group_layers([spec], 4)
    built = envelope.build(group, Topology(), 0, "token_major")
    assert [(e.offset, e.nbytes) for e in built.entries][:2] == [
        (0, 320),
        (2048 * 2, 320),
    ]
    assert group.record_nbytes == 2 * 2 * 320
    assert built.nbytes == 4 * 2 * 2 * 512
    with pytest.raises(errors.ConfigError, match="Store at least 320"):
        LayerSpec("l", 0, head_dim=80, stored_head_dim=64).fields  # noqa: B018


def test_no_two_entries_share_a_byte_in_any_order_and_kind():
    rng = random.Random(5)
    for _ in range(20):
        page = rng.choice([1, 3, 16])
        layers = [
            kinds.latent("a", 0, rank=128, rope_dim=10, scale=0.1, fp8=True),
            LayerSpec("b", 1, kv_heads=2, head_dim=6, stored_head_dim=8),
        ]
        (group,) = group_layers(layers, page)
        order = rng.choice(list(envelope.ORDERS))
        built = envelope.build(group, Topology(), 0, order)
        seen = set()
        for entry in built.entries:
            for slot in range(page):
                start = entry.address(slot)
                mine = set(range(start, start + entry.nbytes))
                assert not seen & mine and start + entry.nbytes <= built.nbytes, order
                seen |= mine
