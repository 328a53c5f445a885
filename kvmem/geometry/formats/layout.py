"""Layouts: the arrays that a format keeps of a group, and what plans need of them.

Everything follows from the format's line and the group's facts. The law: a format
either holds every field of a group or says why not, before anything is allocated.

    shapes(find(9), group, num_pages=8)            # nested as the engine lists them
    declare(find(9), group, arrays)                # Declared(order=..., num_pages=None)
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kvmem import errors
from kvmem.geometry import axis_lengths
from kvmem.geometry import declare as declaring
from kvmem.geometry.axes import Axis
from kvmem.geometry.fields import Field, LayerSpec, np_dtype
from kvmem.geometry.formats.blocked import Blocked
from kvmem.geometry.formats.table import Format
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.topology import Topology

__all__ = ["Shape", "declare", "flat", "obstacle", "shapes"]

_WORD = 4  # bytes that packed rows share


@dataclasses.dataclass(frozen=True)
class Shape:
    """The facts of an array that is not allocated yet."""

    shape: tuple[int, ...]
    dtype: np.dtype


def declare(
    form: Format,
    group: LifecycleGroup,
    arrays: object,
    page_nbytes: int | None = None,
    topology: Topology | None = None,
) -> declaring.Declared:
    """Return the page order and number of pages of arrays.

    Args:
        arrays: nested as the format lists them.
        topology: of several ranks: each array then stacks theirs on a first axis.
        page_nbytes: bytes from page to page, where they are padded; arrays are then
            [pages, elements of a padded page], whatever axes a page has. See
            `geometry.declare`.

    Raises:
        FormatMismatch: a nesting that is not the format's.
        IncompatiblePlan: every way in which they are not what the model keeps.
    """
    if form.is_blocked:
        for layer in group.layers:
            Blocked.of(layer, group.page_size)  # refuses what some backend cannot copy
    topology = topology or Topology()
    line = form.line if page_nbytes is None else _flat_pages(form)
    if topology.ranks > 1:
        *before, inside = line.split("|")
        line = "|".join([*before, f" rank {inside.strip()}"])
    listed = flat(form, group, arrays)
    return declaring.declare(group, topology, line, listed, page_nbytes)


def _flat_pages(form: Format) -> str:
    """Return a format's line with the axes of a page in one, where pages are padded."""
    *before, inside = form.line.split("|")
    if form.axes.page_at or form.is_folded:
        return form.line
    names = [name for name in form.axes.names if name != "page"]
    return "|".join([*before, f" page ({' '.join(names)})"])


def flat(form: Format, group: LifecycleGroup, arrays: object) -> list:
    """Return nested arrays as one list, in the order of their line.

    Raises:
        FormatMismatch: a nesting that is not the format's.
    """
    found = [arrays]
    if not form.is_cross_layer:
        found = _items(arrays, form)
    if form.is_kv_list or form.is_tuple:
        each_layer = [len(layer.fields) for layer in group.layers]
        if form.is_kv_list:
            each_layer = [len(group.layers)] * max(each_layer)
        if len(found) != len(each_layer):
            raise _nested(f"{len(found)} lists, not {len(each_layer)}, in", form)
        inner = zip(found, each_layer, strict=True)
        found = [array for each, count in inner for array in _items(each, form, count)]
    if any(isinstance(each, list | tuple) for each in found):
        raise _nested("arrays nested deeper than", form)
    return found


def _items(arrays: object, form: Format, count: int | None = None) -> Sequence:
    """Return the arrays, or lists, of a list; `count` of them where it is given."""
    if not isinstance(arrays, list | tuple):
        raise _nested("arrays nested less deep than", form)
    if count not in (None, len(arrays)):
        raise _nested(f"a list of {len(arrays)} arrays, not {count}, in", form)
    return arrays


def _nested(what: str, form: Format) -> errors.FormatMismatch:
    return errors.FormatMismatch(
        errors.say(
            f"{what} {form.name}",
            "a format says how its arrays are listed",
            f"Give them as {form.line!r} says",
        )
    )


def obstacle(form: Format, group: LifecycleGroup) -> str | None:
    """Say why a format cannot hold a group's fields, None if it can."""
    names = form.axes.names
    if "head" not in names and any(field.heads > 1 for field in group.fields):
        return "it has no axis of heads"
    if not form.is_tuple and not form.is_kv_list and "field" not in names:
        if any(len(layer.fields) > 1 for layer in group.layers):
            return "it holds one field a layer"
    if form.is_blocked and not all(map(_ends_in_scales, group.layers)):
        return "its pages are values and then scales, and the group's are not"
    inside = "field" in names and not any(
        {"field", "dim"} <= set(axis.names) for axis in form.axes.shape
    )
    if inside:
        return _uneven(form, group)
    return None


def _uneven(form: Format, group: LifecycleGroup) -> str | None:
    """Say why fields are no axis of equal rows, None where they are."""
    for layer in group.layers:
        if form.id is not None and len(layer.fields) != 2:
            return f"keys and values are an axis of 2, not {len(layer.fields)} fields"
        if len({(f.row_nbytes, f.dtype, f.heads) for f in layer.fields}) > 1:
            return "its keys and values are rows of one width"
    return None


def _ends_in_scales(layer: LayerSpec) -> bool:
    kinds = [field.is_scale for field in layer.fields]
    return kinds == sorted(kinds) and kinds[0] != kinds[-1]


def shapes(form: Format, group: LifecycleGroup, num_pages: int) -> object:
    """Return the arrays of a format on one rank, nested as it lists them.

    Raises:
        IncompatiblePlan: a group that the format cannot hold.
    """
    reason = obstacle(form, group)
    if reason is not None:
        raise errors.IncompatiblePlan(
            errors.say(
                f"group {group.name!r} in pages of {form.name}",
                reason,
                "Use a format that holds its fields",
            )
        )
    made = [
        _shape(form, group, fields, num_pages)
        for fields in axis_lengths.fields_by_array(form.axes, group)
    ]
    if form.is_cross_layer:
        return made[0]
    if not (form.is_kv_list or form.is_tuple):
        return made
    inner = len(group.layers) if form.is_kv_list else len(group.layers[0].fields)
    return [tuple(made[i : i + inner]) for i in range(0, len(made), inner)]


def _shape(
    form: Format, group: LifecycleGroup, fields: Sequence[Field], num_pages: int
) -> Shape:
    """Return one array's shape and dtype; of several dtypes, bytes."""
    dtypes = {field.dtype for field in fields}
    dtype = np_dtype(fields[0].dtype) if len(dtypes) == 1 else np.dtype(np.uint8)
    lengths: list[int] = []
    for axis in form.axes.shape:
        if "page" in axis.names:
            slots = group.page_size if len(axis.names) > 1 else 1
            lengths.append(num_pages * slots)
        else:
            lengths += _cut(axis, list(fields), group, dtype.itemsize)
    return Shape(tuple(lengths), dtype)


def _cut(
    axis: Axis, fields: list[Field], group: LifecycleGroup, item: int
) -> list[int]:
    """Return an axis's length, or the two that a shape cuts it into."""
    whole = axis_lengths.length(axis.names, fields, group, Topology(), item)
    if axis.cut == 1:
        return [whole]
    inner = whole // group.page_size if "dim" in axis.names else _WORD // item
    if whole % inner:
        raise errors.IncompatiblePlan(
            errors.say(
                f"{math.prod([whole])} rows ({' x '.join(axis.names)}) packed {inner} "
                "to a word",
                "what is packed is a multiple of its packing",
                "Use another page size or dtype",
            )
        )
    return [whole // inner, inner]
