"""What every picture is drawn and saved with: no display, and lines on two sides.

figure, axes = plt.subplots()
save(figure, pathlib.Path("runs/eviction/eviction.png"))
"""

import pathlib

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402 (after the backend is chosen)

__all__ = ["plt", "save"]


def save(figure: plt.Figure, path: pathlib.Path) -> None:
    """Take the lines above and right of all axes away; write a PNG, and close."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
