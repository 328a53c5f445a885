"""Widths: from which index on a flat address no longer fits its integer.

jax computes in 32 bits unless told otherwise, and so do most kernels: a product of a
slot and a stride wraps without a word. kvmem addresses by pairs (page, offset) and
never multiplies a page id by a stride; these functions say what a flat path could
reach, so that a plan can refuse it.

    first_wrapping(14_042_880, bits=31)      # slot 153 is the first out of reach
    first_wrapping(14_042_880, bits=32)      # and mod 2**32 slot 306 is at page 0 again
"""

from kvmem import errors

__all__ = ["INT32", "first_wrapping", "require_addressable"]

INT32 = 31  # bits of a signed 32-bit integer that count


def first_wrapping(stride: int, bits: int = INT32) -> int:
    """Return the least index whose flat address, index * stride, needs more bits.

    Args:
        stride: units (elements or bytes) from one index to the next.
        bits: of the address: 31 where it is signed, 32 where it wraps unsigned.
    """
    return -(-(1 << bits) // stride)


def require_addressable(what: str, count: int, stride: int, bits: int = INT32) -> None:
    """Refuse a flat path that cannot reach the last of `count` indices.

    Raises:
        IncompatiblePlan: the last address needs more than `bits` bits.
    """
    limit = first_wrapping(stride, bits)
    if count > limit:
        raise errors.IncompatiblePlan(
            errors.say(
                f"{what}: {count:,} indices of {stride:,} units each",
                f"a flat address of {bits} bits wraps from index {limit:,} on",
                f"Address by (page, offset), or plan at most {limit:,}",
            )
        )
