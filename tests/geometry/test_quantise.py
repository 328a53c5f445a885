"""Quantised rows: no finite number becomes NaN, and blocks keep what they can."""

import ml_dtypes
import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import np_dtype, quantise

E4M3 = "float8_e4m3fn"


@pytest.mark.case("QNT-04")
def test_a_cast_saturates_and_blocks_of_zeros_and_infinities_are_stated():
    rows = np.array([1000, 465, 464, -1000, 0.5], np.float32)
    found = quantise.narrow(rows, E4M3)
    assert found.astype(np.float32).tolist() == [448, 448, 448, -448, 0.5]
    assert np.isnan(rows.astype(np_dtype(E4M3)).astype(np.float32)).sum() == 3
    values, scales = quantise.quantise(np.zeros((1, 8), np.float32), E4M3, "float32", 2)
    assert not values.astype(np.float32).any()
    assert np.isfinite(scales).all() and (scales > 0).all()
    bad = np.array([[1, np.inf, 2, 3]], np.float32)
    with pytest.raises(errors.CorruptPage, match="1 blocks with an infinity"):
        quantise.quantise(bad, E4M3, "float32", 1)


@pytest.mark.parametrize("dtype", [E4M3, "float8_e5m2"])
@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
def test_rows_come_back_within_half_a_step(dtype, scale_dtype):
    rows = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32) * 300
    values, scales = quantise.quantise(rows, dtype, scale_dtype, 4)
    assert (values.dtype, scales.shape) == (np_dtype(dtype), (64, 4))
    back = quantise.dequantise(values, scales)
    largest = np.abs(rows.reshape(64, 4, 8)).max(axis=2).repeat(8, axis=1)
    step = 2.0 ** -(ml_dtypes.finfo(np_dtype(dtype)).nmant + 1)
    assert (np.abs(back - rows) <= np.abs(rows) * step + largest * 2e-3).all()
    assert np.isfinite(back).all()


def test_halves_saturate_and_float32_stays():
    rows = np.array([1e6, -1e6, 3.0], np.float32)
    assert quantise.narrow(rows, "float16").tolist() == [65504, -65504, 3]
    assert quantise.narrow(rows, "float32") is rows
    assert np.isnan(quantise.narrow(np.array([np.nan], np.float32), E4M3)[0])


@pytest.mark.case("QNT-04")
@pytest.mark.case("QNT-07")
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", E4M3, "float8_e5m2"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-5, 1.0, 1e4, 1e9])
def test_a_narrow_scale_makes_no_finite_number_nan(scale_dtype, size):
    rows = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32) * size
    values, scales = quantise.quantise(rows, E4M3, scale_dtype, 4)
    wide = scales.astype(np.float32)
    assert np.isfinite(wide).all() and (wide > 0).all()
    assert np.isfinite(quantise.dequantise(values, scales)).all()


def test_no_rows_are_no_values():
    values, scales = quantise.quantise(np.zeros((0, 8), np.float32), E4M3, "float32", 2)
    assert (values.shape, scales.shape) == ((0, 8), (0, 2))
    assert quantise.dequantise(values, scales).shape == (0, 8)
