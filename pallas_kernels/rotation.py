"""Rotation: pairs of keys turned in float32, as an array and as words in a kernel.

The law: for keys of 16 bits the result is the same to the last bit whatever the
compiler fuses. A cosine is cut into its upper bits and the rest, so that each product
with a key is exact in 24 bits; a fused multiply-add then rounds as a multiplication
and an addition do. Keys of 32 bits have no such room, and agree to an ulp or two.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits

__all__ = ["DTYPES", "STYLES", "Window", "is_still", "on_host", "tables", "turned"]

STYLES = ("half", "interleaved")
DTYPES = ("bfloat16", "float16", "float32")
# Bits of a cosine that leave its product with a key exact in 24: 24 - 8, 24 - 11.
_UPPER = {"bfloat16": 0xFFFFFF00, "float16": 0xFFFFF800}


@dataclasses.dataclass(frozen=True)
class Window:
    """Keys of a row that turn: `pairs` pairs, whose 2 * pairs elements stand together.

    Pairs are (f, f + pairs) in style "half" and (2 f, 2 f + 1) in "interleaved".
    """

    style: str
    dtype: str
    pairs: int

    @property
    def nbytes(self) -> int:
        """Bytes of the window."""
        return 2 * self.pairs * jnp.dtype(self.dtype).itemsize

    @property
    def words(self) -> int:
        """Words of the window."""
        return self.nbytes // 4

    @property
    def columns(self) -> int:
        """Words that registers hold of a row at once: of pairs, or of first halves."""
        return self.words if self.style == "interleaved" else self.words // 2

    @property
    def num_tables(self) -> int:
        """Tables of `by_column`."""
        return 2 if self._is_plain else 4

    @property
    def _is_plain(self) -> bool:
        return self.style == "interleaved" or self.dtype == "float32"

    def objection(self) -> str | None:
        """Say why no kernel turns such keys, None when one does."""
        if self.style not in STYLES or self.dtype not in DTYPES:
            return (
                f"style {self.style!r} of {self.dtype}: one of {STYLES} and of {DTYPES}"
            )
        if self.dtype == "float32" and self.style == "interleaved":
            return "interleaved pairs of float32 stand in two lanes' words"
        if not self._is_plain and self.pairs % 2:
            return f"{self.pairs} pairs: two keys of 16 bits share a word"
        return None

    def turned_bytes(self, old, c, s):
        """Return windows u8[..., nbytes] turned by f32[..., pairs]: the reference."""
        element, is_half = jnp.dtype(self.dtype), self.style == "half"
        keys = lax.bitcast_convert_type(
            old.reshape(*old.shape[:-1], 2 * self.pairs, element.itemsize), element
        )
        split = (2, self.pairs) if is_half else (self.pairs, 2)
        axis = -2 if is_half else -1
        paired = keys.reshape(*keys.shape[:-1], *split)
        x, y = (
            jnp.take(paired, half, axis=axis).astype(jnp.float32) for half in (0, 1)
        )
        c, s = (jnp.broadcast_to(table, x.shape) for table in (c, s))
        pair = [part.astype(element) for part in turned(x, y, c, s, self.dtype)]
        new = lax.bitcast_convert_type(jnp.stack(pair, axis=axis), jnp.uint8)
        still = jnp.stack([is_still(c, s)] * 2, axis=axis).reshape(keys.shape)
        apart = (*keys.shape, element.itemsize)
        new, was = new.reshape(apart), old.reshape(apart)
        return jnp.where(still[..., None], was, new).reshape(old.shape)

    def by_column(self, cos, sin) -> list:
        """Return cosines and sines f32[rows, columns], by the column that they turn."""
        flat = [table.reshape(-1, table.shape[-1]) for table in (cos, sin)]
        if self._is_plain:
            return flat
        return [table[:, start::2] for table in flat for start in (0, 1)]

    def tile_rows(self, slots: int, most: int = 16) -> int:
        """Return rows that turn at once: a divisor of the slots that fills the lanes.

        0 where there is none.
        """
        fitting = [
            rows
            for rows in range(1, min(slots, most) + 1)
            if slots % rows == 0 and rows * self.columns % limits.LANES == 0
        ]
        return max(fitting, default=0)

    def turn_tile(self, at: Callable, held, rows: int) -> None:
        """Turn a tile in shared memory, u32[rows, words], by its tables.

        Each lane has words: of one pair where pairs are interleaved, else the word of
        two first elements and the word of their two partners.

        Args:
            at: the reference of some words of every row of the tile.
            held: references of tables as `by_column` has them, f32[rows, columns].
        """
        columns, dtype = self.columns, self.dtype
        layout = plgpu.Layout.WG_STRIDED((rows, columns), vec_size=1)

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        if self.style == "interleaved":
            place = at(pl.ds(0, columns))
            word, c, s = load(place), load(held[0]), load(held[1])
            pair = turned(*_halves(word, dtype), c, s, dtype)
            place[...] = jnp.where(is_still(c, s), word, _word(*pair, dtype))
            return
        places = [at(pl.ds(part * columns, columns)) for part in (0, 1)]
        old = [load(place) for place in places]
        if dtype == "float32":
            new = _turned_words(old, load(held[0]), load(held[1]))
        else:
            new = _turned_twos(old, *(load(table) for table in held), dtype)
        for place, word in zip(places, new, strict=True):
            place[...] = word


def tables(deltas: np.ndarray, frequencies: np.ndarray):
    """Return cos, sin f32[n, T, F] of deltas i[n, T] and frequencies f[F].

    In double precision on the host: an angle of 10^5 radians has no digit to spare in
    float32.
    """
    angle = np.asarray(deltas, np.float64)[..., None] * np.asarray(frequencies)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def on_host(reference: Callable, pages: np.ndarray, *arrays, **facts) -> np.ndarray:
    """Run a reference on the CPU; write the pool that it gives into `pages`."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        run = jax.jit(functools.partial(reference, **facts))
        pages[...] = np.asarray(run(pages, *arrays))
    return pages


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
