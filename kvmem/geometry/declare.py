"""Declare: the page order of arrays that somebody else allocated.

What an axis is cannot be seen from its length: with two pages, [2, 2, 4, 1, 8] reads
both as (k/v, page) and as (page, k/v). So axes are named, outermost first, flattened
ones in brackets, and every length is compared with the model's facts. The law: nothing
is inferred from a shape, and all faults are said at once.

    declare(group, topology, "page field token head dim", arrays)    # an array a layer
    # Declared(order="layer | field token head", num_pages=None)

Axes: rank (only where there are several, and first), page, layer, field, head, token,
dim. Layers and fields that are no axis have an array each, in numeric order.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvmem import errors
from kvmem.geometry.envelope import ALIGNMENT
from kvmem.geometry.fields import Field, np_dtype
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.topology import Topology

__all__ = ["ArrayLike", "Declared", "declare"]

_INSIDE = ("layer", "field", "head", "token", "dim")
_APART = ("layer", "field")


class ArrayLike(Protocol):
    """Whatever has a shape and a dtype: of numpy, of jax, or the facts alone."""

    shape: tuple[int, ...]
    dtype: object


class Declared(NamedTuple):
    """The arguments that make plans of declared arrays."""

    order: str
    num_pages: int | None


def declare(
    group: LifecycleGroup,
    topology: Topology,
    axes: str | None,
    arrays: Sequence[ArrayLike],
) -> Declared:
    """Return the page order and number of pages of declared arrays.

    Args:
        axes: of every array, outermost first; "page (token head field dim)" is an array
            whose pages are flat.

    Raises:
        IncompatiblePlan: every way in which arrays are not what they are declared to
            be, or not what the model keeps.
        ConfigError: no declaration, or axes that are none.
    """
    if axes is None:
        raise errors.ConfigError(
            errors.say(
                f"a list of {len(arrays)} arrays with no declaration",
                "what an axis is cannot be seen from its length",
                'Name the axes, as in "page field token head dim"',
            )
        )
    parsed = _parse(axes, topology)
    names = [name for part in parsed for name in part]
    apart = tuple(axis for axis in _APART if axis not in names)
    faults = []
    try:
        for field in group.fields:
            topology.require(field)
    except errors.IncompatiblePlan as error:
        faults.append(str(error).rstrip("."))
    if not faults:
        faults = list(_faults(group, topology, parsed, apart, arrays))
    if faults:
        raise errors.IncompatiblePlan(
            errors.say(
                f"{len(arrays)} arrays declared as {axes!r}",
                "; ".join(faults),
                "Declare the axes as they are, or hand over rows as the model has them",
            )
        )
    page = names.index("page")
    regions = [name for name in names[:page] if name != "rank"]
    inside = [name for name in names[page + 1 :] if name != "dim"]
    parts = [apart, regions, inside] if regions else [apart, inside]
    order = " | ".join(map(" ".join, parts)) if apart or regions else " ".join(inside)
    where = [i for i, part in enumerate(parsed) if part == ("page",)]
    num_pages = int(arrays[0].shape[where[0]]) if regions else None
    return Declared(order, num_pages)


def _parse(axes: str, topology: Topology) -> list[tuple[str, ...]]:
    """Return the names of each axis of a shape, several where it is flat."""
    found = re.findall(r"\(([^()]*)\)|(\w+)", axes)
    parsed = [tuple((flat or one).split()) for flat, one in found]
    names = [name for part in parsed for name in part]
    expected = {"page", "head", "token", "dim"} | ({"rank"} & set(names))
    if topology.ranks > 1:
        expected |= {"rank"}
    known = expected | set(_APART)
    law = None
    if len(set(names)) != len(names) or not expected <= set(names) <= known:
        law = (
            f"each of {', '.join(sorted(expected))} is named once, layer and field may"
        )
    elif names[-1] != "dim":
        law = "the elements of a row stand together, so dim is the innermost axis"
    elif ("page",) not in parsed or ("rank" in names and parsed[0] != ("rank",)):
        law = "rank is the outermost axis, and neither rank nor page is flattened"
    elif {"head", "token"} & set(names[: names.index("page")]):
        law = "only layer and field stand outside of pages"
    if law:
        raise errors.ConfigError(
            errors.say(f"axes {axes!r}", law, 'Use "page field token head dim" or so')
        )
    return parsed


def _faults(group, topology, parsed, apart, arrays) -> Iterator[str]:
    """Yield what is wrong with each array."""
    places = [[layer.name, field] for layer in group.layers for field in layer.fields]
    kept: dict[tuple, list[Field]] = {}
    for layer, field in places:
        key = {"layer": layer, "field": field.name}
        kept.setdefault(tuple(key[axis] for axis in apart), []).append(field)
    if len(arrays) != len(kept):
        each = " and ".join(apart) or "model"
        yield f"{len(kept)} are expected, one a {each}, and {len(arrays)} given"
        return
    for index, (fields, array) in enumerate(zip(kept.values(), arrays, strict=True)):
        for fault in _array_faults(group, topology, parsed, fields, array):
            yield f"array {index} ({fields[0].layer!r}): {fault}"
    pages = {a.shape[parsed.index(("page",))] for a in arrays if len(a.shape) > 1}
    if len(pages) > 1:
        yield f"numbers of pages differ: {sorted(pages)}"


def _array_faults(group, topology, parsed, fields, array) -> Iterator[str]:
    """Yield what is wrong with one array, axis by axis."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        yield f"shape {tuple(array.shape)} has no dtype, so a row has no width"
        return
    widths = {(field.dtype, field.head_nbytes) for field in fields}
    if len(widths) > 1:
        yield f"one array keeps rows of several widths: {sorted(widths)}"
        return
    item = np_dtype(fields[0].dtype).itemsize
    if np.dtype(dtype) != np_dtype(fields[0].dtype):
        yield f"dtype {np.dtype(dtype)}, and the model keeps {fields[0].dtype}"
        item = np.dtype(dtype).itemsize
    if len(array.shape) != len(parsed):
        yield f"{len(array.shape)} axes of {tuple(array.shape)}, {len(parsed)} declared"
        return
    lengths = {
        "rank": topology.ranks,
        "layer": len({field.layer for field in fields}),
        "field": len({field.name for field in fields}),
        "head": topology.shard(fields[0], 0).count,
        "token": group.page_size,
        "dim": fields[0].head_nbytes // np_dtype(fields[0].dtype).itemsize,
    }
    for names, found in zip(parsed, array.shape, strict=True):
        if names != ("page",) and found != math.prod(lengths[n] for n in names):
            yield _misfit(names, found, lengths, topology, fields[0], item)
    together = lengths["head"] if [n for p in parsed for n in p][-2] == "head" else 1
    if (row := together * lengths["dim"] * item) % ALIGNMENT:
        yield f"rows of {row} bytes, and rows in pages are multiples of {ALIGNMENT}"


def _misfit(names, found, lengths, topology, field, item) -> str:
    """Say which law an axis of the wrong length breaks."""
    if names == ("token",):
        return (
            f"{found} rows for the {lengths['token']} tokens of a page: compressed "
            "states are not tokens, and a record is one token's"
        )
    if names == ("head",):
        return (
            f"{found} local heads, and {field.heads} heads on TP {topology.tp} are "
            f"{lengths['head']} a rank"
        )
    wanted = math.prod(lengths[name] for name in names)
    if names == ("dim",) and found > wanted:
        return (
            f"rows of {found} elements where the model has {wanted}: no entry declares "
            f"the other {(found - wanted) * item} bytes (scales between rows?)"
        )
    if len(names) > 1 and "token" in names and found % lengths["token"]:
        return (
            f"a page of {found} elements is not a multiple of its {lengths['token']} "
            "token rows"
        )
    if len(names) > 1 and found > wanted:
        return (
            f"{found} elements where {' x '.join(names)} has {wanted}: no entry "
            f"declares the other {(found - wanted) * item} bytes (scales between rows?)"
        )
    return f"{' x '.join(names)} of {found}, and the model has {wanted}"
