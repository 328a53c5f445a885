"""Rows in fp8 with a float32 scale a block of elements.

The law: a row comes back within half a step of its block's scale, a row of zeros comes
back as zeros, and no finite row becomes NaN: the largest element of a block is the
largest finite fp8 value. A field without a "scale" beside it is stored as it is.

    values, scales = quantize(rows, "float8_e4m3fn", num_scales=4)
    rows = dequantize(values, scales)  # f32[..., D] of [..., D] and f32[..., 4]

The block is D / num_scales elements: 128 in DeepSeek-V3.2's latent and index keys.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kvmem.geometry import np_dtype

__all__ = ["dequantize", "quantize", "rounded"]

# Rows smaller than this are as good as zero; their scale stays a normal number.
_SMALLEST = 1e-30


def quantize(
    rows: jax.Array, dtype: str, num_scales: int
) -> tuple[jax.Array, jax.Array]:
    """Return the values of rows [..., D] in `dtype` and their f32[..., num_scales]."""
    largest = float(jnp.finfo(np_dtype(dtype)).max)
    blocks = rows.astype(jnp.float32).reshape(*rows.shape[:-1], num_scales, -1)
    # A product, because compilers may or may not make one of a quotient.
    scales = jnp.abs(blocks).max(axis=-1) * np.float32(1 / largest)
    scales = jnp.maximum(scales, _SMALLEST)
    values = blocks / scales[..., None]  # an ulp above the largest rounds down to it
    return values.astype(np_dtype(dtype)).reshape(rows.shape), scales


def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Return f32[..., D] of values [..., D] and scales [..., num_scales]."""
    blocks = values.astype(jnp.float32).reshape(*scales.shape, -1)
    return (blocks * scales[..., None]).reshape(values.shape)


def rounded(rows: jax.Array, dtype: str, num_scales: int = 0) -> jax.Array:
    """Return f32 rows as pages give them back: what a reference compares with."""
    if num_scales:
        return dequantize(*quantize(rows, dtype, num_scales))
    return rows.astype(np_dtype(dtype)).astype(jnp.float32)
