"""The picture of a handoff: where the seconds of each process went."""

import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.picture import plt, save

__all__ = ["draw"]

_STAGES = {
    "load": "#bdbdbd",
    "compile": "#8c8c8c",
    "generate": "#2f6db3",
    "write the store": "#d98c21",
    "read the store": "#3a9d5d",
    "time first tokens": "#cfe0f2",
}


def draw(path: pathlib.Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw one bar a process, one colour a stage, seconds along it; write a PNG."""
    figure, axes = plt.subplots(figsize=(9, 0.7 * len(results) + 1.6))
    names = list(results)
    left = [0.0] * len(names)
    for stage, colour in _STAGES.items():
        widths = [results[name]["stages"].get(stage, 0.0) for name in names]
        axes.barh(names, widths, left=left, color=colour, label=stage, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title("where the time of each process went", loc="left", fontsize=11)
    axes.legend(ncols=len(_STAGES), loc="upper left", bbox_to_anchor=(0, -0.28))
    axes.get_legend().set_frame_on(False)
    save(figure, path)
