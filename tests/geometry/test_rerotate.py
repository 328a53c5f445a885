"""Re-rotation on the host: exact, in its window, and refused where it means nothing."""

import dataclasses

import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, Part, Rope, kinds, np_dtype, rerotate, rope

INTERLEAVED = Rope(style="interleaved", offset=24, width=8)
SCALED = {
    "plain": Rope(500_000.0),
    "linear": rope.linear(10_000.0, 64, 4.0),
    "llama3": rope.llama3(500_000.0, 64, 8.0, 1.0, 4.0, 8192),
    "yarn": rope.yarn(10_000.0, 64, 32.0, 4096),
    "low band by 32": Rope(
        frequencies=tuple(
            10_000.0 ** (-i / 32) / (32 if i > 16 else 1) for i in range(32)
        )  # fmt: skip
    ),
}


def encode(rows, facts, places):
    """Rotate f64 rows [n, D] by complex numbers, magnitude and all."""
    window = facts.window(rows.shape[-1])
    part = rows[:, window.start : window.stop].astype(np.float64)
    half = len(window) // 2
    if facts.style == "half":
        x, y = part[:, :half], part[:, half:]
    else:
        x, y = part[:, 0::2], part[:, 1::2]
    angle = places[:, None] * facts.inverse_frequencies(rows.shape[-1])
    turned = (x + 1j * y) * np.exp(1j * angle) * facts.magnitude
    found = rows.astype(np.float64).copy()
    into = found[:, window.start : window.stop]
    if facts.style == "half":
        into[:, :half], into[:, half:] = turned.real, turned.imag
    else:
        into[:, 0::2], into[:, 1::2] = turned.real, turned.imag
    return found


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype, most", [("bfloat16", 2e-2), ("float32", 1e-5)])
def test_a_window_turns_and_the_content_keeps_its_bits(dtype, most):
    rng = np.random.default_rng(1)
    old, new = rng.integers(0, 4096, (2, 64))
    rows = normal(64, 32).astype(np_dtype(dtype))
    found = rerotate.by_delta(rows, INTERLEAVED, new - old)
    assert found.dtype == rows.dtype
    assert np.array_equal(found[:, :24].view(np.uint8), rows[:, :24].view(np.uint8))
    exact = encode(rows.astype(np.float64), INTERLEAVED, new - old)
    assert np.abs(found.astype(np.float64) - exact).max() < most


def test_chunks_move_by_their_own_distances():
    starts = np.array([[128, 640], [512, 96]])
    rows = normal(2, 2, 8, 32, seed=2)  # chunk, layer, row
    for chunk, (old, new) in enumerate(starts):
        places = np.full(8, new - old)
        for layer in range(2):
            found = rerotate.by_delta(rows[chunk, layer], INTERLEAVED, places)
            exact = encode(rows[chunk, layer], INTERLEAVED, places)
            assert np.abs(found - exact).max() < 1e-5
            assert np.array_equal(found[:, :24], rows[chunk, layer][:, :24])


@pytest.mark.case("ROP-06")
@pytest.mark.parametrize("name", SCALED)
def test_a_turn_is_what_an_encoding_at_the_new_place_gives(name):
    facts = SCALED[name]
    fresh, old = normal(64, 64), np.arange(64) * 60
    new = np.random.default_rng(3).integers(0, 131_072, 64)
    stored = encode(fresh, facts, old).astype(np.float32)
    found = rerotate.by_delta(stored, facts, new - old)
    want = encode(fresh, facts, new)
    assert np.abs(found - want).max() < 1e-5 * max(1.0, np.abs(want).max())


@pytest.mark.case("ROP-04")
def test_no_distance_is_no_change_and_there_and_back_is_where_it_was():
    rows = normal(16, 64)
    rows[0, 0] = -0.0
    plain = Rope(100.0)
    same = rerotate.by_delta(rows, plain, 0)
    assert same.tobytes() == rows.tobytes()
    there = rerotate.by_delta(rows, plain, 10 - 3)
    assert np.abs(there - rows).max() > 0.1
    assert np.abs(rerotate.by_delta(there, plain, 3 - 10) - rows).max() < 1e-5
    unrotated = LayerSpec("a", 0, head_dim=64, rope=None)
    assert rerotate.turns(unrotated) == ()  # declared so: never turned


def test_no_rows_turn_to_none():
    none = rerotate.by_delta(normal(0, 3, 64), Rope(), np.zeros(0, int))
    assert none.shape == (0, 3, 64)


def test_two_turns_are_one():
    rows, facts = normal(16, 64), SCALED["llama3"]
    twice = rerotate.by_delta(rerotate.by_delta(rows, facts, 300), facts, -1111)
    assert np.abs(twice - rerotate.by_delta(rows, facts, -811)).max() < 1e-5


def test_the_pairing_is_heeded():
    rows = normal(8, 64)
    half = rerotate.by_delta(rows, Rope(100.0), 5)
    other = rerotate.by_delta(rows, Rope(100.0, style="interleaved"), 5)
    assert np.abs(half - other).max() > 0.1


def test_a_magnitude_stays_in_a_row_once():
    facts = SCALED["yarn"]
    fresh = normal(8, 64)
    stored = encode(fresh, facts, np.full(8, 7)).astype(np.float32)
    found = rerotate.by_delta(stored, facts, 1000)
    ratio = np.linalg.norm(found, axis=1) / np.linalg.norm(fresh, axis=1)
    assert np.allclose(ratio, facts.magnitude, rtol=1e-5)
    assert facts.magnitude > 1.3


def test_a_turn_in_float32_loses_less_than_bf16_steps_do():
    facts, rng = Rope(), np.random.default_rng(4)
    rows = normal(512, 64).astype(np_dtype("bfloat16"))
    delta = rng.integers(-4095, 4096, 512)
    exact = encode(rows.astype(np.float64), facts, delta)
    found = rerotate.by_delta(rows, facts, delta).astype(np.float64)
    rms = np.sqrt(((found - exact) ** 2).mean())
    assert rms < 0.003  # rounding to bf16 alone is 0.0017


def mla(rope_facts, rank=512, dim=64):
    row = Part("latent", 0, rank + dim, "bfloat16")
    return LayerSpec(
        "a",
        0,
        kind="mla",
        head_dim=rank + dim,
        rope=rope_facts,
        parts=(row,),
        scale=1.0,
    )


def test_windows_of_a_latent_and_of_heads():
    tail = Rope(offset=512, width=64, style="interleaved")
    (turn,) = rerotate.turns(mla(tail))
    assert (turn.field.rows, turn.field.head_nbytes // 2) == (1, 576)
    assert (turn.rope.offset, turn.rope.width) == (512, 64)
    (turn,) = rerotate.turns(LayerSpec("a", 0, kv_heads=8, head_dim=64, rope=Rope()))
    assert (turn.field.name, turn.field.rows, turn.rope.offset) == ("k", 8, 0)
    split = kinds.latent(
        "a", 0, rank=512, rope_dim=64, scale=1.0, fp8=True, rope=Rope()
    )
    (turn,) = rerotate.turns(split)
    assert (turn.field.name, turn.scales) == ("rope", None)
    assert (turn.rope.offset, turn.rope.width) == (0, 64)


FP8 = "float8_e4m3fn"
INDEXER = kinds.indexer("a", 0, dim=128, rope=Rope(width=64))
REFUSED = {
    "a window before the tail": (
        mla(Rope(offset=500, width=64)), "the window is .500, 564"),
    "a latent of undeclared window": (mla(None), "no window is declared in its mla"),
    "a latent turned as a whole": (mla(Rope()), "rotated at its tail"),
    "heads with a latent's window": (
        LayerSpec("a", 0, head_dim=64, rope=Rope(offset=512, width=64)),
        "lies inside its row"),
    "a Hadamard mix": (
        dataclasses.replace(INDEXER, rope=Rope(width=64, kind="hadamard")),
        "mixed by a Hadamard matrix"),
    "index keys whose scale serves other dims too": (
        INDEXER, "a scale serves 128 dims, and the window .0, 64. ends inside"),
    "index keys of no declared rope": (
        kinds.indexer("a", 0, dim=128), "no window is declared in its indexer rows"),
    "several axes": (
        LayerSpec("a", 0, head_dim=64, rope=Rope(kind="multi_axis")), "several axes"),
    "a scale that follows the length": (
        LayerSpec("a", 0, head_dim=64, rope=Rope(kind="length_scaled")),
        "change with the length"),
    "a state": (
        kinds.mamba2("a", 0, heads=4, head_dim=3, groups=2, state=5, conv_kernel=4),
        "no rows that stand at a place"),
    "a window over two fields": (
        LayerSpec("a", 0, kind="mla", head_dim=16, rope=Rope(offset=4, width=12),
                  parts=(Part("x", 0, 8, "float32"), Part("y", 0, 8, "float32")),
                  scale=1.0), "lies in no one field"),
    "values before keys": (
        LayerSpec("a", 0, head_dim=64, rope=Rope(), parts=(
            Part("v", 1, 64, "bfloat16"),)), "lies in no one field"),
    "scales of keys and of values behind both": (
        LayerSpec("a", 0, head_dim=64, rope=Rope(), parts=(
            Part("k", 1, 64, FP8), Part("v", 1, 64, FP8),
            Part("k_scale", 1, 2, "float32", is_scale=True),
            Part("v_scale", 1, 2, "float32", is_scale=True))),
        "scales 'k_scale' and 'v_scale' stand behind rows 'k' and 'v'"),
    "one scale for all heads": (
        LayerSpec("a", 0, kv_heads=2, head_dim=64, rope=Rope(), parts=(
            Part("k", 2, 64, FP8), Part("s", 0, 1, "float32", is_scale=True),
            Part("v", 2, 64, FP8))), "1 x 1 scales serve no equal blocks of 2 x 64"),
    "scales of unequal blocks": (
        LayerSpec("a", 0, head_dim=64, rope=Rope(), parts=(
            Part("k", 1, 64, FP8), Part("s", 1, 3, "float32", is_scale=True),
            Part("v", 1, 64, FP8))), "1 x 3 scales serve no equal blocks of 1 x 64"),
}  # fmt: skip


@pytest.mark.case("ROP-07")
def test_scales_behind_a_rotated_part_are_those_of_the_quantised_rows():
    """DeepSeek V4's 584 bytes: 448 of fp8, 64 rotated in bf16, then the scales."""
    parts = (
        Part("latent", 0, 448, FP8),
        Part("rope", 0, 64, "bfloat16"),
        Part("scale", 0, 8, "float8_e8m0fnu", is_scale=True),
    )
    tail = Rope(offset=448, width=64, style="interleaved")
    layer = LayerSpec(
        "a", 0, kind="mla", head_dim=512, rope=tail, parts=parts, scale=1.0
    )
    (turn,) = rerotate.turns(layer)
    assert (turn.field.name, turn.scales, turn.rope.offset) == ("rope", None, 0)


@pytest.mark.case("ROP-03")
@pytest.mark.case("ROP-06")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_turned_is_refused_with_the_reason(what):
    layer, reason = REFUSED[what]
    with pytest.raises(errors.IncompatiblePlan, match=reason) as refusal:
        rerotate.turns(layer)
    assert "layer 'a'" in str(refusal.value)


def test_index_keys_that_are_neither_mixed_nor_quantised_turn():
    plain = kinds.indexer("a", 0, dim=128, dtype="bfloat16", rope=Rope(width=64))
    (turn,) = rerotate.turns(plain)
    assert (turn.field.name, turn.rope.width) == ("key", 64)
