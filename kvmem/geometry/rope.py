"""Rope facts: how the keys of a layer were rotated, as data.

A key is stored after its rotation, so what its bytes mean depends on these facts, and
the format id covers every one of them. They are declared, never inferred from a shape.

    Rope(theta=100_000.0).inverse_frequencies(64)   # f64[32], pair i turns by pos *
    f[i]

Styles: "half" pairs dim i with dim i + width/2; "interleaved" pairs 2i with 2i + 1.
"""

import dataclasses
import math

import numpy as np

from kvmem import errors
from kvmem.geometry import facts

__all__ = ["KINDS", "Rope", "linear", "llama3", "yarn"]

_STYLES = ("half", "interleaved")
# What a rotation is besides plain turns of pairs; each stands in the way of turning a
# stored row again.
KINDS = {
    "plain": None,
    "hadamard": "rows were mixed by a Hadamard matrix after their rotation, so no pair "
    "of dims is left to turn",
    "multi_axis": "pairs turn by places along several axes, and one distance says "
    "nothing of them",
    "length_scaled": "frequencies change with the length of the text, so no one turn "
    "leads from place to place",
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """How one field's rows are rotated by position.

    `offset` and `width` bound the rotated window inside a row, in elements;
    `width=None` means up to the end of the row. `frequencies`, when given, replaces the
    geometric series of `theta` (radians a position, one a pair). `magnitude` multiplies
    the rotated window (YaRN's attention factor). `kind` is a key of `KINDS`: "plain",
    or what was done to rows besides.
    """

    theta: float = 10_000.0
    style: str = "half"
    offset: int = 0
    width: int | None = None
    frequencies: tuple[float, ...] | None = None
    magnitude: float = 1.0
    kind: str = "plain"

    def __post_init__(self):
        facts.require_hashable(self)
        if self.style not in _STYLES:
            raise errors.ConfigError(
                errors.say(
                    f"rope style {self.style!r}",
                    "a rotation pairs dims by halves or by neighbours",
                    f"Use one of {', '.join(_STYLES)}",
                )
            )
        if self.kind not in KINDS:
            raise errors.ConfigError(
                errors.say(
                    f"rope of kind {self.kind!r}",
                    "what is done to rows besides a rotation is known by name",
                    f"Use one of {', '.join(KINDS)}",
                )
            )
        positive = (self.theta, self.magnitude)
        known = all(map(math.isfinite, (*positive, *(self.frequencies or ()))))
        if not known or min(positive) <= 0:
            raise errors.ConfigError(
                errors.say(
                    f"rope of theta {self.theta} and magnitude {self.magnitude}",
                    "both are finite and above 0, and all frequencies are finite",
                    "Take them from the model's config.json",
                )
            )

    def window(self, row_width: int) -> range:
        """Return the dims of a row that are rotated.

        Raises:
            ConfigError: a window that is odd, empty, or outside of its row.
        """
        width = row_width - self.offset if self.width is None else self.width
        if self.offset < 0 or width % 2 or not 0 < width <= row_width - self.offset:
            raise errors.ConfigError(
                errors.say(
                    f"rope over {width} of {row_width} dims from {self.offset}",
                    "a rotated window is even and lies inside its row",
                    "Set rope.width and rope.offset to an even window",
                )
            )
        return range(self.offset, self.offset + width)

    def inverse_frequencies(self, row_width: int) -> np.ndarray:
        """Return f64[width/2], radians a position for each pair of a row.

        Args:
            row_width: elements in a stored row (head_dim).
        """
        width = len(self.window(row_width))
        if self.frequencies is None:
            return self.theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        if len(self.frequencies) != width // 2:
            raise errors.ConfigError(
                errors.say(
                    f"{len(self.frequencies)} rope frequencies for {width} dims",
                    "each pair of dims has one frequency",
                    f"Give {width // 2} frequencies",
                )
            )
        return np.asarray(self.frequencies, np.float64)


def linear(theta: float, width: int, factor: float) -> Rope:
    """Return rope with every frequency divided by `factor` (position interpolation)."""
    base = Rope(theta).inverse_frequencies(width)
    _require_factor(factor)
    return Rope(theta, frequencies=tuple(float(f) for f in base / factor))


def llama3(
    theta: float,
    width: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> Rope:
    """Return Llama 3.1's banded scaling of the frequencies.

    Wavelengths beyond original_max_position / low_freq_factor are stretched by
    `factor`, those below original_max_position / high_freq_factor are kept, and between
    the two the frequency is blended linearly in original_max_position / wavelength.
    Source: the `rope_scaling` block ("rope_type": "llama3") of Llama 3.1's public
    config.json.
    """
    freqs = Rope(theta).inverse_frequencies(width)
    _require_factor(factor)
    if not low_freq_factor < high_freq_factor:
        raise errors.ConfigError(
            errors.say(
                f"rope bands from {low_freq_factor} to {high_freq_factor}",
                "frequencies are blended between the low and the high factor",
                "Give low_freq_factor < high_freq_factor",
            )
        )
    turns = original_max_position * freqs / (2 * math.pi)
    blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    scaled = freqs * (blend + (1 - blend) / factor)
    return Rope(theta, frequencies=tuple(float(f) for f in scaled))


def yarn(
    theta: float,
    width: int,
    factor: float,
    original_max_position: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Rope:
    """Return YaRN's scaling of the frequencies (arXiv 2309.00071) and its magnitude.

    Pairs that turn more than `beta_fast` times within the original length keep their
    frequency, those that turn less than `beta_slow` times are slowed by `factor`, and
    a linear ramp over the pairs' places joins the two. The frequencies do not change
    with the length, so a turn by a distance is exact.

    Args:
        attention_factor: factor on the rotated window; None: 0.1 ln(factor) + 1, or the
            quotient of the two `mscale`s where both are given.
        truncate: let the ramp begin and end at whole pairs.
    """
    base = Rope(theta).inverse_frequencies(width)
    _require_factor(factor)

    def place(turns: float) -> float:
        wavelengths = original_max_position / (turns * 2 * math.pi)
        return width * math.log(wavelengths) / (2 * math.log(theta))

    low, high = place(beta_fast), place(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (np.arange(width // 2) - low) / (high - low if high != low else 0.001)
    slowed = np.clip(ramp, 0.0, 1.0)
    scaled = base * (1 - slowed) + base / factor * slowed
    if attention_factor is None:
        attention_factor = _grown(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = _grown(factor, mscale) / _grown(factor, mscale_all_dim)
    return Rope(
        theta, frequencies=tuple(scaled.tolist()), magnitude=float(attention_factor)
    )


def _require_factor(factor: float) -> None:
    if not (math.isfinite(factor) and factor > 0):
        raise errors.ConfigError(
            errors.say(
                f"rope scaled by a factor of {factor}",
                "a factor is how many times longer texts may be",
                "Give a positive number",
            )
        )


def _grown(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
