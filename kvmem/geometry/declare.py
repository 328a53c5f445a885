"""Declare: the page order of arrays that somebody else allocated.

What an axis is cannot be seen from its length: with two pages, [2, 2, 4, 1, 8] reads
both as (k/v, page) and as (page, k/v). So axes are named (`kvmem.geometry.axes`), and
every length is compared with the model's facts. The law: nothing is inferred from a
shape, and all faults are said at once.

    declare(group, topology, "page field token head dim", arrays)    # an array a layer
    # Declared(order="layer | field token head", num_pages=None)

Axes: rank (only where there are several, and first), page, layer, field, head, token,
dim. Layers and fields that are no axis have an array each, in numeric order; without a
head axis a rank has one head, or a latent. An array of uint8 holds the bytes of any
dtype; of several, if fields of different widths lie in one flat axis.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvmem import errors
from kvmem.geometry import axes as axis_names
from kvmem.geometry import axis_lengths, envelope
from kvmem.geometry.axes import Axes, Axis
from kvmem.geometry.fields import Field, np_dtype
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.topology import Topology

__all__ = ["ArrayLike", "Declared", "declare"]


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
    page_nbytes: int | None = None,
) -> Declared:
    """Return the page order and number of pages of declared arrays.

    Args:
        axes: of every array, outermost first; "page (token head field dim)" is an array
            whose pages are flat.
        page_nbytes: bytes from one page of an array to the next, where pages are
            padded; their axes are then flat, and the padding is in the last length.

    Raises:
        IncompatiblePlan: every way in which arrays are not what they are declared to
            be, or not what the model keeps.
        ConfigError: no declaration, axes that are none, or pages that overlap.
    """
    if axes is None:
        raise errors.ConfigError(
            errors.say(
                f"a list of {len(arrays)} arrays with no declaration",
                "what an axis is cannot be seen from its length",
                'Name the axes, as in "page field token head dim"',
            )
        )
    parsed = axis_names.parse(axes, topology.ranks)
    faults = []
    try:
        for field in group.fields:
            topology.require(field)
    except errors.IncompatiblePlan as error:
        faults.append(str(error).rstrip("."))
    if not faults:
        asked = _Asked(group, topology, parsed, page_nbytes)
        faults = list(_faults(asked, arrays))
    if faults:
        raise errors.IncompatiblePlan(
            errors.say(
                f"{len(arrays)} arrays declared as {axes!r}",
                "; ".join(faults),
                "Declare the axes as they are, or hand over rows as the model has them",
            )
        )
    regions = any(name in axis_names.APART for name in _outside(parsed))
    num_pages = _pages(asked, arrays[0]) if regions else None
    return Declared(_order(asked, num_pages), num_pages)


class _Asked(NamedTuple):
    """What was declared, and of which model."""

    group: LifecycleGroup
    topology: Topology
    axes: Axes
    page_nbytes: int | None

    def heads(self, field: Field) -> int:
        """Return the heads of a field on one rank."""
        return self.topology.shard(field, 0).count


def _outside(axes: Axes) -> tuple[str, ...]:
    return axes.names[: axes.names.index("page")]


def _pages(asked: _Asked, array: ArrayLike) -> int:
    """Return the pages of an array whose axes are as declared."""
    at = asked.axes.page_at
    folded = len(asked.axes.shape[at].names) > 1
    return int(array.shape[at]) // (asked.group.page_size if folded else 1)


def _order(asked: _Asked, num_pages: int | None) -> str:
    """Return the order with what its pages need besides: tight rows, padded pages."""
    order, group, topology = asked.axes.order, asked.group, asked.topology
    made = envelope.build(group, topology, 0, order, num_pages)
    tight = envelope.build(group, topology, 0, f"{order}; align 1", num_pages)
    if (tight.entries, tight.nbytes) != (made.entries, made.nbytes):
        order, made = f"{order}; align 1", tight
    if asked.page_nbytes not in (None, made.planes[0].page_stride):
        order = f"{order}; page {asked.page_nbytes}"
        envelope.build(group, topology, 0, order, num_pages)  # refuses an overlap
    return order


def _faults(asked: _Asked, arrays: Sequence[ArrayLike]) -> Iterator[str]:
    """Yield what is wrong with each array."""
    apart, shape = asked.axes.apart, asked.axes.shape
    kept = axis_lengths.fields_by_array(asked.axes, asked.group)
    if len(arrays) != len(kept):
        each = " and ".join(apart) or "model"
        yield f"{len(kept)} are expected, one a {each}, and {len(arrays)} given"
        return
    if asked.page_nbytes and len(shape) != asked.axes.page_at + 2:
        yield "pages that are padded have one flat axis"
        return
    for index, (fields, array) in enumerate(zip(kept, arrays, strict=True)):
        for fault in _array_faults(asked, fields, array):
            yield f"array {index} ({fields[0].layer!r}): {fault}"
    pages = {_pages(asked, a) for a in arrays if len(a.shape) > asked.axes.page_at}
    if len(pages) > 1:
        yield f"numbers of pages differ: {sorted(pages)}"


def _array_faults(
    asked: _Asked, fields: list[Field], array: ArrayLike
) -> Iterator[str]:
    """Yield what is wrong with one array, axis by axis."""
    dtype, shape = getattr(array, "dtype", None), tuple(array.shape)
    if dtype is None:
        yield f"shape {shape} has no dtype, so a row has no width"
        return
    if fault := _uneven(asked, fields, np.dtype(dtype)):
        yield fault
        return
    item = np.dtype(dtype).itemsize
    if np.dtype(dtype) not in (np.uint8, np_dtype(fields[0].dtype)):
        yield f"dtype {np.dtype(dtype)}, and the model keeps {fields[0].dtype}"
    if "head" not in asked.axes.names and any(asked.heads(f) > 1 for f in fields):
        yield f"{asked.heads(fields[0])} local heads, and no axis of heads"
        return
    if len(shape) != asked.axes.rank:
        yield f"{len(shape)} axes of {shape}, {asked.axes.rank} declared"
        return
    at = 0
    for axis in asked.axes.shape:
        found = shape[at : at + axis.cut]
        at += axis.cut
        if fault := _axis_fault(asked, axis, found, fields, item):
            yield fault


def _uneven(asked: _Asked, fields: list[Field], dtype: np.dtype) -> str | None:
    """Say why fields of several widths, or dtypes, cannot be told apart."""
    flat = next(axis for axis in asked.axes.shape if "dim" in axis.names).names
    widths = {(field.dtype, field.head_nbytes) for field in fields}
    by_layer: dict[str, list] = {}
    for field in fields:
        facts = field.row_nbytes, asked.heads(field)
        by_layer.setdefault(field.layer, []).append(facts)
    if "field" not in flat and len({f for each in by_layer.values() for f in each}) > 1:
        return f"one array keeps rows of several widths: {sorted(widths)}"
    if "layer" not in flat and len(set(map(tuple, by_layer.values()))) > 1:
        return f"one array keeps layers of several widths: {sorted(widths)}"
    if dtype != np.uint8 and len({field.dtype for field in fields}) > 1:
        return f"one array keeps rows of several dtypes, and is no uint8: {widths}"
    return None


def _axis_fault(
    asked: _Asked,
    axis: Axis,
    found: tuple[int, ...],
    fields: list[Field],
    item: int,
) -> str | None:
    """Say which law an axis of a shape breaks, None where it is as declared."""
    names, tokens = axis.names, asked.group.page_size
    if "page" in names:
        if len(names) > 1 and found[0] % tokens:
            return f"{found[0]} slots are no pages of {tokens} tokens"
        return None
    wanted = axis_lengths.length(names, fields, asked.group, asked.topology, item)
    if axis.cut == 2 and "dim" in names and "token" in names and found[0] != tokens:
        return f"{found[0]} rows for the {tokens} tokens of a page"
    if axis.cut == 2 and "dim" not in names and wanted % found[1]:
        return (
            f"{' x '.join(names)} of {wanted} packed {found[1]} by {found[1]}: what is "
            "packed is a multiple of its packing"
        )
    length = math.prod(found)
    if asked.page_nbytes and "dim" in names:
        if length * item == asked.page_nbytes and length >= wanted:
            return None
        return (
            f"pages of {length * item:,} bytes, declared {asked.page_nbytes:,} apart, "
            f"and the model fills {wanted * item:,}"
        )
    if length == wanted:
        return None
    return _misfit(asked, names, length, wanted, fields[0], item)


def _misfit(
    asked: _Asked,
    names: tuple[str, ...],
    found: int,
    wanted: int,
    field: Field,
    item: int,
) -> str:
    """Say which law an axis of the wrong length breaks."""
    tokens = asked.group.page_size
    if names == ("token",):
        return (
            f"{found} rows for the {tokens} tokens of a page: compressed states are "
            "not tokens, and a record is one token's"
        )
    if names == ("head",):
        return (
            f"{found} local heads, and {field.heads} heads on TP {asked.topology.tp} "
            f"are {wanted} a rank"
        )
    if names == ("dim",) and found > wanted:
        return (
            f"rows of {found} elements where the model has {wanted}: no entry declares "
            f"the other {(found - wanted) * item} bytes (scales between rows?)"
        )
    if len(names) > 1 and "token" in names and found % tokens:
        return (
            f"a page of {found} elements is not a multiple of its {tokens} token rows"
        )
    if len(names) > 1 and found > wanted:
        return (
            f"{found} elements where {' x '.join(names)} has {wanted}: no entry "
            f"declares the other {(found - wanted) * item} bytes (scales between rows?)"
        )
    return f"{' x '.join(names)} of {found}, and the model has {wanted}"
