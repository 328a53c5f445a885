"""The picture of `session_memory`: four figures, a bar a policy, in both places."""

import pathlib
from collections.abc import Mapping

from experiments.picture import plt, save

__all__ = ["draw"]

_COLOURS = {"tail": "#2f6db3", "system": "#d98c21"}
_PALE = {"tail": "#bcd0e8", "system": "#f2d9b5"}
# (title, the bar, the pale bar behind it)
_PANELS = (
    ("memory tokens injected, again (dark)", "repeated_tokens", "injected_tokens"),
    ("turns whose memory was held back and out of sight", "misses", None),
    (
        "tokens of a turn's prompt, reused (dark)",
        "reused_tokens_a_turn",
        "prompt_tokens_a_turn",
    ),
    ("first token, ms in the median", "first_token_ms", None),
)


def draw(path: pathlib.Path, found: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the figures of "place_policy" conversations; write a PNG."""
    figure, grid = plt.subplots(2, 2, figsize=(9, 5.6), layout="constrained")
    names = list(dict.fromkeys(name.partition("_")[2] for name in found))
    for axes, (title, key, behind) in zip(grid.flat, _PANELS, strict=True):
        for shift, place in enumerate(_COLOURS):
            _bars(axes, shift, place, names, found, behind, _PALE)
            _bars(axes, shift, place, names, found, key, _COLOURS)
        axes.set_xticks(range(len(names)), names)
        axes.set_title(title, loc="left", fontsize=10)
        axes.tick_params(length=0, labelsize=9)
    handles = [
        plt.Rectangle((0, 0), 1, 1, fc=colour, label=f"memories in the {place}")
        for place, colour in _COLOURS.items()
    ]
    figure.legend(handles=handles, ncols=2, loc="outside lower center", frameon=False)
    save(figure, path)


def _bars(axes, shift, place, names, found, key, colours) -> None:
    if key is None:
        return
    values = [found[f"{place}_{name}"][key] for name in names]
    at = [x + 0.38 * (shift - 0.5) for x in range(len(names))]
    axes.bar(at, values, 0.36, color=colours[place])
    if colours is _COLOURS:
        for x, value in zip(at, values, strict=True):
            axes.text(x, value, f"{value:,.0f}", ha="center", va="bottom", fontsize=7)
