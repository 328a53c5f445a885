"""Numbers: every element of a logical array has one of its own, told digit by digit.

A dtype holds the whole numbers below 2 ** (its mantissa's bits) exactly; larger ones
are carried as digits, one pass each. A digit is written with its bits spread over the
whole mantissa and, where the dtype has the exponents, far above what a half float
holds, so a cast through a narrower dtype loses some. The law: only a number that came
back exactly counts; whatever else is read (NaN, a fraction, a rounded digit) is -1 or
another number.

    numbers = logical(group, num_tokens)         # {(layer, field): i64[token, head, w]}
    records = line_up(group, numbers)            # i64[token, elements of a record]
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from kvmem.geometry import Field, LifecycleGroup, np_dtype

__all__ = [
    "as_digits",
    "from_digits",
    "line_up",
    "logical",
    "num_passes",
    "numbered",
    "width",
]

_SPREAD = 0x9E3779B1  # odd: times it is a bijection of the digits of every width
_FAR = 2.0**32  # beyond float16, whose exponents end at 16

Logical = Mapping[tuple[str, str], np.ndarray]


def width(field: Field) -> int:
    """Return the elements of one row of a field."""
    return field.head_nbytes // np_dtype(field.dtype).itemsize


def logical(group: LifecycleGroup, num_tokens: int) -> Logical:
    """Return {(layer, field): i64[token, head, width]}, no two elements equal."""
    made, start = {}, 0
    for field in group.fields:
        shape = (num_tokens, field.rows, width(field))
        size = int(np.prod(shape))
        made[field.layer, field.name] = np.arange(start, start + size).reshape(shape)
        start += size
    return made


def line_up(group: LifecycleGroup, numbers: Logical) -> np.ndarray:
    """Return i64[token, elements]: layer, head, field, in declared order."""
    return np.concatenate([numbers[k][:, h] for k, h in _columns(group)], axis=1)


def num_passes(group: LifecycleGroup, num_tokens: int) -> int:
    """Return how many digits the largest number needs in the narrowest dtype."""
    total = num_tokens * sum(field.rows * width(field) for field in group.fields)
    bits = (total - 1).bit_length()
    return max(-(-bits // _bits(field.dtype)) for field in group.fields)


def as_digits(numbers: np.ndarray, dtype: str, digit: int) -> np.ndarray:
    """Return one digit of each number, exact in `dtype`."""
    bits = _bits(dtype)
    last = (1 << bits) - 1
    spread = (numbers >> (bits * digit) & last) * (_SPREAD & last) & last
    return (spread * _unit(dtype)).astype(np_dtype(dtype))


def from_digits(group: LifecycleGroup, records: np.ndarray, digit: int) -> np.ndarray:
    """Return i64[token, elements]: what records say of one digit, -1 where no digit.

    Args:
        records: u8[token, record].
    """
    fields = {(field.layer, field.name): field for field in group.fields}
    found, start = [], 0
    for key, _ in _columns(group):
        field = fields[key]
        stop = start + field.head_nbytes
        row = np.ascontiguousarray(records[:, start:stop])
        with np.errstate(invalid="ignore"):  # any NaN is welcome: it is no digit
            value = row.view(np_dtype(field.dtype)).astype(np.float64)
        value, bits = value / _unit(field.dtype), _bits(field.dtype)
        exact = (value == np.floor(value)) & ~np.signbit(value) & (value < 1 << bits)
        spread = np.where(exact, value, 0).astype(np.int64)
        back = pow(_SPREAD, -1, 1 << bits)
        whole = (spread * back & ((1 << bits) - 1)) << (bits * digit)
        found.append(np.where(exact, whole, -1))
        start = stop
    return np.concatenate(found, axis=1)


def numbered(group: LifecycleGroup) -> LifecycleGroup:
    """Return the group whose elements are four bytes wide: its records hold numbers."""
    layers = [
        dataclasses.replace(
            layer,
            dtype="float32",
            parts=tuple(part._replace(dtype="float32") for part in layer.parts),
        )
        for layer in group.layers
    ]
    return dataclasses.replace(group, layers=tuple(layers))


def _columns(group: LifecycleGroup) -> list[tuple[tuple[str, str], int]]:
    """List ((layer, field), head) in the order of a record."""
    return [
        ((layer.name, field.name), head)
        for layer in group.layers
        for head in range(max(field.rows for field in layer.fields))
        for field in layer.fields
        if head < field.rows
    ]


def _bits(dtype: str) -> int:
    """Return the bits of the whole numbers that a dtype holds exactly."""
    return ml_dtypes.finfo(np_dtype(dtype)).nmant + 1


def _unit(dtype: str) -> float:
    """Return what a digit of one is written as: a power of two, so no bit is lost."""
    return _FAR if ml_dtypes.finfo(np_dtype(dtype)).maxexp > 32 else 1.0
