"""Fillings: arrays of a case, fresh from a seed and as hostile as callers are.

Bytes tell every page from every other, ids name the last pages of the pool, nobody's
and some twice, keys that turn are finite, and every fifth delta is nought.

    arrays = fill(case, seed=11)
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rotation
from pallas_kernels.specs import Argument, Case, Model

__all__ = ["fill"]


def fill(case: Case, seed: int) -> list[jax.Array]:
    """Return fresh arguments: random bytes, hostile ids, finite keys to rotate."""
    keys = jax.random.split(jax.random.key(seed), len(case.arguments))
    made = [
        _made(argument, case.model, key)
        for argument, key in zip(case.arguments, keys, strict=True)
    ]
    kinds = [argument.kind for argument in case.arguments]
    if "cosine" in kinds:
        keys = max(at for at, kind in enumerate(kinds) if kind == "bytes")
        made[keys] = _finite(made[keys])
        at = kinds.index("cosine")
        made[at : at + 2] = _angles(case.arguments[at].shape, seed)
    return made


def _made(argument: Argument, model: Model, key) -> jax.Array:
    if argument.kind == "bytes":
        return _bytes(key, argument.shape)
    if argument.kind == "ids":
        return _hostile(argument, key)
    if argument.kind == "slots":
        return jax.random.randint(key, argument.shape, 0, argument.high, jnp.int32)
    if argument.kind == "table":
        table = model.table()
        return jnp.asarray(table[:: len(table) // argument.shape[0]])
    if argument.kind == "offsets":
        return jnp.asarray(_offsets(model, argument.shape[0]))
    if argument.kind == "first":
        return jnp.int32(min(1, model.slots - 1))
    return jnp.zeros(argument.shape, argument.dtype)  # angles: see `fill`


@functools.partial(jax.jit, static_argnums=1)
def _bytes(key, shape: tuple[int, ...]) -> jax.Array:
    """Return bytes that tell pages apart, in no more memory than they take."""
    width = math.prod(shape[1:])
    base = jax.random.bits(key, (min(shape[0], 32), width), jnp.uint8)
    row = jnp.arange(shape[0], dtype=jnp.uint32)
    mixed = (row * jnp.uint32(2_654_435_761) >> 24).astype(jnp.uint8)
    return (base[row % base.shape[0]] ^ mixed[:, None]).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _finite(pages: jax.Array) -> jax.Array:
    """Return bytes whose 16-bit floats have sizes from 2^-63 to 2: no NaN's payload."""
    is_upper = jnp.arange(pages.shape[1], dtype=jnp.int32) % 2 == 1
    bounded = (pages & jnp.uint8(0xBF)) | jnp.uint8(0x20)
    return jnp.where(is_upper[None, :], bounded, pages)


def _hostile(argument: Argument, key) -> jax.Array:
    """Return ids of the pool, the last ones among them, and nobody's between."""
    (n,), high = argument.shape, argument.high
    ids = jax.random.randint(key, (n,), max(0, high - 4 * n), high, jnp.int32)
    odd = jnp.array([high, -1, high - 1, 2**31 - 1, high - 1], jnp.int32)
    return ids.at[1 + jnp.arange(min(5, n // 2)) * 2].set(odd[: min(5, n // 2)])


def _offsets(model: Model, count: int) -> np.ndarray:
    """Return where blocks, or the rotated windows of keys, begin in a page."""
    step = model.num_runs // count
    first = 0 if model.rope is None else model.rope[2]
    rows = np.arange(count) * step * model.row_nbytes * model.slots
    return (rows + first).astype(np.int32)


def _angles(shape: tuple[int, ...], seed: int) -> tuple[jax.Array, jax.Array]:
    """Return tables of deltas, every fifth slot's nought."""
    n, slots, pairs = shape
    deltas = np.random.default_rng(seed).integers(-(10**5), 10**5, (n, slots))
    deltas[:, ::5] = 0
    frequencies = 10_000.0 ** (-np.arange(pairs) / pairs)
    return tuple(jnp.asarray(t) for t in rotation.tables(deltas, frequencies))
