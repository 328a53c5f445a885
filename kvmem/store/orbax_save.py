"""Orbax, and all that kvmem asks of it: commit one stacked array as a checkpoint.

The law: Orbax is used in this file alone, and imported by the first write. It brings
jax, which a process that reads, lists or verifies has no need of. With OCDBT off, zarr3
on and nothing compressed it writes at TensorStore's own rate, one file a first index,
and TensorStore reads the rows back without it.

    save(segment / "orbax", "records", files)     # u8[files, file bytes]
"""

import contextlib
import logging
import os
import re
from pathlib import Path

import numpy as np

_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def save(path: Path, name: str, files: np.ndarray) -> None:
    """Commit `files` as the one array of a checkpoint, one file a first index.

    Raises:
        OSError: with the system's error code, where the disk refused.
    """
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False
    )
    save_args = {name: ocp.SaveArgs(shard_axes=(0,))}
    try:
        with _quiet_orbax(), ocp.Checkpointer(handler) as checkpointer:
            tree = ocp.args.PyTreeSave({name: files}, save_args=save_args)
            checkpointer.save(path, args=tree)
    except ValueError as error:
        # TensorStore's words for what the system said: a full disk is no wrong value.
        if code := _OS_ERROR.search(str(error)):
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


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
