"""Sizing: bytes divided over pools by ratio, in grains, above floors.

The rule is that of TensorRT-LLM's second KV cache manager: shares are handed out in
grains, smallest ratio first; a pool that would get no more pages than its floor is
pinned there and the others divide what is left; at the end a pool takes every page that
its grains hold. One thing differs: bytes are rounded down to grains, never up, so that
no pool takes from what is not the pools'.

    mib = 1 << 20
    small, large = Part((mib,), ratio=0.25), Part((3 * mib,), ratio=0.75)
    split(96 * mib, [small, large], grain_nbytes=2 * mib)      # (24, 24)
"""

import dataclasses
import fractions
from collections.abc import Sequence

from kvmem import errors

__all__ = ["Part", "device_grain", "split"]

_MIB, _GIB = 1 << 20, 1 << 30


@dataclasses.dataclass(frozen=True)
class Part:
    """One pool that takes part in a division.

    Args:
        page_nbytes: bytes of a page in each array of the pool; arrays grow together.
        ratio: its weight among the parts; only proportions count.
        floor: pages it gets whatever its ratio.
        name: in messages.
    """

    page_nbytes: tuple[int, ...]
    ratio: float
    floor: int = 1
    name: str = "pool"


def device_grain(nbytes: int) -> int:
    """Return the grain of a device allocation: 2 MiB below 2 GiB, 32 MiB from 16 on."""
    return 2 * _MIB << min(4, max(0, (max(nbytes, _GIB) // _GIB).bit_length() - 1))


def split(nbytes: int, parts: Sequence[Part], grain_nbytes: int = 1) -> tuple[int, ...]:
    """Return the pages of each part.

    Args:
        nbytes: to divide, rounded down to grains.
        parts: who takes part.
        grain_nbytes: every array of a part takes a whole number of grains.

    Raises:
        OutOfPages: the floors do not fit, or leave nothing for a part above its floor.
        ConfigError: no parts, or weights that are not positive.
    """
    _require_ratios(parts, grain_nbytes)
    total = nbytes // grain_nbytes
    pinned: dict[int, int] = {}
    while True:
        left = total - sum(
            _grains(parts[i], pages, grain_nbytes) for i, pages in pinned.items()
        )
        open_parts = [i for i in range(len(parts)) if i not in pinned]
        if left < 0:
            raise _too_small(nbytes, parts, grain_nbytes)
        given = _shared(left, [(parts[i].ratio, i) for i in open_parts])
        pages = {
            i: _pages(parts[i], grains, grain_nbytes) for i, grains in given.items()
        }
        low = [i for i in open_parts if pages[i] <= parts[i].floor]
        if not low:
            found = pages | pinned
            return tuple(
                _filled(part, found[i], grain_nbytes) for i, part in enumerate(parts)
            )
        pinned |= {i: parts[i].floor for i in low}


def _shared(left: int, weighed: Sequence[tuple[float, int]]) -> dict[int, int]:
    """Share grains by weight, the smallest first; the largest takes what is left."""
    weights = {i: fractions.Fraction(ratio) for ratio, i in weighed}
    of_all, given = sum(weights.values()), {}
    for _, i in sorted(weighed):
        given[i] = int(left * weights[i] / of_all)
        left, of_all = left - given[i], of_all - weights[i]
    return given


def _grains(part: Part, pages: int, grain_nbytes: int) -> int:
    return sum(-(-pages * nbytes // grain_nbytes) for nbytes in part.page_nbytes)


def _pages(part: Part, grains: int, grain_nbytes: int) -> int:
    """Return the most pages that `grains` hold."""
    low, high = 0, grains * grain_nbytes // sum(part.page_nbytes)
    while low < high:
        middle = (low + high + 1) // 2
        if _grains(part, middle, grain_nbytes) <= grains:
            low = middle
        else:
            high = middle - 1
    return low


def _filled(part: Part, pages: int, grain_nbytes: int) -> int:
    """Take the pages for which the grains that are taken have room already."""
    return _pages(part, _grains(part, pages, grain_nbytes), grain_nbytes)


def _too_small(nbytes: int, parts: Sequence[Part], grain_nbytes: int) -> Exception:
    floors = sum(_grains(part, part.floor, grain_nbytes) for part in parts)
    named = ", ".join(f"{part.name} {part.floor}" for part in parts)
    return errors.OutOfPages(
        errors.say(
            f"{nbytes:,} B for {len(parts)} pools",
            f"their floors ({named} pages) take {floors * grain_nbytes:,} B, and a "
            "pool above its floor needs more",
            "Give more bytes, fewer rows to every batch, or a shorter longest sequence",
        )
    )


def _require_ratios(parts: Sequence[Part], grain_nbytes: int) -> None:
    ratios = [part.ratio for part in parts]
    floors = [part.floor for part in parts]
    whole = parts and grain_nbytes >= 1 and all(floor >= 1 for floor in floors)
    if not (whole and all(ratio > 0 for ratio in ratios)):
        raise errors.ConfigError(
            errors.say(
                f"ratios {ratios} above floors {floors} in grains of {grain_nbytes} B",
                "there is at least one pool, each of a weight above zero and at least "
                "one page",
                "Give every group a positive share",
            )
        )
