"""Texts in every cut, poisoned pools, and tables of shuffled pages."""

import itertools
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvmem.geometry import Topology, envelope, group_layers
from kvmem.pool.table import GroupTable


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


def cuts(length: int) -> list[tuple[int, ...]]:
    """Every way to cut a text into chunks."""
    found = []
    for bars in itertools.product((False, True), repeat=length - 1):
        edges = [0, *(i + 1 for i, bar in enumerate(bars) if bar), length]
        found.append(tuple(b - a for a, b in itertools.pairwise(edges)))
    return found


def page_of(
    layers, page_size=4, order="head_major", tp=1, nbytes=None, max_length=None
):
    """The envelope of layers that are one group; cut to pages of `nbytes`."""
    (group,) = group_layers(layers, page_size, max_length=max_length)
    env = envelope.build(group, Topology(tp=tp), 0, order)
    return envelope.cut(env, env.nbytes if nbytes is None else nbytes)


def poisoned(num_pages: int, nbytes: int, ranks: int | None = None):
    """Pages full of NaN in every dtype."""
    shape = (num_pages, nbytes) if ranks is None else (ranks, num_pages, nbytes)
    return jnp.full(shape, 0xFF, jnp.uint8)


def table(pages, first=None) -> GroupTable:
    pages = jnp.asarray(pages, jnp.int32)
    first = [0] * len(pages) if first is None else first
    return GroupTable(pages, jnp.asarray(first, jnp.int32))


def padded(part: np.ndarray, width: int) -> np.ndarray:
    """Rows [S, n, ...] of a chunk, NaN behind them up to `width`."""
    full = np.full((part.shape[0], width, *part.shape[2:]), np.nan, np.float32)
    full[:, : part.shape[1]] = part
    return full


def narrowed(rows: np.ndarray, dtype: str, block: int | None = None) -> np.ndarray:
    """Rows as a cache of `dtype` keeps them, a scale a block of elements or none."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if block is None:
        return rows.astype(kind).astype(np.float32)
    blocks = rows.reshape(*rows.shape[:-1], -1, block)
    scales = np.abs(blocks).max(-1, keepdims=True) * np.float32(1 / 448)
    values = (blocks / scales).astype(kind).astype(np.float32)
    return (values * scales).reshape(rows.shape)


@pytest.fixture(scope="session")
def lay():
    """The plain functions of this file."""
    return types.SimpleNamespace(
        cuts=cuts,
        ints=ints,
        narrowed=narrowed,
        padded=padded,
        page_of=page_of,
        poisoned=poisoned,
        table=table,
    )
