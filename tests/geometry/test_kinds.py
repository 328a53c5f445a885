"""Kinds: the bytes of latents, index keys and recurrent states, by public geometry."""

import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers, kinds


def nbytes(layer):
    return sum(field.token_nbytes for field in layer.fields)


def test_a_latent_is_one_row_a_token_on_every_rank():
    layer = kinds.latent("l", 0, rank=512, rope_dim=64, scale=0.1)
    (field,) = layer.fields
    assert (field.heads, field.head_nbytes) == (0, 1152)
    assert [Topology(tp).shard(field, tp - 1) for tp in (1, 4)] == [(0, 1), (0, 1)]


def test_fp8_latents_carry_their_scales_and_an_unquantised_tail():
    layer = kinds.latent("l", 0, rank=512, rope_dim=64, scale=0.1, fp8=True)
    assert [f.head_nbytes for f in layer.fields] == [512, 16, 128]
    assert nbytes(layer) == 656


def test_an_index_key_takes_128_bytes_and_a_scale_of_4():
    assert nbytes(kinds.indexer("i", 0, dim=128)) == 132
    with pytest.raises(errors.ConfigError, match="multiple of 128"):
        kinds.indexer("i", 0, dim=96)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_qwen3_next_state_divides_by_its_heads(tp):
    layers = [
        kinds.gated_delta(
            f"s{i}",
            i,
            key_heads=16,
            value_heads=32,
            key_dim=128,
            value_dim=128,
            conv_kernel=4,
        )
        for i in range(36)
    ]
    (group,) = group_layers(layers, 64)
    assert envelope.build(group, Topology(tp), 0).nbytes == 77_266_944 // tp


def test_kimi_and_mamba_states_have_the_sizes_of_their_configs():
    kimi = [
        kinds.kda(f"s{i}", i, heads=32, head_dim=128, conv_kernel=4) for i in range(20)
    ]
    assert sum(map(nbytes, kimi)) == 43_417_600
    mamba = kinds.mamba2(
        "m", 0, heads=8, head_dim=64, groups=2, state=128, conv_kernel=4
    )
    assert nbytes(mamba) == (8 * 64 + 2 * 2 * 128) * 3 * 2 + 8 * 64 * 128 * 4


def test_keys_and_values_in_mxfp8_have_a_power_of_two_a_block():
    plain = LayerSpec("l", 0, kv_heads=8, head_dim=128, v_head_dim=64, dtype="bfloat16")
    fields = kinds.mxfp8(plain).fields
    assert [(f.name, f.heads, f.head_nbytes, f.is_scale) for f in fields] == [
        ("k", 8, 128, False),
        ("k_scale", 8, 4, True),
        ("v", 8, 64, False),
        ("v_scale", 8, 2, True),
    ]
    with pytest.raises(errors.ConfigError, match="one scale serves 32 elements"):
        kinds.mxfp8(LayerSpec("l", 0, head_dim=48))
    with pytest.raises(errors.ConfigError, match="kind 'mla' in mxfp8"):
        kinds.mxfp8(kinds.latent("l", 0, rank=32, rope_dim=32, scale=0.1))
