"""Facts about bytes: fields, rope, topology, envelopes, groups, budget terms.

The first floor. Frozen, hashable dataclasses and arithmetic on them; no jax.
"""

from kvmem.geometry import (
    envelope,
    formats,
    kinds,
    order,
    quantise,
    rerotate,
    rope,
    width,
)
from kvmem.geometry.declare import Declared, declare
from kvmem.geometry.envelope import Entry, Envelope, Plane
from kvmem.geometry.fields import DTYPES, Field, LayerSpec, Part, np_dtype
from kvmem.geometry.fixed_point import goes_on, hit_pages
from kvmem.geometry.groups import LifecycleGroup, group_layers
from kvmem.geometry.lifecycle import Lifecycle
from kvmem.geometry.rope import Rope
from kvmem.geometry.spread import Spread
from kvmem.geometry.terms import Term
from kvmem.geometry.topology import HeadShard, Topology

__all__ = [
    "DTYPES",
    "Declared",
    "Entry",
    "Envelope",
    "Field",
    "HeadShard",
    "LayerSpec",
    "Lifecycle",
    "LifecycleGroup",
    "Part",
    "Plane",
    "Rope",
    "Spread",
    "Term",
    "Topology",
    "declare",
    "envelope",
    "formats",
    "goes_on",
    "group_layers",
    "hit_pages",
    "kinds",
    "np_dtype",
    "order",
    "quantise",
    "rerotate",
    "rope",
    "width",
]
