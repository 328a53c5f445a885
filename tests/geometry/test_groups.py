"""Groups: layers that live and die together, and those that must stay together."""

import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, group_layers, kinds


def full(index, **facts):
    return LayerSpec(f"l{index}", index, **facts)


def latent(index):
    return kinds.latent(f"l{index}", index, rank=128, rope_dim=16, scale=0.1)


def indexer(index):
    return kinds.indexer(f"l{index}.index", index, dim=128)


def test_layers_are_sorted_by_lifecycle_and_keep_their_order():
    layers = [full(i, window=128 if i % 2 else None) for i in range(6)]
    groups = group_layers(layers, page_size=16)
    assert [(g.name, str(g.lifecycle)) for g in groups] == [
        ("full", "full"),
        ("window128", "window(128)"),
    ]
    assert [[layer.index for layer in g.layers] for g in groups] == [
        [0, 2, 4],
        [1, 3, 5],
    ]


@pytest.mark.case("BUD-07")
def test_a_window_as_long_as_the_longest_text_is_full_attention():
    layers = [full(0, window=511), full(1, window=512), full(2)]
    assert len(group_layers(layers, 16, max_length=511)) == 1
    assert len(group_layers(layers, 16, max_length=512)) == 2
    assert len(group_layers(layers, 16)) == 3


@pytest.mark.case("BUD-06")
def test_a_layer_that_reads_anothers_cache_keeps_none():
    layers = [full(0), full(1, shares="l0"), full(2)]
    (group,) = group_layers(layers, 16)
    assert [layer.name for layer in group.layers] == ["l0", "l2"]
    assert group.record_nbytes == 2 * full(0).fields[0].token_nbytes * 2
    with pytest.raises(errors.ConfigError, match="Share with one of l0"):
        group_layers([full(0), full(1, shares="l7")], 16)
    with pytest.raises(errors.ConfigError, match="Share with one of l0"):
        group_layers([full(0), full(1, shares="l0"), full(2, shares="l1")], 16)


def test_index_keys_are_a_group_tied_to_their_latent():
    groups = group_layers([latent(0), indexer(0), latent(1), indexer(1)], 64)
    assert [(g.name, g.tied_to) for g in groups] == [
        ("full", None),
        ("indexer", "full"),
    ]
    with pytest.raises(errors.ConfigError, match="index and the window of a latent"):
        group_layers([latent(0), indexer(1)], 64)


def test_a_state_group_has_one_slot_a_page_whatever_the_length():
    states = kinds.kda("s", 1, heads=2, head_dim=16, conv_kernel=4)
    _, group = group_layers([full(0), states], 16)
    assert (group.name, group.slots, group.page_size) == ("state", 1, 16)
    assert [group.pages_for(n) for n in (0, 1, 16, 10_000)] == [0, 1, 1, 1]


def test_windows_with_sink_tokens_are_groups_of_their_own():
    layers = [full(0, window=64), full(1, window=64, sinks=4)]
    assert [g.name for g in group_layers(layers, 32)] == ["window64", "window64s4"]
