"""Fields, rope facts, topology and groups: what a model keeps of one token."""

import math

import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import (
    LayerSpec,
    Lifecycle,
    LifecycleGroup,
    Rope,
    Topology,
    group_layers,
    np_dtype,
    rope,
)


def spec(index=0, heads=3, **more):
    return LayerSpec(f"l{index}", index, kv_heads=heads, head_dim=64, **more)


def test_fields_come_in_declared_order_with_their_widths():
    k, v = LayerSpec("l0", 0, kv_heads=3, head_dim=64, v_head_dim=32).fields
    assert (k.name, k.heads, k.head_nbytes) == ("k", 3, 256)
    assert (v.name, v.heads, v.head_nbytes) == ("v", 3, 128)
    assert k.token_nbytes == 768


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3fn", 1)],
)
def test_a_dtype_name_decides_the_width(dtype, width):
    assert np_dtype(dtype).itemsize == width
    assert spec(dtype=dtype).fields[0].head_nbytes == 64 * width


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"dtype": "int4"}, "known width"),
        ({"kind": "mla"}, "declare the parts"),
        ({"heads": 0}, "positive width"),
    ],
)
def test_a_layer_that_cannot_be_stored_is_refused(change, phrase):
    with pytest.raises(errors.ConfigError, match=phrase):
        spec(**change)


def test_specs_are_hashable_facts():
    assert hash(spec(rope=Rope(1e5))) == hash(spec(rope=Rope(1e5)))
    assert spec(rope=Rope(1e5)) != spec(rope=Rope(1e4))


@pytest.mark.case("JAX-03")
def test_a_fact_that_cannot_be_hashed_is_refused_when_it_is_made():
    with pytest.raises(errors.ConfigError, match="Rope with a value of .*list"):
        Rope(frequencies=[1.0, 0.5])
    with pytest.raises(errors.ConfigError, match="LayerSpec with a value of"):
        spec(scale=np.ones(3))
    with pytest.raises(errors.ConfigError, match="LifecycleGroup with a value of"):
        LifecycleGroup("full", "target", Lifecycle("full"), [spec()], 16)


def test_a_record_holds_every_head_of_every_layer_once():
    (group,) = group_layers([spec(i) for i in range(30)], 16)
    assert group.record_nbytes == 46_080
    assert [group.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert group.layer("l7").index == 7
    with pytest.raises(errors.InvalidId, match="no layer of that name"):
        group.layer("l30")


def test_layers_are_ordered_by_their_index():
    (group,) = group_layers([spec(2), spec(0), spec(1)], 16)
    assert [layer.index for layer in group.layers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("layers", "error", "phrase"),
    [
        ([], errors.ConfigError, "at least one layer"),
        ([spec(0), spec(0)], errors.ConfigError, "more than once"),
    ],
)
def test_layers_that_make_no_group_are_refused(layers, error, phrase):
    with pytest.raises(error, match=phrase):
        group_layers(layers, 16)


def test_a_group_of_no_domain_or_no_slot_is_refused():
    with pytest.raises(errors.ConfigError, match="target or the draft"):
        group_layers([spec()], 16, domain="teacher")
    with pytest.raises(errors.ConfigError, match="at least one token"):
        group_layers([spec()], 0)


@pytest.mark.parametrize("tp", [1, 3, 9])
def test_every_head_has_holders_and_every_rank_holds_what_they_say(tp):
    field, topology = spec().fields[0], Topology(tp)
    held = {h: topology.holders(field, h) for h in range(3)}
    assert {rank for ranks in held.values() for rank in ranks} == set(range(tp))
    for rank in range(tp):
        start, count = topology.shard(field, rank)
        assert {h for h, ranks in held.items() if rank in ranks} == set(
            range(start, start + count)
        )
    assert len(held[0]) == topology.replicas(field)


def test_adjacent_ranks_hold_the_replicas_of_a_head():
    field, topology = spec().fields[0], Topology(9)
    assert topology.holders(field, 1) == (3, 4, 5)
    assert topology.shard(field, 4) == (1, 1)


def test_ranks_count_token_shards_inside_head_shards():
    topology = Topology(tp=2, dcp=3)
    assert topology.ranks == 6
    assert [topology.tp_index(r) for r in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [topology.dcp_index(r) for r in range(6)] == [0, 1, 2, 0, 1, 2]
    assert topology.holders(spec(heads=2).fields[0], 1) == (3, 4, 5)


@pytest.mark.case("LAY-13")
def test_heads_that_no_rank_can_own_whole_are_refused_with_the_sizes_that_work():
    with pytest.raises(errors.IncompatiblePlan) as refused:
        Topology(4).require(spec(heads=6).fields[0])
    for words in ("6 KV heads", "TP 4", "1, 2, 3, 6", "multiple of 6"):
        assert words in str(refused.value)
    for tp in (1, 2, 3, 6, 12):
        Topology(tp).require(spec(heads=6).fields[0])


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_topology_counts_from_one(bad):
    with pytest.raises(errors.ConfigError, match="counted from one"):
        Topology(tp=bad)


def test_plain_rope_is_a_geometric_series():
    freqs = Rope(theta=100_000.0).inverse_frequencies(64)
    np.testing.assert_allclose(freqs, 100_000.0 ** (-np.arange(32) / 32), rtol=1e-12)


def test_linear_scaling_divides_every_frequency():
    scaled = rope.linear(10_000.0, 64, 4.0).inverse_frequencies(64)
    np.testing.assert_allclose(scaled * 4, Rope(10_000.0).inverse_frequencies(64))


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    scaled = rope.llama3(500_000.0, 128, 8.0, 1.0, 4.0, 8192).inverse_frequencies(128)
    plain = Rope(500_000.0).inverse_frequencies(128)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-12)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-12)
    between = ~short & ~long
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize(
    ("facts", "phrase"),
    [
        ({"style": "zigzag"}, "halves or by neighbours"),
        ({"width": 63}, "even"),
        ({"offset": 32, "width": 64}, "inside its row"),
        ({"frequencies": (1.0, 0.5)}, "32 frequencies"),
    ],
)
def test_rope_facts_that_fit_no_row_are_refused(facts, phrase):
    with pytest.raises(errors.ConfigError, match=phrase):
        Rope(**facts).inverse_frequencies(64)
