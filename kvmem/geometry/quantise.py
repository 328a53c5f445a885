"""Quantised rows on the host: fp8 values with a scale a block, out and in again.

The law: no finite number becomes NaN. A cast saturates at the largest finite value of
its dtype (a plain one gives NaN from 465 up in e4m3fn), a block of zeros has a finite
scale and stays zeros, and a block that holds an infinity or NaN is refused: no scale
means anything beside it.

    values, scales = quantise(rows, "float8_e4m3fn", "float32", num_scales=4)
    rows = dequantise(values, scales)    # f32[..., D] of [..., D] and [..., 4]
"""

import ml_dtypes
import numpy as np

from kvmem import errors
from kvmem.geometry.fields import np_dtype

__all__ = ["dequantise", "narrow", "quantise"]

# Rows smaller than this are as good as zero; their scale stays a normal number, of
# float32 or of what it is kept in.
_SMALLEST = np.float32(1e-30)
_POWERS = "float8_e8m0fnu"


def narrow(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return f32 rows in `dtype`, saturated; NaN stays NaN, infinities saturate."""
    held = np_dtype(dtype)
    if held == np.float32:
        return rows
    most = _largest(dtype)
    return np.clip(rows, -most, most).astype(held)


def quantise(
    rows: np.ndarray, dtype: str, scale_dtype: str, num_scales: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows f32[..., D] as values of `dtype` and scales [..., num_scales].

    A scale is its block's largest magnitude over the dtype's largest finite value, in
    float32 or another float dtype, within the normal numbers of that; in e8m0 the next
    power of two.

    Raises:
        CorruptPage: a block that is not finite.
    """
    blocks = _blocks(rows, num_scales)
    largest = np.abs(blocks).max(axis=-1)
    if not np.isfinite(largest).all():
        raise errors.CorruptPage(
            errors.say(
                f"{(~np.isfinite(largest)).sum()} blocks with an infinity or NaN",
                "a block's scale is its largest magnitude, which is then none",
                "Compute these tokens again",
            )
        )
    wanted = largest * np.float32(1 / _largest(dtype))
    scales = np.maximum(wanted, _SMALLEST)
    if scale_dtype == _POWERS:
        scales = np.exp2(np.ceil(np.log2(scales)))
    else:
        facts = ml_dtypes.finfo(np_dtype(scale_dtype))
        scales = np.clip(scales, np.float32(facts.tiny), np.float32(facts.max))
    scales = scales.astype(np_dtype(scale_dtype))
    values = narrow(blocks / scales.astype(np.float32)[..., None], dtype)
    return values.reshape(rows.shape), scales


def dequantise(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return f32[..., D] of values [..., D] and scales [..., blocks]."""
    blocks = _blocks(values, scales.shape[-1])
    return (blocks * scales.astype(np.float32)[..., None]).reshape(values.shape)


def _blocks(rows: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return f32[..., blocks, width] of rows [..., D], of which there may be none."""
    shape = *rows.shape[:-1], num_blocks, rows.shape[-1] // num_blocks
    return rows.astype(np.float32).reshape(shape)


def _largest(dtype: str) -> np.float32:
    """Return the largest finite value of a float dtype."""
    return np.float32(ml_dtypes.finfo(np_dtype(dtype)).max)
