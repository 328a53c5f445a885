"""Readings: every format that arrays may be, by nesting, axes and fixed lengths.

    told([u8[10, 64, 264]])
    # "it reads as NL_X_NB_BS_HS ('page token dim'), NL_X_NB_BSV_BSS (...)"

The law: a reading is a row of the table that nothing seen rules out.
"""

from collections.abc import Sequence

import numpy as np

from kvmem.geometry.declare import ArrayLike
from kvmem.geometry.formats.table import FORMATS, Format

__all__ = ["described", "is_list", "is_nested", "is_pairs", "leaves", "listed"]
__all__ += ["misfit", "spelled", "told"]

# Blocked rows that engines are known to keep: bytes a token, values + scales.
KNOWN_SPLITS = {
    68: "64 + 4",
    132: "128 + 4",
    288: "256 + 32",
    352: "320 + 32",
    528: "512 + 16",
    584: "576 + 8",
}


def is_list(arrays: object) -> bool:
    """Say whether this is a list of arrays, not nested."""
    if not isinstance(arrays, list | tuple) or not arrays:
        return False
    return not any(isinstance(each, list | tuple) for each in arrays)


def is_nested(arrays: object) -> bool:
    """Say whether this is a list of lists of arrays, none of them empty."""
    if not isinstance(arrays, list | tuple) or not arrays:
        return False
    return all(isinstance(each, list | tuple) and each for each in arrays)


def leaves(arrays: object) -> list:
    """Return everything that is an array, or should be: what two lists deep hold."""
    if not isinstance(arrays, list | tuple):
        return [arrays]
    nested = [each if isinstance(each, list | tuple) else [each] for each in arrays]
    return [array for each in nested for array in each]


def is_pairs(arrays: object, axes: int, counts: Sequence[int] = (2, 3)) -> bool:
    """Say whether this is a list of tuples of arrays with `axes` axes."""
    if not isinstance(arrays, list | tuple) or not arrays:
        return False
    return all(
        isinstance(each, list | tuple)
        and len(each) in counts
        and all(len(array.shape) == axes for array in each)
        for each in arrays
    )


def listed(arrays: object) -> list:
    """Return what has to be alike: the arrays of a list, or those of one field."""
    if not isinstance(arrays, list | tuple):
        return [arrays]
    if not arrays or is_list(arrays):
        return list(arrays)
    nested = [tuple(each) if isinstance(each, list | tuple) else (each,)
              for each in arrays]  # fmt: skip
    return [_Row(each) for each in nested]


class _Row(tuple):
    """The arrays of one place of a nested list, compared as one."""

    @property
    def shape(self) -> tuple:
        return tuple(array.shape for array in self)

    @property
    def dtype(self) -> tuple:
        return tuple(array.dtype for array in self)


def spelled(array: ArrayLike) -> str:
    """Return an array's dtype and shape."""
    if isinstance(array, tuple):
        return " and ".join(map(spelled, array))
    return f"{np.dtype(array.dtype)}{list(array.shape)}"


def described(arrays: object) -> str:
    """Return what was given, in words."""
    if not isinstance(arrays, list | tuple):
        return f"one array {spelled(arrays)}"
    every = listed(arrays)
    return f"a list of {len(every)}, {spelled(every[0])}" if every else "no arrays"


def told(arrays: object) -> str:
    """Return every reading in words, and what is known of such rows."""
    fits = [row for row in FORMATS if misfit(row, arrays) is None]
    said = ", ".join(f"{row.name} ({row.line!r})" for row in fits)
    notes = list(_notes(arrays))
    return "; ".join([f"it reads as {said}" if said else "no format has it", *notes])


def misfit(form: Format, arrays: object) -> str | None:
    """Say what rules a format out, None where nothing seen does."""
    nested = isinstance(arrays, list | tuple) and not is_list(arrays)
    bare = not isinstance(arrays, list | tuple)
    if form.is_cross_layer != bare:
        return "one array holds all layers" if bare else "there is a list of arrays"
    if (form.is_kv_list or form.is_tuple) != nested:
        return "the list is nested" if nested else "the list is not nested"
    if form.is_kv_list and len(arrays) != 2:
        return f"a list of {len(arrays)} is no list of keys and one of values"
    if form.is_tuple and not all(len(each) in (2, 3) for each in arrays):
        return "a layer has two or three arrays"
    flat = [a for each in listed(arrays) for a in (each if nested else [each])]
    return next(filter(None, (_array_misfit(form, array) for array in flat)), None)


def _array_misfit(form: Format, array: ArrayLike) -> str | None:
    shape = tuple(array.shape)
    if len(shape) != form.axes.rank:
        return f"{form.axes.rank} axes, and the array has {len(shape)}"
    at = 0
    for axis in form.axes.shape:
        length, at = shape[at], at + axis.cut
        if axis.names == ("field",) and length != 2:
            return f"keys and values are an axis of 2, and it has {length}"
        if axis.names == ("one",) and length != 1:
            return f"an axis of one has {length}"
        if axis.names == ("field", "dim") and shape[-1] % 2:
            return f"keys and values side by side are no {shape[-1]}"
    if form.is_blocked and array.dtype != np.uint8:
        return f"its pages are bytes, and the array is {np.dtype(array.dtype)}"
    if form.is_blocked and shape[-1] % 4:
        return f"a row of {shape[-1]} bytes is no multiple of 4"
    return None


def _notes(arrays: object) -> list[str]:
    """Return what is known of rows of such widths."""
    every = listed(arrays)
    if not every or isinstance(every[0], tuple):
        return []
    dtype, shape = np.dtype(every[0].dtype), tuple(every[0].shape)
    width, notes = shape[-1], []
    if dtype == np.uint8 and len(shape) == 3:
        if width % 4:
            notes.append(f"a blocked row of {width} bytes is no multiple of 4")
        elif width in KNOWN_SPLITS:
            notes.append(f"blocked rows of {KNOWN_SPLITS[width]} bytes are known")
        else:
            notes.append("how a row splits into values and scales is not in its shape")
    if width == 576 and dtype != np.uint8:
        notes.append("one latent of 512 + 64, or nine heads of 64")
    if dtype == np.uint8 and width == 132 and len(shape) == 4:
        notes.append("a view of blocked pages, 128 + 4 bytes a token")
    if len(shape) == 2:
        notes.append(f"flat pages of {width} elements, whose tokens are not shown")
    if len(shape) == 4 and shape[1] == shape[2]:
        notes.append("tokens and heads are equally many")
    if len(shape) == 5 and shape[:2] == (2, 2):
        notes.append("two pages look like keys and values")
    return notes
