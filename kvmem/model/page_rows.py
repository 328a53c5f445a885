"""Where one layer's rows stand in a page, as rows of a granule that divides them all.

A pool u8[P, E] is viewed as u8[P, E/g, g] and addressed by pairs (page, row): nobody
multiplies a page id by a stride. The law: `row * g` is the byte that
`entry.address(slot)` names, for every page order of `kvmem.geometry.envelope`.

    reading = read_plan(envelope, "layers.0", "k")
    reading.rows      # [H, 1] in head-major pages: T * D elements of a head at once

All of this is arithmetic on the host, done while a program is traced.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Envelope, Plane, np_dtype

FLOATS = ("float32", "bfloat16", "float16")

__all__ = ["FLOATS", "ReadPlan", "WritePlan", "read_plan", "write_plan"]


@dataclasses.dataclass(frozen=True, eq=False)
class ReadPlan:
    """Rows that hold a field's whole page, in the order they are to be gathered."""

    granule: int  # bytes of a row
    rows: np.ndarray  # i32[H, n] when head_first, else i32[1, n]
    head_first: bool  # bytes arrive as [H, T, D], else as [T, H, D]
    heads: int
    head_dim: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class WritePlan:
    """The rows of one slot of each head: first row at slot 0, rows a slot apart."""

    granule: int
    first: np.ndarray  # i32[H]
    stride: int  # rows from one slot to the next
    width: int  # rows of one slot of one head
    head_dim: int
    dtype: np.dtype

    def require(self, shape: tuple[int, ...], layer: str) -> None:
        """Refuse rows [H, D] that are not those of the pages."""
        held = (len(self.first), self.head_dim)
        if shape != held:
            raise IncompatiblePlan(
                say(
                    f"rows of {shape} for layer {layer!r}",
                    f"a token has {held[0]} rows of {held[1]} elements in its pages",
                    "Give this rank's KV heads, or build the envelope for them",
                )
            )


@functools.lru_cache(maxsize=4096)
def read_plan(envelope: Envelope, layer: str, name: str) -> ReadPlan:
    """Plan the gather of every slot of every local head of one field.

    Head-major pages give one long row a head. Where a head's slots are not contiguous
    the plan takes the bytes token by token, in the longest runs that the order has.
    """
    addresses, nbytes, dtype = _addresses(envelope, layer, name)
    page_nbytes = _plane_of(envelope, layer).page_stride
    slots = addresses - addresses[:, :1]
    head_first = bool((slots == np.arange(envelope.page_size) * nbytes).all())
    groups = addresses if head_first else addresses.T.reshape(1, -1)
    runs = [_merge(group, nbytes) for group in groups]
    sizes = [edge for group in runs for run in group for edge in run]
    granule = math.gcd(page_nbytes, *sizes)
    rows = [
        [
            row
            for at, size in group
            for row in range(at // granule, (at + size) // granule)
        ]
        for group in runs
    ]
    return ReadPlan(
        granule=granule,
        rows=np.asarray(rows, np.int32),
        head_first=head_first,
        heads=len(addresses),
        head_dim=nbytes // dtype.itemsize,
        dtype=dtype,
    )


@functools.lru_cache(maxsize=4096)
def write_plan(envelope: Envelope, layer: str, name: str) -> WritePlan:
    """Plan the scatter of one slot of every local head of one field."""
    addresses, nbytes, dtype = _addresses(envelope, layer, name)
    page_nbytes = _plane_of(envelope, layer).page_stride
    stride = envelope.entries_of(layer, name)[0].slot_stride
    granule = math.gcd(page_nbytes, nbytes, stride, *addresses[:, 0].tolist())
    return WritePlan(
        granule=granule,
        first=(addresses[:, 0] // granule).astype(np.int32),
        stride=stride // granule,
        width=nbytes // granule,
        head_dim=nbytes // dtype.itemsize,
        dtype=dtype,
    )


def _plane_of(envelope: Envelope, layer: str) -> Plane:
    """Return the one plane of a layer's rows: an array given as u8[P, E]."""
    entries = [entry for entry in envelope.entries if entry.field.layer == layer]
    planes = {entry.plane for entry in entries}
    if len(planes) != 1 or (plane := planes.pop()).base:
        raise IncompatiblePlan(
            say(
                f"attention over pages in order {envelope.order!r}",
                f"the keys and values of a layer ({layer!r}) share a page of one array",
                "Use an order with the field axis inside the page",
            )
        )
    return plane


def _addresses(
    envelope: Envelope, layer: str, name: str
) -> tuple[np.ndarray, int, np.dtype]:
    """Return i64[H, T] byte addresses of head rows, the bytes of a row, the dtype."""
    entries = envelope.entries_of(layer, name)
    field = entries[0].field
    if field.dtype not in FLOATS:
        raise IncompatiblePlan(
            say(
                f"attention over {field.dtype} pages (layer {layer!r})",
                "rows are stored unscaled, in a dtype that holds any key or value",
                f"Use one of {', '.join(FLOATS)}",
            )
        )
    slots = range(envelope.page_size)
    heads = [
        [entry.address(slot) + head * field.head_nbytes for slot in slots]
        for entry in entries
        for head in range(entry.nheads)
    ]
    return np.asarray(heads, np.int64), field.head_nbytes, np_dtype(field.dtype)


def _merge(starts: np.ndarray, nbytes: int) -> list[tuple[int, int]]:
    """Join pieces of `nbytes` that touch, in the order given: (start, size) runs."""
    breaks = np.flatnonzero(np.diff(starts) != nbytes) + 1
    edges = [0, *breaks.tolist(), len(starts)]
    return [(int(starts[a]), (b - a) * nbytes) for a, b in itertools.pairwise(edges)]
