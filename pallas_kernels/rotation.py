"""Rotation: pairs of keys turned in float32, as an array and as words in a kernel.

The law: for keys of 16 bits the result is the same to the last bit whatever the
compiler fuses. A cosine is cut into its upper bits and the rest, so that each product
with a key is exact in 24 bits; a fused multiply-add then rounds as a multiplication
and an addition do. Keys of 32 bits have no such room, and agree to an ulp or two.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["is_still", "tables", "turn_tile", "turned"]

# Bits of a cosine that leave its product with a key exact in 24: 24 - 8, 24 - 11.
_UPPER = {"bfloat16": 0xFFFFFF00, "float16": 0xFFFFF800}


def tables(deltas: np.ndarray, frequencies: np.ndarray):
    """Return cos, sin f32[n, T, F] of deltas i[n, T] and frequencies f[F].

    In double precision on the host: an angle of 10^5 radians has no digit to spare in
    float32.
    """
    angle = np.asarray(deltas, np.float64)[..., None] * np.asarray(frequencies)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def turned(x, y, c, s, dtype: str):
    """Return the pair rotated, in float32: exact but for one rounding of each sum."""
    if dtype == "float32":
        return x * c - y * s, y * c + x * s
    upper = jnp.uint32(_UPPER[dtype])
    c_high, s_high = (
        lax.bitcast_convert_type(
            lax.bitcast_convert_type(part, jnp.uint32) & upper, jnp.float32
        )
        for part in (c, s)
    )
    c_low, s_low = c - c_high, s - s_high
    return (
        (x * c_high - y * s_high) + (x * c_low - y * s_low),
        (y * c_high + x * s_high) + (y * c_low + x * s_low),
    )


def is_still(c, s):
    """Answer where a rotation is none, and bytes stay as they are."""
    return (c == 1) & (s == 0)


def turn_tile(window_ref, held, rows, columns, style, dtype) -> None:
    """Rotate a tile in shared memory, u32[rows, words], by tables f32[rows, columns].

    Each lane has words: of one pair where pairs are interleaved, else the word of two
    first elements and the word of their two partners.
    """
    layout = plgpu.Layout.WG_STRIDED((rows, columns), vec_size=1)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    if style == "interleaved":
        place = window_ref.at[:, pl.ds(0, columns)]
        word, c, s = load(place), load(held[0]), load(held[1])
        pair = turned(*_halves(word, dtype), c, s, dtype)
        place[...] = jnp.where(is_still(c, s), word, _word(*pair, dtype))
        return
    places = [window_ref.at[:, pl.ds(part * columns, columns)] for part in (0, 1)]
    old = [load(place) for place in places]
    if dtype == "float32":
        new = _turned_words(old, load(held[0]), load(held[1]))
    else:
        new = _turned_twos(old, *(load(table) for table in held), dtype)
    for place, word in zip(places, new, strict=True):
        place[...] = word


def _turned_words(old, c, s):
    """Turn words that are float32 keys."""
    pair = turned(
        *(lax.bitcast_convert_type(w, jnp.float32) for w in old), c, s, "float32"
    )
    new = (lax.bitcast_convert_type(part, jnp.uint32) for part in pair)
    return [jnp.where(is_still(c, s), w, n) for w, n in zip(old, new, strict=True)]


def _turned_twos(old, c_low, c_high, s_low, s_high, dtype):
    """Turn words of two keys, each key by a column of its own."""
    x, y = (_halves(word, dtype) for word in old)
    low = turned(x[0], y[0], c_low, s_low, dtype)
    high = turned(x[1], y[1], c_high, s_high, dtype)
    lower = jnp.where(is_still(c_low, s_low), jnp.uint32(0), jnp.uint32(0x0000FFFF))
    upper = jnp.where(is_still(c_high, s_high), jnp.uint32(0), jnp.uint32(0xFFFF0000))
    moved = lower | upper
    new = (_word(*both, dtype) for both in zip(low, high, strict=True))
    return [w & ~moved | n & moved for w, n in zip(old, new, strict=True)]


def _halves(word, dtype: str):
    """Return the two keys of a word as float32, the lower one first."""
    if dtype == "bfloat16":
        parts = word << 16, word & jnp.uint32(0xFFFF0000)
        return tuple(lax.bitcast_convert_type(part, jnp.float32) for part in parts)
    parts = (
        part.astype(jnp.uint16) for part in (word & jnp.uint32(0xFFFF), word >> 16)
    )
    keys = (lax.bitcast_convert_type(part, jnp.float16) for part in parts)
    return tuple(key.astype(jnp.float32) for key in keys)


def _word(low, high, dtype: str):
    """Return two float32 rounded to keys, in one word."""
    low, high = (
        lax.bitcast_convert_type(part.astype(dtype), jnp.uint16).astype(jnp.uint32)
        for part in (low, high)
    )
    return low | (high << 16)
