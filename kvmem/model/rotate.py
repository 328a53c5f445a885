"""Rotary positions: turn query and key rows by their place in the text.

Law: the rotation depends on a row's position and on declared `Rope` facts alone, so a
key that is stored rotated means the same to every reader. Angles are made once a step
and shared by all layers with the same facts.

    cos, sin = angles(rope, head_dim, positions)       # f32[S, Q, W/2]
    q, k = rotate(q, cos, sin, rope), rotate(k, cos, sin, rope)
"""

import jax
import jax.numpy as jnp

from kvmem.geometry import Rope

__all__ = ["angles", "rotate"]


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
    width = 2 * cos.shape[-1]
    window = rows[..., rope.offset : rope.offset + width]
    cos, sin = cos[..., None, :], sin[..., None, :]
    if rope.style == "half":
        a, b = jnp.split(window, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = window[..., 0::2], window[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        turned = pairs.reshape(window.shape)
    if width == rows.shape[-1]:
        return turned.astype(rows.dtype)
    before, after = rows[..., : rope.offset], rows[..., rope.offset + width :]
    return jnp.concatenate([before, turned.astype(rows.dtype), after], axis=-1)
