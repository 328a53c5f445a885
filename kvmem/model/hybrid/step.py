"""One step of a hybrid: the new tokens, and where each layer's pages stand.

The law: a layer is found by its name in exactly one group's envelope; its table is that
group's.

    step = Step.of(envelopes, tables, starts, num_new, num_steps=1)
    envelope, table = step.group("layers.3")
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Envelope, LayerSpec, np_dtype
from kvmem.model.mixers import scaled
from kvmem.pool.table import GroupTable

__all__ = ["Step", "as_kept"]


@dataclasses.dataclass(frozen=True)
class Step:
    """What a call of `paged` is given, by layer."""

    groups: Mapping[str, tuple[Envelope, GroupTable]]
    starts: jax.Array  # i32[S] tokens in the pages before the step
    num_new: jax.Array  # i32[S] how many of the Q are real
    positions: jax.Array  # i32[S, Q] where each new token stands

    @classmethod
    def of(
        cls,
        envelopes: tuple[Envelope, ...],
        tables: tuple[GroupTable, ...],
        starts: jax.Array,
        num_new: jax.Array,
        num_steps: int,
    ) -> "Step":
        """Sort the groups' envelopes and tables by the layers that they hold."""
        groups = {
            entry.field.layer: (envelope, table)
            for envelope, table in zip(envelopes, tables, strict=True)
            for entry in envelope.entries
        }
        ahead = jnp.arange(num_steps, dtype=jnp.int32)[None]
        return cls(groups, starts, num_new, starts[:, None] + ahead)

    @property
    def lengths(self) -> jax.Array:
        """Tokens in the pages after the step, i32[S]."""
        return self.starts + self.num_new

    def group(self, layer: str) -> tuple[Envelope, GroupTable]:
        """Return the envelope and the table of the group that holds a layer."""
        if layer not in self.groups:
            raise IncompatiblePlan(
                say(
                    f"layer {layer!r}",
                    f"the pages hold {', '.join(sorted(self.groups))}",
                    "Build an envelope for every group of the model",
                )
            )
        return self.groups[layer]


def as_kept(rows: jax.Array, cache: LayerSpec, name: str) -> jax.Array:
    """Return rows [..., D] as f32 after the rounding of one field of a cache."""
    fields = {field.name: field for field in cache.fields}
    dtype = fields[name].dtype
    scales = fields.get("scale")
    if scales is None or not np_dtype(dtype).itemsize == 1:
        return scaled.rounded(rows, dtype)
    count = scales.head_nbytes // np_dtype(scales.dtype).itemsize
    return scaled.rounded(rows, dtype, count)
