"""Orbax, and all that kvmem asks of it: commit stacked arrays as a checkpoint.

The law: Orbax is used in this file alone, and imported by the first write. It brings
jax, which a process that reads, lists or verifies has no need of. With OCDBT off, zarr3
on, nothing compressed and nothing copied it writes at TensorStore's own rate, and
TensorStore reads the rows back without it.

A file of an array is its bytes as they lay in memory, and then the index that zarr's
sharding codec puts behind them: where they start, how many they are, a checksum. So
what a file should hold is known without reading it back, and `check_tail` looks at the
rest.

    save(segment / "orbax", {"records": (u8[files * file bytes], file_nbytes)})
"""

import contextlib
import logging
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvmem.errors import CorruptPage, say

TAIL_NBYTES = 20  # two u64 and a crc32c
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def save(path: Path, arrays: Mapping[str, tuple[np.ndarray, int]]) -> None:
    """Commit arrays of one axis as a checkpoint, in files of so many bytes each.

    The arrays are not copied: they must not change before this returns.

    Args:
        path: of the checkpoint, which does not exist.
        arrays: u8[n * file_nbytes] and file_nbytes, by name.

    Raises:
        OSError: with the system's error code, where the disk refused.
    """
    import orbax.checkpoint as ocp

    tree = {name: array for name, (array, _) in arrays.items()}
    save_args = {
        name: ocp.SaveArgs(chunk_byte_size=nbytes)
        for name, (_, nbytes) in arrays.items()
    }
    try:
        with _quiet_orbax(), ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=save_args))
    except ValueError as error:
        # TensorStore's words for what the system said: a full disk is no wrong value.
        if code := _OS_ERROR.search(str(error)):
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def check_tail(path: Path, nbytes: int, tail: bytes) -> None:
    """Raise unless `tail`, behind `nbytes` of an array's file, points at all of them.

    Raises:
        CorruptPage: the file is not laid out as this file says.
    """
    if len(tail) == TAIL_NBYTES and struct.unpack("<QQ", tail[:16]) == (0, nbytes):
        return
    raise CorruptPage(
        say(
            f"sealing {path}",
            f"Orbax writes {nbytes} bytes and an index of {TAIL_NBYTES} that points at "
            f"them; behind them are {len(tail)} bytes that do not",
            "Use the Orbax that kvmem was tested with, or look for damage",
        )
    )


def _handler():
    """Return Orbax's handler of trees, for host arrays that it need not copy."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    arrays = type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_zarr3=True,
        use_compression=False,
        type_handler_registry=type_handlers.create_type_handler_registry(
            (np.ndarray, arrays)
        ),
    )


@contextlib.contextmanager
def _quiet_orbax():
    """Keep Orbax's own log from the terminal: what fails is raised to the caller."""
    logger = logging.getLogger("absl")

    def not_orbax(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    logger.addFilter(not_orbax)
    try:
        yield
    finally:
        logger.removeFilter(not_orbax)
