"""Words: bytes seen as u32, which on a GPU costs nothing, and back."""

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["WORD_NBYTES", "as_bytes", "as_words"]

WORD_NBYTES = 4


def as_words(rows: jax.Array) -> jax.Array:
    """View u8[n, b] as u32[n, b / 4], little-endian."""
    n, nbytes = rows.shape
    parted = rows.reshape(n, nbytes // WORD_NBYTES, WORD_NBYTES)
    return lax.bitcast_convert_type(parted, jnp.uint32)


def as_bytes(words: jax.Array) -> jax.Array:
    """View u32[n, w] as u8[n, 4 w]."""
    n, width = words.shape
    parted = lax.bitcast_convert_type(words, jnp.uint8)
    return parted.reshape(n, width * WORD_NBYTES)
