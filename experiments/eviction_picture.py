"""The picture of eviction policies: what each finds again, by pool size."""

import pathlib
from collections.abc import Mapping, Sequence

from experiments.picture import plt, save

__all__ = ["draw"]

_COLOURS = ("#2f6db3", "#d98c21", "#3a9d5d", "#1c1c1c")


def draw(
    path: pathlib.Path, sizes: Sequence[int], rates: Mapping[str, Sequence[float]]
) -> None:
    """Draw one line a policy, hit rate over pages of the pool; write a PNG."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    for (name, values), colour in zip(rates.items(), _COLOURS, strict=False):
        style = "--" if name == "belady" else "-"
        axes.plot(sizes, values, style, color=colour, marker="o", ms=4, label=name)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel("pages of the pool")
    axes.set_title("prompt tokens found in the prefix cache", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)
