"""Lifecycle groups: layers whose pages live and die together.

A group is what gets pages: its layers share one block table, one page size and one rule
of life. The token record of a group is, for each layer in numeric order, for each head
in global order, for each field in declared order, that head's bytes: little-endian,
without padding, and independent of topology, page size and page order.

    (group,) = group_layers(layers, page_size=16)
    group.record_nbytes        # bytes of one token, every head once
"""

import dataclasses
import functools
from collections.abc import Sequence

from kvmem import errors
from kvmem.geometry import facts
from kvmem.geometry.fields import Field, LayerSpec

__all__ = ["DOMAINS", "LifecycleGroup", "group_layers"]

DOMAINS = ("target", "draft")


@dataclasses.dataclass(frozen=True)
class LifecycleGroup:
    """Layers with one lifecycle: "full" keeps every page until its sequence ends."""

    name: str
    domain: str
    lifecycle: str
    layers: tuple[LayerSpec, ...]
    page_size: int

    def __post_init__(self):
        facts.require_hashable(self)
        if self.page_size < 1:
            raise errors.ConfigError(
                errors.say(
                    f"page_size = {self.page_size}",
                    "a page holds at least one token",
                    "Give page_size >= 1",
                )
            )

    @functools.cached_property
    def fields(self) -> tuple[Field, ...]:
        """Every field of every layer, in numeric order of the layers."""
        return tuple(field for layer in self.layers for field in layer.fields)

    @property
    def record_nbytes(self) -> int:
        """Bytes of one token's record: every head of every field once."""
        return sum(field.token_nbytes for field in self.fields)

    def pages_for(self, length: int) -> int:
        """Return the pages that a sequence of `length` tokens holds."""
        return -(-length // self.page_size)

    def layer(self, name: str) -> LayerSpec:
        """Return the layer called `name`."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise errors.InvalidId(
            errors.say(
                f"layer {name!r} of group {self.name!r}",
                "the group has no layer of that name",
                f"Use one of {', '.join(layer.name for layer in self.layers)}",
            )
        )


def group_layers(
    layers: Sequence[LayerSpec], page_size: int, domain: str = "target"
) -> tuple[LifecycleGroup, ...]:
    """Sort layers into lifecycle groups, by (index, place in the list).

    Raises:
        ConfigError: no layers, two layers of one name, or an unknown domain.
        IncompatiblePlan: a sliding window, whose pages die earlier than the sequence:
            this version keeps full attention only.
    """
    if domain not in DOMAINS:
        raise errors.ConfigError(
            errors.say(
                f"domain {domain!r}",
                "a group serves the target or the draft",
                f"Use one of {', '.join(DOMAINS)}",
            )
        )
    names = [layer.name for layer in layers]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if not layers or repeated:
        raise errors.ConfigError(
            errors.say(
                f"{len(names)} layers"
                + (f", {repeated} more than once" * bool(repeated)),
                "a group has at least one layer and each name once",
                "Give every layer a name of its own",
            )
        )
    windowed = [layer.name for layer in layers if layer.window is not None]
    if windowed:
        raise errors.IncompatiblePlan(
            errors.say(
                f"sliding windows on layers {', '.join(windowed)}",
                "this version keeps the pages of full attention only",
                "Set window to None to keep every page",
            )
        )
    ordered = tuple(sorted(layers, key=lambda layer: layer.index))
    return (LifecycleGroup("full", domain, "full", ordered, page_size),)
