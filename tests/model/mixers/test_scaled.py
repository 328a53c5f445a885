import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.model.mixers import scaled

FP8 = ("float8_e4m3fn", "float8_e5m2")


def rows_of(size, seed=0):
    rows = np.random.default_rng(seed).standard_normal((50, 256)).astype(np.float32)
    return rows * np.float32(size)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e6, 1e30])
def test_a_row_comes_back_within_half_a_step(dtype, size):
    rows = rows_of(size)
    back = scaled.rounded(rows, dtype, 2)
    step = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}[dtype]
    block = np.abs(rows).reshape(50, 2, 128).max(-1, keepdims=True)
    tiny = np.broadcast_to(block * 2**-14, (50, 2, 128)).reshape(50, 256)
    assert (np.abs(back - rows) <= np.abs(rows) * step + tiny).all()


@pytest.mark.parametrize("dtype", FP8)
def test_zeros_come_back_as_zeros(dtype):
    values, scales = scaled.quantize(jnp.zeros((3, 256)), dtype, 2)
    assert np.isfinite(scales).all() and (np.asarray(scales) > 0).all()
    np.testing.assert_array_equal(scaled.dequantize(values, scales), np.zeros((3, 256)))


@pytest.mark.parametrize("dtype", FP8)
def test_no_finite_row_becomes_nan(dtype):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, (400, 128), np.uint32).view(np.float32)
    rows = bits[np.isfinite(bits).all(axis=1)]
    assert len(rows) > 100
    assert np.isfinite(scaled.rounded(rows, dtype, 1)).all()


def test_the_largest_element_of_a_block_is_the_largest_value():
    values, scales = scaled.quantize(rows_of(3.0), "float8_e4m3fn", 2)
    blocks = np.asarray(values).astype(np.float32).reshape(50, 2, 128)
    np.testing.assert_array_equal(np.abs(blocks).max(-1), np.full((50, 2), 448.0))
    assert scales.shape == (50, 2) and scales.dtype == np.float32


def test_blocks_have_scales_of_their_own():
    rows = np.concatenate([rows_of(1e-3)[:, :128], rows_of(1e3)[:, 128:]], axis=1)
    back = np.asarray(scaled.rounded(rows, "float8_e4m3fn", 2))
    assert np.abs(back - rows)[:, :128].max() < 1e-3
    shared = np.asarray(scaled.rounded(rows, "float8_e4m3fn", 1))
    assert np.abs(shared - rows)[:, :128].max() > 5e-4


def test_compiled_or_not_the_bytes_are_the_same():
    rows = rows_of(1.7)
    plain = scaled.quantize(rows, "float8_e4m3fn", 2)
    compiled = jax.jit(scaled.quantize, static_argnums=(1, 2))(rows, "float8_e4m3fn", 2)
    for a, b in zip(plain, compiled, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_rounding_without_scales_is_a_change_of_dtype():
    rows = rows_of(1.0)
    expected = rows.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(scaled.rounded(rows, "bfloat16"), expected)
