"""Arrays: a pool as it is given, one array or one for each of an order's planes.

The law: array i of a pool is the plan's array i, declared by its order and never
guessed from a shape. An array is u8[R, P, E], page p being its row p, or u8[R, N] where
an order has regions: then pages stand where the planes say.

    parts(pages, plan)    # a part a plane: which array, and where its pages lie in it
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from kvmem.canonical.plan import CopyPlan

__all__ = ["Pages", "Part", "as_given", "listed", "num_pages", "parts"]

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
