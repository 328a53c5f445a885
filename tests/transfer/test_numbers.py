"""Numbers come back exactly or not at all, in every dtype."""

import numpy as np
import pytest

from kvmem.geometry import DTYPES, LayerSpec, group_layers, np_dtype
from kvmem.transfer import numbers


def group(dtype, layers=2):
    specs = [
        LayerSpec(f"l{i}", i, kv_heads=2, head_dim=8, dtype=dtype)
        for i in range(layers)
    ]
    return group_layers(specs, page_size=4)[0]


def records(made, told, digit):
    parts = []
    for layer in made.layers:
        for head in range(2):
            for field in ("k", "v"):
                rows = told[layer.name, field][:, head]
                coded = numbers.as_digits(rows, layer.dtype, digit)
                parts.append(np.ascontiguousarray(coded).view(np.uint8))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_digits_of_every_pass_add_up_to_the_number(dtype):
    made = group(dtype)
    told = numbers.logical(made, 40)
    whole = numbers.line_up(made, told)
    assert len(np.unique(whole)) == whole.size
    passes = numbers.num_passes(made, 40)
    found = sum(
        numbers.from_digits(made, records(made, told, digit), digit)
        for digit in range(passes)
    )
    assert np.array_equal(found, whole)
    if passes > 1:
        one = numbers.from_digits(made, records(made, told, 0), 0)
        assert not np.array_equal(one, whole)


@pytest.mark.parametrize(
    "dtype, narrow",
    [
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e4m3fn"),
    ],
)
def test_a_cast_through_a_narrower_dtype_changes_nearly_every_number(dtype, narrow):
    made = group(dtype)
    given = records(made, numbers.logical(made, 40), 0)
    with np.errstate(over="ignore"):
        cast = given.view(np_dtype(dtype)).astype(np_dtype(narrow))
    cast = np.ascontiguousarray(cast.astype(np_dtype(dtype))).view(np.uint8)
    right, found = (numbers.from_digits(made, each, 0) for each in (given, cast))
    assert (found != right).mean() > 0.95  # nearly every element, whatever its number


@pytest.mark.parametrize(
    "wrong",
    [0.5, -1.0, -0.0, 1.0, 1.5 * 2**32, 256.0 * 2**32, np.nan, np.inf, -np.inf],
)
def test_what_is_no_digit_is_no_number(wrong):
    made = group("bfloat16", layers=1)
    told = numbers.logical(made, 3)
    given = records(made, told, 0)
    given.view(np_dtype("bfloat16"))[1, 5] = wrong
    found = numbers.from_digits(made, given, 0)
    assert found[1, 5] == -1
    assert (found < 0).sum() == 1
