"""Ids at the door: what may be called a page id, before any array is cut to int32.

The law: ids are int32 on the device, and an id that does not fit is refused with its
value. jax itself, with x64 off, cuts an int64 array without a word: 4,294,967,301
becomes page 5. So every verb passes what it is given through `as_ids`.

    as_ids([0, 3, 6], "vpages")             # np.int32[3]
    as_ids(np.int64([1 << 32]), "vpages")   # InvalidId, naming 4294967296
    as_group(1.0, 2)                        # InvalidId: groups are integers
"""

import jax
import numpy as np

from kvmem import errors
from kvmem.pool import dispatch

__all__ = ["as_group", "as_host_ids", "as_ids", "as_size", "is_integer"]
__all__ += ["require_one_part"]

_INT32 = np.iinfo(np.int32)


def as_ids(
    values: jax.typing.ArrayLike, name: str, ndim: int | None = None
) -> jax.Array | np.ndarray:
    """Return `values` as int32 for a device verb; arrays of jax pass untouched.

    Args:
        values, name: the ids, and what a refusal calls them.
        ndim: how many axes they have, any number if None.

    Raises:
        InvalidId: not integers, an integer that int32 does not hold, or other axes.
    """
    if isinstance(values, jax.Array):
        if values.dtype != np.int32:
            raise _not_int32(name, values.dtype)
        _require_axes(name, values.shape, ndim)
        return values
    return as_host_ids(values, name, ndim)


def as_host_ids(
    values: np.typing.ArrayLike, name: str, ndim: int | None = None
) -> np.ndarray:
    """Return `values` as np.int32; refuse what is traced, or does not fit.

    Raises:
        InvalidId: a tracer, not integers, an integer that int32 does not hold, rows of
            several lengths, or other axes than `ndim`.
    """
    if dispatch.is_traced(values):
        raise errors.InvalidId(
            errors.say(
                f"{name} inside a jitted function",
                "the ledger lives on the host and needs values, not tracers",
                "Call it outside jit, or use the verbs of kvmem.pool on a Pool there",
            )
        )
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise errors.InvalidId(
            errors.say(
                f"{name} that are no array ({error})",
                "ids are int32 in rows of one length",
                "Pad shorter rows with null, the id one past the last",
            )
        ) from error
    _require_axes(name, array.shape, ndim)
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


def is_integer(value: object) -> bool:
    """Say whether a host value counts something: an integer, and no truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def as_group(group: int, count: int) -> int:
    """Return the index of one of `count` groups.

    Raises:
        InvalidId: no integer, or none of them.
    """
    if is_integer(group) and 0 <= group < count:
        return int(group)
    raise errors.InvalidId(
        errors.say(
            f"group {group} of a pool of {count}",
            "groups are counted from zero",
            f"Use a group from 0 to {count - 1}",
        )
    )


def as_size(value: int, name: str) -> int:
    """Return a width that is known before anything runs.

    Raises:
        ConfigError: no integer, or a negative one.
    """
    if is_integer(value) and value >= 0:
        return int(value)
    raise errors.ConfigError(
        errors.say(
            f"{name}={value!r}",
            "it is the width of an array, which a program is compiled for",
            "Give an integer >= 0",
        )
    )


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


def _require_axes(name: str, shape: tuple[int, ...], ndim: int | None) -> None:
    if ndim is None or len(shape) == ndim:
        return
    words = ("one number", "one number a lane, i32[n]")[ndim]
    raise errors.InvalidId(
        errors.say(
            f"{name} of shape {list(shape)}",
            f"{name} is {words}",
            f"Give {ndim} axes, or call once a row",
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
