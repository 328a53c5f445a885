"""Layers and their fields: what a model keeps of one token.

A `LayerSpec` is the public fact about one layer of cache; `fields` expands it to the
rows that are stored, in declared order (k before v). Everything that says how many
bytes a token costs is a sum over fields: there is no second formula.

    LayerSpec("layers.0", 0, kv_heads=3, head_dim=64).fields
    # (Field(layer='layers.0', name='k', heads=3, head_nbytes=256, dtype='float32'),
    # v...)
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from kvmem import errors
from kvmem.geometry import facts
from kvmem.geometry.rope import Rope

__all__ = ["DTYPES", "Field", "LayerSpec", "np_dtype"]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def np_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of a cache dtype's name, or refuse it in words."""
    if name not in DTYPES:
        raise errors.ConfigError(
            errors.say(
                f"cache dtype {name!r}",
                "a stored element has a known width",
                f"Use one of {', '.join(DTYPES)}",
            )
        )
    return DTYPES[name]


@dataclasses.dataclass(frozen=True)
class Field:
    """One stored row a token and head: `heads` rows of `head_nbytes` bytes.

    `heads == 0` marks a replicated field: one row a token, the same on every rank.

    Raises:
        ConfigError: no dtype, or a width that is none of it.
    """

    layer: str
    name: str
    heads: int
    head_nbytes: int
    dtype: str

    def __post_init__(self):
        item = np_dtype(self.dtype).itemsize
        if self.heads < 0 or self.head_nbytes < 1 or self.head_nbytes % item:
            raise errors.ConfigError(
                errors.say(
                    f"field {self.name!r} of layer {self.layer!r}: {self.heads} rows "
                    f"of {self.head_nbytes} bytes in {self.dtype}",
                    "a stored row is a whole number of elements, at least one",
                    "Give a dtype and a positive width",
                )
            )

    @property
    def rows(self) -> int:
        """Rows a token in the whole model: the heads, or one replicated row."""
        return max(1, self.heads)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in the whole model, every head once."""
        return self.rows * self.head_nbytes


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps of a token.

    Args:
        name: the layer's name, unique in the model.
        index: its numeric place; records and pages are ordered by it.
        kind: "gqa" (keys and values a head).
        kv_heads, head_dim, v_head_dim: heads and elements a row (v_head_dim None:
            equal).
        dtype: a key of `DTYPES`.
        rope: how keys were rotated before they were stored; None: not rotated.
        window, sinks: sliding window and kept first tokens; None: full attention.
        scale: softmax scale when it is not head_dim ** -0.5.

    Raises:
        ConfigError: a kind or width that no field can be made of.
    """

    name: str
    index: int
    kind: str = "gqa"
    kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None
    dtype: str = "float32"
    rope: Rope | None = None
    window: int | None = None
    sinks: int = 0
    scale: float | None = None

    def __post_init__(self):
        facts.require_hashable(self)
        np_dtype(self.dtype)
        if self.kind != "gqa":
            raise errors.ConfigError(
                errors.say(
                    f"layer {self.name!r} of kind {self.kind!r}",
                    "this version keeps grouped-head keys and values only",
                    "Use kind 'gqa'",
                )
            )
        for what in ("kv_heads", "head_dim", "value_dim"):
            if getattr(self, what) < 1:
                raise errors.ConfigError(
                    errors.say(
                        f"layer {self.name!r} with {what} = {getattr(self, what)}",
                        "a stored row has a positive width",
                        f"Give {what} >= 1",
                    )
                )

    @property
    def value_dim(self) -> int:
        """Elements of a value row."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores of this layer."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @functools.cached_property
    def fields(self) -> tuple[Field, ...]:
        """The stored rows of this layer in declared order."""
        item = np_dtype(self.dtype).itemsize
        heads = self.kv_heads
        return (
            Field(self.name, "k", heads, self.head_dim * item, self.dtype),
            Field(self.name, "v", heads, self.value_dim * item, self.dtype),
        )
