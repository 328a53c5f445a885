"""Orbax, and all that kvmem asks of it: commit one stacked array as a checkpoint.

The law: Orbax is used in this file alone, and imported by the first write. It brings
jax, which a process that reads, lists or verifies has no need of. With OCDBT off, zarr3
on and nothing compressed it writes at TensorStore's own rate, one file a first index,
and TensorStore reads the rows back without it.

    save(segment / "orbax", "records", files)     # u8[files, file bytes]
"""

import contextlib
import logging
from pathlib import Path

import numpy as np


def save(path: Path, name: str, files: np.ndarray) -> None:
    """Commit `files` as the one array of a checkpoint, one file a first index."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False
    )
    save_args = {name: ocp.SaveArgs(shard_axes=(0,))}
    with _quiet_absl(), ocp.Checkpointer(handler) as checkpointer:
        tree = ocp.args.PyTreeSave({name: files}, save_args=save_args)
        checkpointer.save(path, args=tree)


@contextlib.contextmanager
def _quiet_absl():
    """Keep Orbax's warnings, which users can do nothing about, from the terminal."""
    logger = logging.getLogger("absl")

    def only_errors(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(only_errors)
    try:
        yield
    finally:
        logger.removeFilter(only_errors)
