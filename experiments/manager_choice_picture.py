"""The picture of two managers: how many sequences fit, and how much stands idle."""

import pathlib
from collections.abc import Mapping, Sequence

from matplotlib import ticker

from experiments.picture import plt, save

__all__ = ["draw"]

_COLOURS = {"grouped": "#2f6db3", "static_split": "#d98c21"}


def draw(
    path: pathlib.Path,
    lengths: Sequence[int],
    sequences: Mapping[str, Sequence[int]],
    idle: Mapping[str, Sequence[float]],
) -> None:
    """Draw counts and idle memory over the length of a sequence; write a PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    for name, counts in sequences.items():
        style = dict(color=_COLOURS[name], marker="o", ms=4, label=name)
        left.plot(lengths, counts, **style)
        right.plot(lengths, idle[name], **style)
    for length, *counts in zip(lengths, *sequences.values(), strict=True):
        note = f"{counts[0] / counts[1]:.2f}x"
        above = dict(xytext=(7, 5), textcoords="offset points")
        left.annotate(note, (length, counts[0]), **above)
    left.margins(x=0.15, y=0.1)
    left.set_yscale("log")
    left.set_title("sequences that fit", loc="left", fontsize=11)
    left.legend(frameon=False, loc="lower left")
    right.set_ylim(0, 1)
    right.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
    right.set_title("pages that nobody can use then", loc="left", fontsize=11)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("tokens of a sequence")
    save(figure, path)
