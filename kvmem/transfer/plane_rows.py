"""Plane rows: pages taken out of a pool's planes and put back, in traced programs.

The law: a null page id (one past the end) reads zeros and is dropped when written, and
bytes behind a page in its row are kept.

    rows = gather(pages, ids, planes)          # u8[r, n, row bytes] a plane
    page = join(rows, planes)                  # u8[r, n, page bytes]
    pages = scatter(pages, ids, part_again(page, rows, planes), planes)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvmem.transfer.arrays import Pages, Part, as_given, listed

__all__ = ["Planes", "gather", "join", "part_again", "scatter"]


class Planes(NamedTuple):
    """Where the planes of a pool lie, and how many pages each has."""

    parts: tuple[Part, ...]
    num_pages: int


def gather(pages: Pages, ids: jax.Array, held: Planes) -> list[jax.Array]:
    """Return u8[r, n, page_stride] for each plane: the pages of `ids`."""
    arrays = listed(pages)
    views = [_view(arrays[part.array], part, held) for part in held.parts]
    return [jnp.take(view, ids, axis=1, mode="fill", fill_value=0) for view in views]


def scatter(pages: Pages, ids: jax.Array, rows: list[jax.Array], held: Planes) -> Pages:
    """Return the arrays with the pages of `ids` replaced in every plane."""
    arrays = list(listed(pages))
    for part, new in zip(held.parts, rows, strict=True):
        array = arrays[part.array]
        view = _view(array, part, held).at[:, ids].set(new, mode="drop")
        if array.ndim == 2:
            flat = view.reshape(view.shape[0], -1)
            view = jax.lax.dynamic_update_slice(array, flat, (0, part.base))
        arrays[part.array] = view
    return as_given(arrays, pages)


def _view(array: jax.Array, part: Part, held: Planes) -> jax.Array:
    """View a plane as u8[r, P, page_stride]."""
    if array.ndim == 3:
        return array
    stop = part.base + held.num_pages * part.page_stride
    return array[:, part.base : stop].reshape(array.shape[0], held.num_pages, -1)


def join(rows: list[jax.Array], held: Planes) -> jax.Array:
    """Lay the planes of each page end to end: u8[r, n, page bytes]."""
    ends = [row[..., : part.nbytes] for row, part in zip(rows, held.parts, strict=True)]
    return jnp.concatenate(ends, axis=2)


def part_again(
    joined: jax.Array, rows: list[jax.Array], held: Planes
) -> list[jax.Array]:
    """Cut joined pages into planes again, each with the spare bytes of its rows."""
    parted, start = [], 0
    for row, part in zip(rows, held.parts, strict=True):
        own = joined[..., start : start + part.nbytes]
        parted.append(jnp.concatenate([own, row[..., part.nbytes :]], axis=2))
        start += part.nbytes
    return parted
