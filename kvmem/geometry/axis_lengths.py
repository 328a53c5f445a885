"""How long the axes of a declared array are, from the model's facts.

The law: an array of a list keeps the fields that its place among the numbering axes
says, and every axis but the page's has a length that follows from them.

    fields_by_array(axes.parse("page token dim"), group)    # a list an array
    length(("token", "dim"), fields, group, topology, item=2)    # of a flat page
"""

import math

from kvmem.geometry.axes import Axes
from kvmem.geometry.fields import Field
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.topology import Topology

__all__ = ["fields_by_array", "length"]


def fields_by_array(axes: Axes, group: LifecycleGroup) -> list[list[Field]]:
    """Return the fields that each array of a list keeps, in the order of the list."""
    kept: dict[tuple[int, ...], list[Field]] = {}
    for layer_at, layer in enumerate(group.layers):
        for field_at, field in enumerate(layer.fields):
            at = {"layer": layer_at, "field": field_at}
            kept.setdefault(tuple(at[axis] for axis in axes.apart), []).append(field)
    return [kept[key] for key in sorted(kept)]


def length(
    names: tuple[str, ...],
    fields: list[Field],
    group: LifecycleGroup,
    topology: Topology,
    item: int,
) -> int:
    """Return the length of an axis that holds `names`, in elements of `item` bytes."""
    counts = {
        "one": 1,
        "rank": topology.ranks,
        "layer": len({field.layer for field in fields}),
        "field": len({field.name for field in fields}),
        "head": topology.shard(fields[0], 0).count,
        "token": group.page_size,
    }
    if "dim" not in names:
        return math.prod(counts[name] for name in names)
    inside = [
        field
        for field in fields
        if ("layer" in names or field.layer == fields[0].layer)
        and ("field" in names or field.name == fields[0].name)
    ]
    tokens = counts["token"] if "token" in names else 1
    heads = [
        topology.shard(field, 0).count if "head" in names else 1 for field in inside
    ]
    sizes = [field.row_nbytes // item for field in inside]
    return tokens * sum(map(math.prod, zip(heads, sizes, strict=True)))
