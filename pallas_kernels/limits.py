"""Limits of one block on a Hopper GPU, and the sizes that keep within them.

The law: a bulk copy moves a multiple of 16 bytes between addresses that are multiples
of 16, and what a block keeps in shared memory, barriers counted, fits 232,448 bytes. A
kernel asks here before it is built; a refusal is a sentence with both numbers.

    chunk_nbytes(4_497_408)          # 31,232: the largest divisor of at most 32 KiB
    misaligned(page=1_284)           # "page of 1,284 B: bulk copies move multiples ..."
"""

import jax
import numpy as np

__all__ = [
    "ALIGNMENT",
    "BLOCKS",
    "LANES",
    "MAX_BARRIERS",
    "SHARED_NBYTES",
    "Unsupported",
    "chunk_nbytes",
    "misaligned",
    "misplaced",
    "not_in_shared",
    "overlapping",
    "outside",
    "round_up",
    "too_long",
]

ALIGNMENT = 16
BLOCKS = 132  # multiprocessors of an H200: one persistent block each
LANES = 128  # of a block
SHARED_NBYTES = 232_448  # of a block, barriers and other scratch included
BARRIER_NBYTES = 8
CACHE_LINE = 128
MAX_BARRIERS = 32  # of one group
MAX_ARRIVALS = 8_191  # a barrier counts 2^20 - 1 lanes, 128 a copy
INT32 = 2**31


class Unsupported(ValueError):
    """An implementation that was asked for cannot run: what, which law, what would."""


def round_up(count: int, multiple: int) -> int:
    """Return the least multiple that is not below `count`."""
    return -(-count // multiple) * multiple


def chunk_nbytes(nbytes: int, most: int = 32 << 10) -> int:
    """Return the largest divisor of `nbytes` that a copy can move, at most `most`.

    One that is made of whole cache lines is taken before one up to twice its size.
    """
    units = nbytes // ALIGNMENT
    counts = range(min(units, most // ALIGNMENT), 0, -1)
    found = [count * ALIGNMENT for count in counts if units % count == 0]
    lines = [chunk for chunk in found if chunk % CACHE_LINE == 0]
    return lines[0] if lines and 2 * lines[0] >= found[0] else found[0]


def misaligned(**nbytes: int) -> str | None:
    """Say which size or offset no bulk copy can serve, None when all are served."""
    for name, value in nbytes.items():
        if value % ALIGNMENT:
            what = name.replace("_", " ")
            return (
                f"{what} of {value:,} B: bulk copies move multiples of {ALIGNMENT} B "
                f"between multiples of {ALIGNMENT} B"
            )
    return None


def misplaced(offsets, multiple: int, what: str) -> str | None:
    """Say which offset is no multiple; None where the values are not known here."""
    if isinstance(offsets, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    wrong = [value for value in np.asarray(offsets).tolist() if value % multiple]
    if not wrong:
        return None
    return f"offset {wrong[0]:,} in {what}: copies stand at multiples of {multiple} B"


def outside(offsets, nbytes: int, room: int, what: str) -> str | None:
    """Say which bytes from an offset on are not all in a page or record of `room`.

    None where the offsets are not known here: a bulk copy would write its neighbour.
    """
    if isinstance(offsets, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    values = np.asarray(offsets).tolist()
    wrong = [value for value in values if not 0 <= value <= room - nbytes]
    if not wrong:
        return None
    return f"{nbytes:,} B from offset {wrong[0]:,} on, in {what} of {room:,} B"


def overlapping(offsets, nbytes: int, stride: int, count: int) -> str | None:
    """Say which windows of one page share bytes, None where none do or none is known.

    Args:
        nbytes: of a window.
        stride: from a slot's window to the next slot's.
        count: slots.
    """
    if count > 1 and stride < nbytes:
        return f"windows of {nbytes:,} B every {stride:,} B: each byte turns once"
    if isinstance(offsets, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    starts = np.asarray(offsets)[:, None] + np.arange(count) * stride
    order = np.sort(starts, axis=None)
    near = np.flatnonzero(np.diff(order) < nbytes)
    if not near.size:
        return None
    first, second = order[near[0]], order[near[0] + 1]
    return (
        f"windows of {nbytes:,} B from {first:,} and from {second:,} of a page: each "
        "byte turns once"
    )


def not_in_shared(scratch_nbytes: int, barriers: int) -> str | None:
    """Say that a block's scratch does not fit, None when it does."""
    needed = scratch_nbytes + BARRIER_NBYTES * barriers
    if needed <= SHARED_NBYTES:
        return None
    return (
        f"{needed:,} B of shared memory, {barriers} barriers counted: a block has "
        f"{SHARED_NBYTES:,} B"
    )


def too_long(**lengths: int) -> str | None:
    """Say which axis an int32 index cannot walk, None when all can be walked."""
    for name, length in lengths.items():
        if length >= INT32:
            return f"{length:,} {name.replace('_', ' ')}: an index has 31 bits"
    return None
