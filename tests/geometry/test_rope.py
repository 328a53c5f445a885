"""Rope facts: windows, scalings by hand, and what cannot be turned again."""

import math

import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import Rope, rope


def test_linear_scaling_divides_every_frequency():
    scaled = rope.linear(10_000.0, 64, 4.0).inverse_frequencies(64)
    assert np.allclose(scaled, Rope().inverse_frequencies(64) / 4, rtol=1e-12)


def test_llama3_keeps_stretches_and_blends_bands():
    base = Rope(500_000.0).inverse_frequencies(128)
    scaled = rope.llama3(500_000.0, 128, 8.0, 1.0, 4.0, 8192).inverse_frequencies(128)
    wavelengths = 2 * math.pi / base
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert np.allclose(scaled[short], base[short], rtol=1e-12)
    assert np.allclose(scaled[long], base[long] / 8, rtol=1e-12)
    middle = ~short & ~long
    smooth = (8192 / wavelengths[middle] - 1) / 3
    want = (1 - smooth) * base[middle] / 8 + smooth * base[middle]
    assert middle.any() and np.allclose(scaled[middle], want, rtol=1e-12)


def test_yarn_ramps_between_pairs_that_turn_often_and_seldom():
    made = rope.yarn(10_000.0, 64, 32.0, 4096)
    base, scaled = Rope().inverse_frequencies(64), made.inverse_frequencies(64)

    def at(turns):
        return 64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10_000))

    low, high = math.floor(at(32)), math.ceil(at(1))
    pairs = np.arange(32)
    assert np.allclose(scaled[pairs <= low], base[pairs <= low])
    assert np.allclose(scaled[pairs >= high], base[pairs >= high] / 32)
    inside = (pairs > low) & (pairs < high)
    share = (pairs[inside] - low) / (high - low)
    want = base[inside] * (1 - share) + base[inside] / 32 * share
    assert np.allclose(scaled[inside], want, rtol=1e-12)
    assert made.magnitude == pytest.approx(1.3466, abs=5e-5)
    assert made.magnitude**2 == pytest.approx(1.8133, abs=5e-5)


@pytest.mark.case("ROP-06")
@pytest.mark.parametrize("truncate", [True, False])
def test_yarns_ramp_begins_and_ends_at_whole_pairs_or_between_them(truncate):
    """GPT-OSS says "truncate": false; the ramp is then a little steeper."""
    theta, width, factor, length = 150_000.0, 64, 32.0, 4096
    made = rope.yarn(theta, width, factor, length, truncate=truncate)
    low, high = (
        width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (32.0, 1.0)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    for pair, found in enumerate(made.inverse_frequencies(width)):
        plain = theta ** (-2 * pair / width)
        slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
        want = plain * (1 - slowed) + plain / factor * slowed
        assert found == pytest.approx(want, rel=1e-12)


def test_yarns_magnitude_is_declared_or_follows_from_its_scales():
    assert rope.yarn(1e4, 64, 40.0, 4096, attention_factor=1.25).magnitude == 1.25
    both = rope.yarn(1e4, 64, 40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert both.magnitude == 1.0
    assert rope.yarn(1e4, 64, 0.5, 4096).magnitude == 1.0


@pytest.mark.parametrize(
    "made, row",
    [(Rope(offset=-2), 8), (Rope(offset=6, width=4), 8), (Rope(width=3), 8)],
)
def test_a_window_is_even_and_inside_its_row(made, row):
    with pytest.raises(errors.ConfigError, match="even and lies inside"):
        made.window(row)
    assert Rope(offset=2, width=4).window(8) == range(2, 6)


def test_what_is_done_besides_is_known_by_name():
    assert Rope(kind="hadamard").kind == "hadamard"
    with pytest.raises(errors.ConfigError, match="plain, hadamard, multi_axis"):
        Rope(kind="dynamic")


@pytest.mark.case("ROP-06")
@pytest.mark.parametrize(
    "wrong",
    [
        {"theta": 0.0},
        {"theta": math.nan},
        {"magnitude": math.inf},
        {"magnitude": 0.0},
        {"frequencies": (1.0, math.nan)},
    ],
)
def test_facts_that_would_turn_keys_into_nan_are_refused(wrong):
    with pytest.raises(errors.ConfigError, match="are finite"):
        Rope(**wrong)
    assert Rope(frequencies=(0.0, 0.0)).inverse_frequencies(4).tolist() == [0, 0]


@pytest.mark.case("ROP-06")
@pytest.mark.parametrize("factor", [0.0, -2.0, math.nan, math.inf])
def test_no_scaling_is_by_nothing(factor):
    for scaled in (
        lambda: rope.linear(1e4, 8, factor),
        lambda: rope.llama3(1e4, 8, factor, 1.0, 4.0, 8192),
        lambda: rope.yarn(1e4, 8, factor, 4096),
    ):
        with pytest.raises(errors.ConfigError, match="scaled by a factor of"):
            scaled()
    with pytest.raises(errors.ConfigError, match="from 4.0 to 4.0"):
        rope.llama3(1e4, 8, 8.0, 4.0, 4.0, 8192)
