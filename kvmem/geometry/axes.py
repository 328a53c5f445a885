"""Axes of an array, as the line that declares them: names, outermost first.

`(a b)` is one axis of the shape that holds several, flattened. `[a b]` is two axes of
the shape that hold them: rows packed into words, where the inner length is the packing,
or a page of bytes that is shaped as tokens by row. `one` is an axis of length one. Axes
before a bar number the arrays of a list, which without a bar are those of layer and
field that the line does not name.

    parse("field layer | (page token) head dim")    # all k arrays, then all v arrays
    parse("page token [head field] dim")            # heads of k and v, packed by words
"""

import re
from typing import NamedTuple

from kvmem import errors

__all__ = ["APART", "Axes", "Axis", "parse"]

APART = ("layer", "field")
_NEEDED = frozenset({"page", "token", "dim"})
_FORM = re.compile(r"\(([^()\[\]|]*)\)|\[([^()\[\]|]*)\]|(\w+)")


class Axis(NamedTuple):
    """Names that one axis of a shape holds, or two where `cut` is 2."""

    names: tuple[str, ...]
    cut: int = 1


class Axes(NamedTuple):
    """A parsed line: the axes that number arrays, and those of each array."""

    apart: tuple[str, ...]
    shape: tuple[Axis, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of every array's axes, those of length one left out."""
        return tuple(n for axis in self.shape for n in axis.names if n != "one")

    @property
    def page_at(self) -> int:
        """The place of the page among `shape`; axes before it are not cut."""
        return next(i for i, axis in enumerate(self.shape) if "page" in axis.names)

    @property
    def rank(self) -> int:
        """Axes that an array's shape has."""
        return sum(axis.cut for axis in self.shape)

    @property
    def order(self) -> str:
        """The page order of such arrays; a head that is no axis is the only one."""
        names = self.names
        page = names.index("page")
        regions = [name for name in names[:page] if name != "rank"]
        inside = [name for name in names[page + 1 :] if name != "dim"]
        if "head" not in names:
            inside.append("head")
        parts = [self.apart, regions, inside] if regions else [self.apart, inside]
        return (
            " | ".join(map(" ".join, parts))
            if self.apart or regions
            else " ".join(inside)
        )


def parse(line: str, num_ranks: int = 1) -> Axes:
    """Return the axes that a line names.

    Args:
        num_ranks: of the topology; several have an axis.

    Raises:
        ConfigError: an unknown or repeated name, or axes that stand where no page order
            has them.
    """
    *before, inside = line.split("|")
    shape = tuple(
        Axis(tuple((flat or cut or one).split()), 2 if cut else 1)
        for flat, cut, one in _FORM.findall(inside)
    )
    names = [name for axis in shape for name in axis.names if name != "one"]
    apart = tuple(before[0].split()) if before else _unnamed(names)
    law = _broken(line, apart, shape, names, num_ranks)
    if law:
        raise errors.ConfigError(
            errors.say(f"axes {line!r}", law, 'Use "page field token head dim" or so')
        )
    return Axes(apart, shape)


def _unnamed(names: list[str]) -> tuple[str, ...]:
    return tuple(axis for axis in APART if axis not in names)


def _broken(line, apart, shape, names, num_ranks) -> str | None:
    """Return the law that a line breaks, None when it is sound."""
    expected = _NEEDED | ({"rank"} if num_ranks > 1 else {"rank"} & set(names))
    known = expected | {"head", *APART}
    if len(set(names)) != len(names) or not expected <= set(names) <= known:
        return (
            f"each of {', '.join(sorted(expected))} is named once; head, layer and "
            "field may"
        )
    if _FORM.sub("", line).strip(" |") or line.count("|") > 1:
        return "a line is names, (flat ones), [cut ones] and one bar"
    if sorted(apart) != sorted(_unnamed(names)):
        return "a list is numbered by layer and field, where they are no axis"
    if names[-1] != "dim":
        return "the elements of a row stand together, so dim is the innermost axis"
    page = next(axis for axis in shape if "page" in axis.names)
    alone = page in (Axis(("page",)), Axis(("page", "token")))
    if not alone or ("rank" in names and shape[0] != Axis(("rank",))):
        return (
            "rank is the outermost axis, and neither rank nor page is flattened, but "
            "for (page token)"
        )
    if {"head", "token"} & set(names[: names.index("page")]):
        return "only layer and field stand outside of pages"
    return None
