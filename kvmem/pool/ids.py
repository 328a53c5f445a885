"""Ids at the door: what may be called a page id, before any array is cut to int32.

The law: ids are int32 on the device, and an id that does not fit is refused with its
value. jax itself, with x64 off, cuts an int64 array without a word: 4,294,967,301
becomes page 5. So every verb passes what it is given through `as_ids`.

    as_ids([0, 3, 6], "vpages")             # np.int32[3]
    as_ids(np.int64([1 << 32]), "vpages")   # InvalidId, naming 4294967296
"""

import jax
import numpy as np

from kvmem import errors
from kvmem.pool import dispatch

__all__ = ["as_host_ids", "as_ids", "require_one_part"]

_INT32 = np.iinfo(np.int32)


def as_ids(values: jax.typing.ArrayLike, name: str) -> jax.Array | np.ndarray:
    """Return `values` as int32 for a device verb; arrays of jax pass untouched.

    Raises:
        InvalidId: not integers, or an integer that int32 does not hold.
    """
    if isinstance(values, jax.Array):
        if values.dtype != np.int32:
            raise _not_int32(name, values.dtype)
        return values
    return as_host_ids(values, name)


def as_host_ids(values: np.typing.ArrayLike, name: str) -> np.ndarray:
    """Return `values` as np.int32; refuse what is traced, or does not fit.

    Raises:
        InvalidId: a tracer, not integers, or an integer that int32 does not hold.
    """
    if dispatch.is_traced(values):
        raise errors.InvalidId(
            errors.say(
                f"{name} inside a jitted function",
                "the ledger lives on the host and needs values, not tracers",
                "Call it outside jit, or use the verbs of kvmem.pool on a Pool there",
            )
        )
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(array.shape, np.int32)
    if array.dtype == np.int32:
        return array
    if array.dtype.kind not in "iu":
        raise _not_int32(name, array.dtype)
    low, high = int(array.min()), int(array.max())
    if low < _INT32.min or high > _INT32.max:
        value = high if high > _INT32.max else low
        raise errors.InvalidId(
            errors.say(
                f"{name} holding {value}",
                f"an id is an int32, from 0 to {_INT32.max}; cut to 32 bits this one "
                f"would read as {value & 0xFFFFFFFF}",
                "Look for the sum or product that made it",
            )
        )
    return array.astype(np.int32)


def require_one_part(extent: int, group: int) -> None:
    """Refuse one physical page for a virtual page that has several.

    Raises:
        IncompatiblePlan: an extent above 1.
    """
    if extent > 1:
        raise errors.IncompatiblePlan(
            errors.say(
                f"one physical page for a virtual page of group {group}",
                f"an envelope of this group is cut into {extent} parts, each in a page "
                "of its own",
                "Use translate_parts, which gives them all",
            )
        )


def _not_int32(name: str, dtype: np.dtype) -> errors.InvalidId:
    return errors.InvalidId(
        errors.say(
            f"{name} of dtype {dtype}",
            "ids are int32, so that no value can be cut on the way",
            "Pass int32, or a numpy array of integers, which is range-checked",
        )
    )
