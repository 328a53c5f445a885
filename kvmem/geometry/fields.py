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
from typing import NamedTuple

import ml_dtypes
import numpy as np

from kvmem import errors
from kvmem.geometry import facts
from kvmem.geometry.rope import Rope

__all__ = ["DTYPES", "KINDS", "Field", "LayerSpec", "Part", "np_dtype"]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_SCALE_DTYPES = {"float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu)}


def np_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of a cache dtype's name, or refuse it in words."""
    if name in _SCALE_DTYPES:  # a power of two and no number of its own
        return _SCALE_DTYPES[name]
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

    Args:
        is_scale: the rows are scales of the rows before them; a page keeps them at
            their own width, without padding from slot to slot.
        stored_nbytes: bytes that a row takes in a page, where kernels need it wider
            than it means; records carry `head_nbytes` alone.

    Raises:
        ConfigError: no dtype, or a width that is none of it.
    """

    layer: str
    name: str
    heads: int
    head_nbytes: int
    dtype: str
    is_scale: bool = False
    stored_nbytes: int | None = None

    def __post_init__(self):
        item = np_dtype(self.dtype).itemsize
        if self.stored_nbytes is not None and self.stored_nbytes < self.head_nbytes:
            raise errors.ConfigError(
                errors.say(
                    f"field {self.name!r} of layer {self.layer!r}: rows of "
                    f"{self.head_nbytes} bytes stored in {self.stored_nbytes}",
                    "a page keeps every byte of a row",
                    f"Store at least {self.head_nbytes} bytes",
                )
            )
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

    @property
    def row_nbytes(self) -> int:
        """Bytes that a row takes in a page: its own, or the wider ones declared."""
        return self.stored_nbytes or self.head_nbytes


class Part(NamedTuple):
    """A field of a layer that is not plain keys and values: rows of elements."""

    name: str
    heads: int  # 0: one row, the same on every rank
    elements: int
    dtype: str
    is_scale: bool = False


KINDS = ("gqa", "mla", "indexer", "state")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps of a token, or of a whole sequence.

    Args:
        name: the layer's name, unique in the model.
        index: its numeric place; records and pages are ordered by it.
        kind: "gqa" (keys and values a head), "mla" (one latent row a token), "indexer"
            (keys that select tokens for the latent of the same index) or "state" (one
            recurrent state a sequence).
        kv_heads, head_dim, v_head_dim: heads and elements a row (v_head_dim None:
            equal).
        dtype: a key of `DTYPES`.
        rope: how keys were rotated before they were stored; None: not rotated.
        window, sinks: sliding window and kept first tokens; None: full attention.
        scale: softmax scale when it is not head_dim ** -0.5.
        parts: the fields, where they are not a key and a value of one dtype; see
            `kvmem.geometry.kinds`.
        shares: name of the layer whose cache this one reads; it keeps none itself.
        stored_head_dim: elements that a row takes in a page, if more than head_dim.

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
    parts: tuple[Part, ...] = ()
    shares: str | None = None
    stored_head_dim: int | None = None

    def __post_init__(self):
        facts.require_hashable(self)
        np_dtype(self.dtype)
        if self.kind not in KINDS or (self.kind != "gqa" and not self.parts):
            raise errors.ConfigError(
                errors.say(
                    f"layer {self.name!r} of kind {self.kind!r} with "
                    f"{len(self.parts)} declared parts",
                    f"a kind is one of {', '.join(KINDS)}, and all but 'gqa' declare "
                    "the parts they keep",
                    "Use a constructor of kvmem.geometry.kinds",
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
        if self.shares is not None:
            return ()
        if self.parts:
            return tuple(self._field(part) for part in self.parts)
        stored = self.stored_head_dim
        rows = (("k", self.head_dim), ("v", self.value_dim))
        item = np_dtype(self.dtype).itemsize
        return tuple(
            Field(
                self.name,
                name,
                self.kv_heads,
                width * item,
                self.dtype,
                stored_nbytes=None if stored is None else stored * item,
            )
            for name, width in rows
        )

    def _field(self, part: Part) -> Field:
        nbytes = part.elements * np_dtype(part.dtype).itemsize
        return Field(
            self.name, part.name, part.heads, nbytes, part.dtype, part.is_scale
        )
