"""The picture of blending: time to the first token and quality, by ratio."""

import pathlib
from collections.abc import Sequence

from experiments.picture import plt, save

__all__ = ["draw"]

_TIME, _QUALITY, _PLAIN = "#2f6db3", "#d98c21", "#8a8a8a"


def draw(
    path: pathlib.Path,
    ratios: Sequence[float],
    seconds: Sequence[float],
    prefill_s: float,
    agreement: Sequence[float],
    divergence: Sequence[float],
) -> None:
    """Draw three panels over the recomputed share; write a PNG.

    Args:
        ratios: shares, evenly spaced in the picture.
        seconds: to the first token, blended.
        prefill_s: the same with everything computed.
        agreement: share of next tokens that are equal.
        divergence: nats a next token.
    """
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4))
    places = range(len(ratios))
    panels[0].bar(places, seconds, width=0.6, color=_TIME)
    panels[0].axhline(prefill_s, color=_PLAIN, ls="--", lw=1)
    panels[0].annotate(
        "prefill", (0, prefill_s), xytext=(0, 3), textcoords="offset points", fontsize=8
    )
    for place, value in zip(places, seconds, strict=True):
        panels[0].annotate(
            f"{prefill_s / value:.1f}x", (place, value), ha="center", va="bottom"
        )
    panels[1].plot(places, agreement, color=_QUALITY, marker="o", ms=4)
    panels[1].set_ylim(0, 1.03)
    panels[2].plot(places, divergence, color=_QUALITY, marker="o", ms=4)
    panels[2].set_ylim(bottom=0)
    titles = (
        "seconds to the first token",
        "next tokens that agree",
        "divergence, nats",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xticks(list(places), [f"{ratio:g}" for ratio in ratios])
        axes.set_xlabel("recomputed share")
    figure.tight_layout()
    save(figure, path)
