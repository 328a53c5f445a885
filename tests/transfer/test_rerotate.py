"""Records turned to another place: keys alone change, and as a fresh encoding would."""

import dataclasses

import numpy as np
import pytest

from kvmem import canonical, errors, transfer
from kvmem.geometry import (
    LayerSpec,
    Part,
    Rope,
    group_layers,
    kinds,
    np_dtype,
    quantise,
    rerotate,
)

FP8 = "float8_e4m3fn"
ROPE = Rope(theta=100.0)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def only(*layers, page_size=4):
    (group,) = group_layers(layers, page_size)
    return group


def columns(group, layer, name):
    """Return bool[record]: the bytes of one field, by the canonical page."""
    held = np.zeros(group.record_nbytes, bool)
    for entry in canonical.canonical_envelope(group, 1).entries:
        if (entry.field.layer, entry.field.name) == (layer, name):
            held[entry.offset : entry.offset + entry.nbytes] = True
    return held


def of(group, records, layer, name, dtype):
    """Return a field of every record, elements end to end."""
    held = records[:, columns(group, layer, name)]
    return np.ascontiguousarray(held).view(np_dtype(dtype))


@pytest.mark.case("ROP-01")
def test_a_joined_fragment_is_as_if_it_had_been_encoded_there():
    spec = LayerSpec("a", 0, kv_heads=2, head_dim=8, rope=ROPE)
    group, keys, values = only(spec), normal(7, 2, 8), normal(7, 2, 8, seed=1)

    def encoded(places, rows):
        cell = [rerotate.by_delta(keys[rows], ROPE, places), values[rows]]
        return np.stack(cell, axis=2).reshape(len(places), -1).view(np.uint8)

    first, second = encoded(np.arange(3), slice(0, 3)), encoded(
        np.arange(4), slice(3, 7))  # fmt: skip
    both = np.concatenate([first, second])
    moved = transfer.rerotate(both, group, np.array([0, 0, 0, 3, 3, 3, 3]))
    fresh = encoded(np.arange(7), slice(0, 7))
    assert np.array_equal(moved[:3], first)
    k, v = columns(group, "a", "k"), columns(group, "a", "v")
    assert np.array_equal(moved[:, v], both[:, v])
    found = of(group, moved, "a", "k", "float32")
    assert np.abs(found - of(group, fresh, "a", "k", "float32")).max() < 1e-5
    assert not np.array_equal(moved[3:, k], both[3:, k])


@pytest.mark.case("ROP-03")
def test_rows_that_are_not_rotated_keep_their_bytes_at_every_place(oracle):
    group = only(LayerSpec("a", 0, kv_heads=2, head_dim=8))
    records = oracle.stream(4 * group.record_nbytes).reshape(4, -1)
    assert np.array_equal(transfer.rerotate(records, group, 9), records)


@pytest.mark.case("ROP-04")
def test_no_distance_changes_no_byte_and_the_given_records_stay(oracle):
    group = only(LayerSpec("a", 0, kv_heads=2, head_dim=8, rope=ROPE))
    records = normal(4, 32).view(np.uint8)
    before = records.copy()
    same = transfer.rerotate(records, group, np.zeros(4, np.int64))
    assert np.array_equal(same, before) and same is not records
    there = transfer.rerotate(records, group, 7)
    assert np.array_equal(records, before)
    back = transfer.rerotate(there, group, -7)
    assert np.abs(back.view(np.float32) - before.view(np.float32)).max() < 1e-5


def test_a_latents_content_and_every_other_layer_keep_their_bits():
    tail = dataclasses.replace(ROPE, style="interleaved")
    layers = [
        kinds.latent("a", 0, rank=128, rope_dim=8, scale=1.0, rope=tail),
        kinds.latent("b", 1, rank=128, rope_dim=8, scale=1.0, rope=tail, fp8=True),
    ]
    group = only(*layers)
    records = np.concatenate(
        [
            normal(5, 136).astype(np_dtype("bfloat16")).view(np.uint8),
            normal(5, 128).astype(np_dtype(FP8)).view(np.uint8),
            np.full((5, 1), 0.5, np.float32).view(np.uint8),
            normal(5, 8, seed=2).astype(np_dtype("bfloat16")).view(np.uint8),
        ],
        axis=1,
    )
    moved = transfer.rerotate(records, group, 640)
    window = np.zeros(group.record_nbytes, bool)
    window[256:272] = True
    window |= columns(group, "b", "rope")
    assert np.array_equal(moved[:, ~window], records[:, ~window])
    rows = of(group, records, "b", "rope", "bfloat16")
    want = rerotate.by_delta(rows, dataclasses.replace(tail, width=8), 640)
    found = of(group, moved, "b", "rope", "bfloat16")
    assert np.array_equal(found.view(np.uint8), want.view(np.uint8))
    assert not np.array_equal(found.view(np.uint8), rows.view(np.uint8))


def scaled(blocks, dim=64, scale_dtype="float32", rope=ROPE):
    parts = []
    for name in ("k", "v"):
        parts.append(Part(name, 2, dim, FP8))
        parts.append(Part(f"{name}_scale", 2, blocks, scale_dtype, True))
    return LayerSpec(
        "a", 0, kv_heads=2, head_dim=dim, dtype=FP8, rope=rope, parts=tuple(parts)
    )


def quantised(group, blocks, dim, scale_dtype, seed=0):
    """Return records of quantised rows, and the rows: f32[n, head, k/v, dim]."""
    rows = normal(6, 2, 2, dim, seed=seed) * 30
    values, scales = quantise.quantise(rows, FP8, scale_dtype, blocks)
    cells = [values.view(np.uint8), scales.view(np.uint8)]
    cells[1] = np.ascontiguousarray(cells[1]).reshape(6, 2, 2, -1)
    return np.concatenate(cells, axis=3).reshape(6, -1), values, scales


@pytest.mark.case("ROP-07")
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
def test_quantised_keys_are_turned_with_new_scales(blocks, scale_dtype):
    group = only(scaled(blocks, scale_dtype=scale_dtype))
    records, values, scales = quantised(group, blocks, 64, scale_dtype)
    moved = transfer.rerotate(records, group, 7)
    back = moved.reshape(6, 2, 2, -1)
    item = scales.dtype.itemsize
    new = np.ascontiguousarray(back[..., :64]).view(np_dtype(FP8))
    new_scales = np.ascontiguousarray(back[..., 64:]).view(np_dtype(scale_dtype))
    assert new_scales.shape[-1] == blocks and item in (1, 4)
    exact = rerotate.by_delta(quantise.dequantise(values, scales), ROPE, 7)
    found = quantise.dequantise(new, new_scales)
    largest = np.abs(exact.reshape(6, 2, 2, blocks, -1)).max(axis=-1)
    steps = np.maximum(np.abs(exact) / 8, largest.repeat(64 // blocks, -1) / 448)
    assert (np.abs(found - exact) <= 2 * steps)[:, :, 0].all()
    assert np.array_equal(back[:, :, 1], records.reshape(6, 2, 2, -1)[:, :, 1])
    assert not np.array_equal(back[:, :, 0, 64:], records.reshape(6, 2, 2, -1)[
        :, :, 0, 64:])  # fmt: skip


def test_blocks_outside_of_the_window_keep_values_and_scales():
    group = only(scaled(2, rope=Rope(theta=100.0, offset=32, width=32)))
    records, *_ = quantised(group, 2, 64, "float32")
    moved = transfer.rerotate(records, group, 7).reshape(6, 2, 2, -1)
    before = records.reshape(6, 2, 2, -1)
    kept = np.r_[0:32, 64:68]  # the first block's values and scale
    assert np.array_equal(moved[:, :, 0][..., kept], before[:, :, 0][..., kept])
    assert not np.array_equal(moved[:, :, 0, 32:64], before[:, :, 0, 32:64])


def test_fp8_keys_without_scales_saturate():
    group = only(
        LayerSpec("a", 0, head_dim=2, dtype=FP8, rope=Rope(frequencies=(1.0,)))
    )
    records = np.full((1, 4), 448.0, np.float32).astype(np_dtype(FP8)).view(np.uint8)
    moved = transfer.rerotate(records, group, 1).view(np_dtype(FP8))
    found = moved.astype(np.float32)[0]
    assert found.tolist() == [-128.0, 448.0, 448.0, 448.0]
    assert np.isfinite(found).all()


def test_layers_turn_by_their_own_frequencies():
    local, far = Rope(100.0), Rope(10_000.0)
    group = only(
        LayerSpec("a", 0, head_dim=8, rope=local),
        LayerSpec("b", 1, head_dim=8, rope=far),
    )
    rows = normal(3, 4, 8)
    moved = transfer.rerotate(rows.reshape(3, -1).view(np.uint8), group, 50)
    found = moved.view(np.float32).reshape(3, 4, 8)
    assert np.array_equal(found[:, 0], rerotate.by_delta(rows[:, 0], local, 50))
    assert np.array_equal(found[:, 2], rerotate.by_delta(rows[:, 2], far, 50))
    assert np.array_equal(found[:, 1::2], rows[:, 1::2])


def test_every_layer_that_cannot_be_turned_is_named(oracle):
    group = only(
        *(
            LayerSpec(f"a{i}", i, head_dim=8, rope=Rope(kind=kind))
            for i, kind in enumerate(("plain", "multi_axis", "length_scaled"))
        )
    )
    records = oracle.stream(group.record_nbytes).reshape(1, -1)
    with pytest.raises(errors.IncompatiblePlan) as refusal:
        transfer.rerotate(records, group, 1)
    said = str(refusal.value)
    assert "'a1': pairs turn by places along several axes" in said
    assert "'a2': frequencies change with the length" in said
    assert "'a0'" not in said


@pytest.mark.parametrize(
    "records, delta, law",
    [
        (np.zeros((2, 63), np.uint8), 1, "a record of this group is u8.64."),
        (np.zeros((2, 16), np.float32), 1, "a record of this group"),
        (np.zeros((2, 64), np.uint8), [1, 2, 3], "a distance is an integer"),
        (np.zeros((2, 64), np.uint8), 0.5, "a distance is an integer"),
        ([[0] * 64] * 2, 1, "records are an array of bytes"),
        (
            np.zeros((2, 64), np.uint8),
            np.array([3, 3], np.uint32) - np.array([1, 5], np.uint32),
            "unsigned ones that are subtracted wrap",
        ),
    ],
)
def test_what_is_no_record_or_distance_is_refused(records, delta, law):
    group = only(LayerSpec("a", 0, head_dim=8, rope=ROPE))
    with pytest.raises(errors.FormatMismatch, match=law):
        transfer.rerotate(records, group, delta)


def test_no_thread_turns_nothing():
    group = only(LayerSpec("a", 0, head_dim=8, rope=ROPE))
    with pytest.raises(errors.ConfigError, match="threads = 0"):
        transfer.rerotate(np.zeros((2, 64), np.uint8), group, 1, threads=0)


def test_no_quantised_records_are_turned_to_none():
    group = only(kinds.mxfp8(LayerSpec("a", 0, head_dim=32, rope=ROPE)))
    none = np.zeros((0, group.record_nbytes), np.uint8)
    assert transfer.rerotate(none, group, 5).shape == none.shape


@pytest.mark.case("ROP-07")
def test_a_rotated_part_before_scales_turns_and_they_stay(oracle):
    parts = (
        Part("latent", 0, 8, FP8),
        Part("rope", 0, 4, "float32"),
        Part("scale", 0, 4, "float8_e8m0fnu", is_scale=True),
    )
    tail = Rope(theta=100.0, offset=8, width=4)
    spec = LayerSpec("a", 0, kind="mla", head_dim=12, rope=tail, parts=parts, scale=1.0)
    group = only(spec)
    rows = np.zeros((3, group.record_nbytes), np.uint8)
    rows[...] = oracle.stream(rows.size).reshape(rows.shape)
    keys = normal(3, 4)
    rows[:, 8:24] = keys.view(np.uint8)
    moved = transfer.rerotate(rows, group, 7)
    turned = rerotate.by_delta(keys, Rope(theta=100.0), 7)
    assert np.array_equal(moved[:, 8:24].copy().view(np.float32), turned)
    assert np.array_equal(
        np.delete(moved, np.s_[8:24], 1), np.delete(rows, np.s_[8:24], 1)
    )


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("delta", [9, np.array([1, 0, -5, 7, 300, 0, 2])])
def test_threads_share_every_row_among_them(threads, delta):
    """Seven rows are no multiple of any; more threads than rows do no harm."""
    group = only(LayerSpec("a", 0, kv_heads=2, head_dim=8, rope=ROPE))
    records = normal(7, 32).view(np.uint8)
    alone = transfer.rerotate(records, group, delta)
    assert (alone[-1] != records[-1]).any()
    shared = transfer.rerotate(records, group, delta, threads=threads)
    assert np.array_equal(shared, alone)
