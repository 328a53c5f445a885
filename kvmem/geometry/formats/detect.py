"""Detect: which format arrays are, from what is declared.

The law: a shape shows lengths and not what they mean, so undeclared arrays are refused
with every reading they have. One shape is inferred, because nothing else has it: a list
of uint8 [pages, tokens, 132], the blocked-scale pages of DeepSeek's index keys. Every
array of a list is looked at.

    detect(arrays, declared="HND").format.name      # a hint, as vLLM declares it
    detect(arrays, declared="NL_X_NB_BSV_BSS")      # a row of the table
    detect(arrays, rules="lmcache")                 # what LMCache's structure says

Hints are read as LMCache reads vLLM's `kv_layout`. Rules "lmcache" are its purely
structural ones: the first array speaks for a list, and no reading is None.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmem import errors
from kvmem.geometry.declare import ArrayLike
from kvmem.geometry.formats import readings
from kvmem.geometry.formats.table import FORMATS, Format, find

__all__ = ["HINTS", "Detected", "detect"]

# vLLM's names of a layout: are heads outside of tokens?
HINTS = {
    "NHD": False,
    "LBNHC": False,
    "BLNHC": False,
    "HND": True,
    "LBHNC": True,
    "BLHNC": True,
}
_FUSED = ("BLNHC", "BLHNC")  # pools of pages whose keys and values are fused
_HEADS_OUTERMOST = ("LHBNC", "BHLNC")
_INDEX_ROW = 132  # 128 bytes of fp8 and a float32 scale
RULES = ("kvmem", "lmcache")


class Detected(NamedTuple):
    """The row of the table that arrays are, and why; None where nothing says."""

    format: Format | None
    reason: str


def detect(
    arrays: object, declared: str | int | None = None, rules: str = "kvmem"
) -> Detected:
    """Return the format of arrays.

    Args:
        arrays: one array, a list of them (one a layer), or a list of tuples.
        declared: a name or number of the table, or one of `HINTS`.
        rules: "kvmem", or "lmcache" for its structural rules.

    Raises:
        FormatMismatch: undeclared arrays, with what they may be; arrays of several
            kinds in one list, naming the first that differs; arrays that are not as
            declared.
        IncompatiblePlan: a layout whose heads stand outside of pages.
        ConfigError: unknown rules or declaration.
    """
    if rules not in RULES:
        raise errors.ConfigError(
            errors.say(
                f"rules {rules!r}",
                "arrays are read by kvmem's rules or by LMCache's structural ones",
                f"Use one of {', '.join(RULES)}",
            )
        )
    _require_arrays(arrays)
    if rules == "lmcache":
        return _structural(arrays, _hint(declared) if declared else "NHD")
    if isinstance(declared, int) or declared in {row.name for row in FORMATS}:
        return _as_declared(arrays, find(declared))
    _require_alike(readings.listed(arrays))
    if declared is not None:
        return _hinted(arrays, _hint(declared))
    if _is_index_pages(arrays):
        return Detected(find(14), f"uint8 rows of {_INDEX_ROW} bytes in a list")
    raise errors.FormatMismatch(
        errors.say(
            f"{readings.described(arrays)} with no declaration",
            f"{readings.told(arrays)}, and no length tells them apart",
            "Declare a name of the table, or NHD or HND",
        )
    )


def _hint(declared: object) -> str:
    """Return a hint that is known, or refuse it."""
    if declared in _HEADS_OUTERMOST:
        raise errors.IncompatiblePlan(
            errors.say(
                f"layout {declared}",
                "heads stand outside of pages, so a page is no contiguous block",
                f"Use one of {', '.join(HINTS)}",
            )
        )
    if declared not in HINTS:
        raise errors.ConfigError(
            errors.say(
                f"layout {declared!r}",
                "a layout is declared by a name that is known",
                f"Use one of {', '.join(HINTS)}, or a name of the table",
            )
        )
    return str(declared)


def _require_arrays(arrays: object) -> None:
    """Refuse what is no array with axes, and lists that no format nests."""
    for each in readings.leaves(arrays):
        if not getattr(each, "shape", ()) or not hasattr(each, "dtype"):
            raise errors.FormatMismatch(
                errors.say(
                    f"{type(each).__name__} among arrays",
                    "what has a shape of one axis or more, and a dtype, can be read; "
                    "lists nest twice at most",
                    "Give an array, a list of arrays, or a list of tuples of them",
                )
            )


def _require_alike(every: Sequence[ArrayLike]) -> None:
    """Refuse a list whose arrays are not all of one shape and dtype."""
    if not readings.leaves(every):
        raise errors.FormatMismatch(
            errors.say("no arrays", "there is nothing to look at", "Give the arrays")
        )
    first = every[0]
    for index, array in enumerate(every):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise errors.FormatMismatch(
                errors.say(
                    f"a list whose array {index} is {readings.spelled(array)}",
                    f"its first is {readings.spelled(first)}, and one list is of one "
                    "kind: latents and index keys are groups of their own",
                    "Give each group's arrays by themselves",
                )
            )


def _is_index_pages(arrays: object) -> bool:
    if not readings.is_list(arrays):
        return False
    return all(
        array.dtype == np.uint8
        and len(array.shape) == 3
        and array.shape[-1] == _INDEX_ROW
        for array in arrays
    )


def _as_declared(arrays: object, form: Format) -> Detected:
    """Return a declared row, or refuse arrays that cannot be it."""
    of_fields = form.is_kv_list and readings.is_nested(arrays)
    for each in arrays if of_fields else [readings.listed(arrays)]:
        _require_alike(each)
    fault = readings.misfit(form, arrays)
    if fault is not None:
        raise errors.FormatMismatch(
            errors.say(
                f"{readings.described(arrays)} declared as {form.name}",
                f"{form.line!r}: {fault}",
                f"Declare what they are: {readings.told(arrays)}",
            )
        )
    return Detected(form, "declared")


def _hinted(arrays: object, hint: str) -> Detected:
    """Return what a declared layout says: the hint decides, the structure asserts."""
    found = None
    if not readings.is_list(arrays) or len(arrays[0].shape) != 4:
        if hint in _FUSED:
            raise errors.FormatMismatch(
                errors.say(
                    f"{readings.described(arrays)} declared as {hint}",
                    "a pool of fused pages has four axes a layer",
                    "Declare NHD or HND, or a name of the table",
                )
            )
    if readings.is_list(arrays) and len(arrays[0].shape) == 6:
        first, *_ = arrays
        found = 15 if (first.shape[0], first.shape[3]) == (2, 1) else None
    elif readings.is_pairs(arrays, axes=3):
        found = 17
    else:
        found = _structural(arrays, hint).format
        found = None if found is None else found.id
    if found is None:
        raise errors.FormatMismatch(
            errors.say(
                f"{readings.described(arrays)} declared as {hint}",
                "no format of the table has such arrays under it",
                "Declare the axes of the arrays, or a name of the table",
            )
        )
    return Detected(find(found), f"declared {hint}")


def _structural(arrays: object, hint: str) -> Detected:
    """Return what LMCache's structural rules say; the first array speaks for all."""
    hnd = HINTS[hint]
    if not isinstance(arrays, list | tuple):
        return Detected(find(0), "one array is a cross-layer pool")
    if readings.is_pairs(arrays[:1], axes=4, counts=(2,)):
        return Detected(find(16), "a list of pairs")
    if not arrays or isinstance(arrays[0], list | tuple):
        return Detected(None, "no known nesting")
    first = arrays[0]
    axes, shape = len(first.shape), first.shape
    if axes == 3:
        index = first.dtype == np.uint8 and shape[-1] == _INDEX_ROW
        return Detected(find(14 if index else 3), "three axes: rows without heads")
    if axes == 4:
        return Detected(find(12 if hnd else 13), f"four axes, {hint}")
    if axes == 5 and shape[0] == 2:
        return Detected(find(6 if hnd else 1), f"two is the first axis, {hint}")
    if axes == 5 and shape[1] == 2:
        return Detected(find(7 if hnd else 2), f"two is the second axis, {hint}")
    return Detected(None, f"{axes} axes")
