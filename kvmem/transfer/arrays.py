"""Arrays: a pool as it is given, one array or one for each of an order's planes.

The law: array i of a pool is the plan's array i, declared by its order and never
guessed from a shape. An array is u8[R, P, E], page p being its row p, or u8[R, N] where
an order has regions: then pages stand where the planes say.

    parts(pages, plan)    # a part a plane: which array, and where its pages lie in it
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvmem.canonical.plan import CopyPlan

__all__ = [
    "Pages",
    "Part",
    "as_bytes",
    "as_given",
    "from_bytes",
    "listed",
    "num_pages",
    "parts",
]

Pages = jax.Array | tuple[jax.Array, ...]


class Part(NamedTuple):
    """One plane of a pool: page p is [base + p * page_stride, + nbytes) of a rank."""

    array: int
    base: int
    page_stride: int
    nbytes: int


def listed(pages: Pages | Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return the arrays of a pool; a pool of one array is that array itself."""
    return tuple(pages) if isinstance(pages, tuple | list) else (pages,)


def as_given(arrays: Sequence[jax.Array], pages: Pages) -> Pages:
    """Return arrays in the form that `pages` has: one array, or a tuple."""
    return tuple(arrays) if isinstance(pages, tuple | list) else arrays[0]


def num_pages(pages: Pages, plan: CopyPlan) -> int:
    """Return the pages of a pool."""
    first = listed(pages)[0]
    return first.shape[1] if first.ndim == 3 else plan.num_pages


def parts(pages: Pages, plan: CopyPlan) -> tuple[Part, ...]:
    """Return where each of the plan's planes lies, in their order."""
    arrays = listed(pages)
    found = []
    for plane in plan.planes:
        array, base, stride = arrays[plane.index], plane.base, plane.page_stride
        if array.ndim == 3:
            base, stride = 0, array.shape[2]
        found.append(Part(plane.index, base, stride, plane.page_stride))
    return tuple(found)


def as_bytes(arrays: Sequence[jax.Array], plan: CopyPlan) -> Pages:
    """Return declared arrays as the pages that transfer takes: a copy, of bytes.

    Args:
        arrays: as `geometry.declare` was given them; without a rank axis they are one
            rank's.
    """
    ranks, made = plan.topology.ranks, []
    page_nbytes = {plane.index: plane.page_stride for plane in plan.planes}
    for index, array in enumerate(arrays):
        raw = jax.lax.bitcast_convert_type(array, jnp.uint8)
        one_plane = plan.num_pages is None
        shape = (ranks, -1, page_nbytes[index]) if one_plane else (ranks, -1)
        made.append(raw.reshape(shape))
    return made[0] if plan.num_arrays == 1 else tuple(made)


def from_bytes(pages: Pages, like: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return pages in the shapes and dtypes of declared arrays: a copy."""
    found = []
    for array, want in zip(listed(pages), like, strict=True):
        item = want.dtype.itemsize
        raw = (
            array.reshape(*want.shape, item) if item > 1 else array.reshape(want.shape)
        )
        found.append(jax.lax.bitcast_convert_type(raw, want.dtype))
    return tuple(found)
