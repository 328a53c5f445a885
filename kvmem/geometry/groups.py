"""Lifecycle groups: layers whose pages live and die together.

A group is what gets pages: its layers share one block table, one page size and one rule
of life. Layers are sorted by lifecycle and domain; index keys are a group of their own,
tied to that of their latent, since both or none can be reused; a window as long as the
longest text is full attention; and a layer that reads another's cache keeps none.

The token record of a group is, for each layer in numeric order, for each head in global
order, for each field in declared order, that head's bytes: little-endian, without
padding, and independent of topology, page size and page order. A state group has one
record a checkpoint, of the same shape.

    (group,) = group_layers(layers, page_size=16)
    group.record_nbytes        # bytes of one token, every head once
"""

import dataclasses
import functools
from collections.abc import Sequence

from kvmem import errors
from kvmem.geometry import facts
from kvmem.geometry.fields import Field, LayerSpec
from kvmem.geometry.lifecycle import FULL, STATE, Lifecycle

__all__ = ["DOMAINS", "LifecycleGroup", "group_layers"]

DOMAINS = ("target", "draft")


@dataclasses.dataclass(frozen=True)
class LifecycleGroup:
    """Layers with one lifecycle in one domain.

    Args:
        name: unique in its domain ("full", "window128", "indexer", "state").
        domain: "target" or "draft".
        lifecycle: which pages stay.
        layers: by index.
        page_size: tokens of a page; of a state, those from one snapshot to the next.
        tied_to: name of the group without which this one means nothing.
    """

    name: str
    domain: str
    lifecycle: Lifecycle
    layers: tuple[LayerSpec, ...]
    page_size: int
    tied_to: str | None = None

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

    @property
    def is_state(self) -> bool:
        """Say whether a page of the group is the state of a whole sequence."""
        return self.lifecycle.kind == "state"

    @property
    def is_replicated(self) -> bool:
        """Say whether every token shard keeps all of the group.

        Windows are read near a sequence's end, on whichever rank; states stand for a
        whole text; a draft is indexed by position. Only full attention of the target
        is spread.
        """
        return self.domain == "draft" or self.lifecycle.kind != "full"

    @property
    def slots(self) -> int:
        """Slots of a page: its tokens, or one for a state."""
        return 1 if self.is_state else self.page_size

    def pages_for(self, length: int) -> int:
        """Return the pages that keep all of `length` tokens, stale ones included."""
        return min(length, 1) if self.is_state else -(-length // self.page_size)

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
    layers: Sequence[LayerSpec],
    page_size: int,
    domain: str = "target",
    max_length: int | None = None,
) -> tuple[LifecycleGroup, ...]:
    """Sort layers into lifecycle groups: full attention, windows, index keys, states.

    Args:
        layers: of one model, in any order; those of one index keep their order.
        page_size: tokens of a page in every group.
        domain: "target" or "draft".
        max_length: tokens of the longest text; a window of as many is full attention.

    Raises:
        ConfigError: no layers, two layers of one name, an unknown domain, index keys
            without their latent, or a cache that is shared with no layer.
    """
    _require_names(layers, domain)
    ordered = sorted(layers, key=lambda layer: layer.index)
    found: dict[tuple[int, int, int, bool], list[LayerSpec]] = {}
    for layer in map(functools.partial(_normal, max_length=max_length), ordered):
        if layer.shares is None:
            found.setdefault(_life_order(layer), []).append(layer)
    groups = [
        LifecycleGroup(*_name_and_life(members[0], domain), tuple(members), page_size)
        for _, members in sorted(found.items())
    ]
    return tuple(_tied(group, groups) for group in groups)


def _normal(layer: LayerSpec, max_length: int | None) -> LayerSpec:
    """Return a layer whose window never ends as one of full attention."""
    never_ends = max_length is not None and (layer.window or 0) >= max_length
    return dataclasses.replace(layer, window=None, sinks=0) if never_ends else layer


def _life_order(layer: LayerSpec) -> tuple[int, int, int, bool]:
    """Return what layers of one group have in common, in the order of groups."""
    if layer.kind == "state":
        return 3, 0, 0, False
    return (
        0 if layer.window is None else 1,
        layer.window or 0,
        layer.sinks,
        layer.kind == "indexer",
    )


def _name_and_life(layer: LayerSpec, domain: str) -> tuple[str, str, Lifecycle]:
    """Return the first arguments of the group that `layer` is in."""
    life = (
        FULL if layer.window is None else Lifecycle("window", layer.window, layer.sinks)
    )
    if layer.kind == "state":
        life = STATE
    if layer.kind != "indexer":
        return life.name, domain, life
    return "indexer" if life == FULL else f"indexer {life.name}", domain, life


def _tied(group: LifecycleGroup, groups: Sequence[LifecycleGroup]) -> LifecycleGroup:
    """Tie index keys to the group of the latents that they select from."""
    if group.layers[0].kind != "indexer":
        return group
    wanted = {layer.index for layer in group.layers}
    for other in groups:
        held = {layer.index for layer in other.layers if layer.kind == "mla"}
        if other.lifecycle == group.lifecycle and wanted <= held:
            return dataclasses.replace(group, tied_to=other.name)
    raise errors.ConfigError(
        errors.say(
            f"index keys of layers {', '.join(map(str, sorted(wanted)))}",
            "index keys select from the latent of their layer and live as long",
            "Give each indexer the index and the window of a latent layer",
        )
    )


def _require_names(layers: Sequence[LayerSpec], domain: str) -> None:
    """Refuse a set of layers that cannot be told apart."""
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
    if not any(layer.shares is None for layer in layers) or repeated:
        raise errors.ConfigError(
            errors.say(
                f"{len(names)} layers"
                + (f", {repeated} more than once" * bool(repeated)),
                "a group has at least one layer with a cache and each name once",
                "Give every layer a name of its own",
            )
        )
    owners = {layer.name for layer in layers if layer.shares is None}
    lost = [x.name for x in layers if x.shares is not None and x.shares not in owners]
    if lost:
        raise errors.ConfigError(
            errors.say(
                f"layers {', '.join(lost)} that read another layer's cache",
                "the layer they name keeps a cache of its own",
                f"Share with one of {', '.join(sorted(owners))}",
            )
        )
