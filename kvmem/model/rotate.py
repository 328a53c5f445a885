"""Rotary positions: turn query and key rows by their place in the text.

Law: the rotation depends on a row's position and on declared `Rope` facts alone, so a
key that is stored rotated means the same to every reader. Angles are made once a step
and shared by all layers with the same facts.

    cos, sin = angles(rope, head_dim, positions)       # f32[S, Q, W/2]
    q, k = rotate(q, cos, sin, rope), rotate(k, cos, sin, rope)

A key that was stored rotated is moved to another place by one turn of the distance.
Angles of long distances are taken in fixed point, as fractions of a turn: float32 would
round a turn of thousands of radians before its cosine is taken.

    k = by_delta(k, rope, new - stored)                # rows [..., D]
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from kvmem.geometry import Rope

__all__ = ["angles", "by_delta", "rotate"]


def angles(
    rope: Rope, row_width: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the scaled cosine and sine of each pair's turn, f32[..., W/2].

    Args:
        rope: how rows are rotated.
        row_width: elements of a row (head_dim).
        positions: i32[...], the place of each token in its sequence.
    """
    frequencies = jnp.asarray(rope.inverse_frequencies(row_width), jnp.float32)
    places = positions.astype(jnp.float32)[..., None]
    turn = places * frequencies.reshape((1,) * positions.ndim + (-1,))
    return jnp.cos(turn) * rope.magnitude, jnp.sin(turn) * rope.magnitude


def rotate(rows: jax.Array, cos: jax.Array, sin: jax.Array, rope: Rope) -> jax.Array:
    """Rotate rows [S, Q, H, D] by angles [S, Q, W/2]; dims outside the window stay."""
    return _replaced(rows, cos[..., None, :], sin[..., None, :], rope)


def by_delta(rows: jax.Array, rope: Rope, delta: jax.Array | int) -> jax.Array:
    """Return rows turned on by `delta` places, with unit magnitude, in their dtype.

    Args:
        rows: [..., D], rotated as `rope` says when they were stored; a magnitude that
            is in them stays in them once.
        delta: i32, new place minus stored place; one, or one for each of the first axes
            of `rows`. Rows that do not move keep their bits.
    """
    delta = jnp.asarray(delta, jnp.int32)
    inner = (1,) * (rows.ndim - 1 - delta.ndim)
    turn = _turn(rope.inverse_frequencies(rows.shape[-1]), delta)
    turn = turn.reshape(*delta.shape, *inner, turn.shape[-1])
    turned = _replaced(rows, jnp.cos(turn), jnp.sin(turn), rope)
    still = jnp.broadcast_to((delta == 0).reshape(*delta.shape, *inner, 1), rows.shape)
    return jnp.where(still, rows, turned)


def _replaced(rows: jax.Array, cos: jax.Array, sin: jax.Array, rope: Rope) -> jax.Array:
    """Return rows [..., D] with the window turned; angles have the rank of rows."""
    width = 2 * cos.shape[-1]
    window = rows[..., rope.offset : rope.offset + width].astype(cos.dtype)
    if rope.style == "half":
        a, b = jnp.split(window, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = window[..., 0::2], window[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        turned = pairs.reshape(window.shape)
    turned = _narrow(turned, rows.dtype)
    if width == rows.shape[-1]:
        return turned
    before, after = rows[..., : rope.offset], rows[..., rope.offset + width :]
    return jnp.concatenate([before, turned, after], axis=-1)


def _narrow(rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast, saturated where a plain cast of a finite number would be NaN."""
    if dtype.itemsize > 1:
        return rows.astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(rows, -most, most).astype(dtype)


def _turn(frequencies: np.ndarray, delta: jax.Array) -> jax.Array:
    """Return the angle of each pair over each distance, f32[..., W/2] in [-pi, pi).

    A frequency is a fraction of a turn in 64 bits; whole turns drop out of the product
    by themselves, and the upper half of the rest is exact for every distance.
    """
    fixed = [round(f / (2 * math.pi) % 1 * 2**64) % 2**64 for f in frequencies]
    high = jnp.asarray(np.array([f >> 32 for f in fixed], np.uint32))
    low = jnp.asarray(np.array([f & 0xFFFFFFFF for f in fixed], np.uint32))
    shape = (1,) * delta.ndim + (-1,)
    far = jnp.abs(delta).astype(jnp.uint32)[..., None]
    turned = far * high.reshape(shape) + _upper(far, low.reshape(shape))
    angle = turned.astype(jnp.int32).astype(jnp.float32) * (2 * math.pi / 2**32)
    return jnp.where(delta[..., None] < 0, -angle, angle)


def _upper(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the upper 32 bits of u32 products, from halves of 16 bits."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a_high * b_low + (a_low * b_low >> 16)
    rest = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (rest >> 16)
