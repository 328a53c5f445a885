"""The picture of drafts: tokens a step and speed against none, by kind of text."""

import pathlib
from collections.abc import Mapping

from experiments.picture import plt, save

__all__ = ["draw"]

_COLORS = ("#2f6db3", "#d98c21", "#4f9d69", "#8a63a8")
_WIDTH = 0.2


def draw(
    path: pathlib.Path,
    steps: Mapping[str, Mapping[str, float]],
    speeds: Mapping[str, Mapping[str, float]],
) -> None:
    """Draw two panels of bars, a group a draft and a bar a kind of text; write a PNG.

    Args:
        path: of the picture.
        steps: tokens that a step gave, by kind and draft.
        speeds: tokens a second over those without a draft, by kind and draft.
    """
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.6))
    titles = ("tokens a step of the model", "speed, without a draft = 1")
    for axes, title, found in zip(panels, titles, (steps, speeds), strict=True):
        for at, (kind, row) in enumerate(found.items()):
            shift = (at - (len(found) - 1) / 2) * _WIDTH
            places = [place + shift for place in range(len(row))]
            color = _COLORS[at % len(_COLORS)]
            axes.bar(places, list(row.values()), _WIDTH * 0.92, color=color, label=kind)
        axes.axhline(1.0, color="#8a8a8a", ls="--", lw=1)
        axes.set_title(title, loc="left", fontsize=10)
        names = list(next(iter(found.values())))
        axes.set_xticks(range(len(names)), names)
    panels[1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    save(figure, path)
