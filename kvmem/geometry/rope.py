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

__all__ = ["Rope", "llama3", "linear"]

_STYLES = ("half", "interleaved")


@dataclasses.dataclass(frozen=True)
class Rope:
    """How one field's rows are rotated by position.

    `offset` and `width` bound the rotated window inside a row, in elements;
    `width=None` means up to the end of the row. `frequencies`, when given, replaces the
    geometric series of `theta` (radians a position, one a pair). `magnitude` multiplies
    the rotated window (YaRN's attention factor).
    """

    theta: float = 10_000.0
    style: str = "half"
    offset: int = 0
    width: int | None = None
    frequencies: tuple[float, ...] | None = None
    magnitude: float = 1.0

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

    def inverse_frequencies(self, row_width: int) -> np.ndarray:
        """Return f64[width/2], radians a position for each pair of a row.

        Args:
            row_width: elements in a stored row (head_dim).
        """
        width = row_width - self.offset if self.width is None else self.width
        if width % 2 or not 0 < width <= row_width - self.offset:
            raise errors.ConfigError(
                errors.say(
                    f"rope over {width} of {row_width} dims from {self.offset}",
                    "a rotated window is even and lies inside its row",
                    "Set rope.width and rope.offset to an even window",
                )
            )
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
    turns = original_max_position * freqs / (2 * math.pi)
    blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    scaled = freqs * (blend + (1 - blend) / factor)
    return Rope(theta, frequencies=tuple(float(f) for f in scaled))
