"""The rows of a segment as zarr3 arrays on an object store, an object a file of rows.

The law: TensorStore writes them from memory as they lie and reads them back; an object
that is missing is an error, and never zeros.

    objects = put(bucket, home, rows, parts)         # name below home -> size, digest
    for part, array in open_all(bucket, home, parts): ...
"""

import time
from collections.abc import Sequence

import numpy as np
import tensorstore

from kvmem.store import durable
from kvmem.store.bucket import Bucket
from kvmem.store.row_files import Part
from kvmem.store.rows import NEVER

Arrays = tuple[tuple[Part, tensorstore.TensorStore], ...]  # u8[rows * row_nbytes] each


def open_all(
    bucket: Bucket, home: str, parts: Sequence[Part], deadline: float = NEVER
) -> Arrays:
    """Return the arrays below `home`, open for reading, in the order of the rows.

    Raises:
        TimeoutError: they were not open at the deadline (`time.monotonic`).
    """
    opening = [
        tensorstore.open(_spec(bucket, home, part.name), read=True) for part in parts
    ]
    found = [wait(future, deadline) for future in opening]
    return tuple(zip(parts, found, strict=True))


def wait[T](future: "tensorstore.Future[T]", deadline: float) -> T:
    """Return what a future gives, or raise TimeoutError at the deadline."""
    if deadline == NEVER:
        return future.result()
    return future.result(timeout=max(0.0, deadline - time.monotonic()))


def put(
    bucket: Bucket, home: str, rows: np.ndarray, parts: Sequence[Part]
) -> dict[str, tuple[int, str]]:
    """Write each part as an array; return all their objects.

    Args:
        bucket: where to.
        home: below what name.
        rows: u8[C, row_nbytes].
        parts: how they are cut.
    """
    said: dict[str, bytes | np.ndarray] = {}
    with bucket.told("put", home):
        for part in parts:
            flat = rows[part.start : part.stop].reshape(-1)
            grid = {"chunk_shape": [part.rows_per_file * rows.shape[1]]}
            metadata = {
                "shape": list(flat.shape),
                "data_type": "uint8",
                "chunk_grid": {"name": "regular", "configuration": grid},
            }
            spec = _spec(bucket, home, part.name) | {"metadata": metadata}
            tensorstore.open(spec, create=True).result().write(flat).result()
            said |= {name: rows[start:stop] for name, start, stop in part.files()}
    for part in parts:
        about = f"{part.name}/zarr.json"
        said[about] = bucket.read(home + about)
    return {
        name: (memoryview(data).nbytes, durable.digest(data).hex())
        for name, data in said.items()
    }


def _spec(bucket: Bucket, home: str, name: str) -> dict:
    return {
        "driver": "zarr3",
        "kvstore": bucket.spec(f"{home}{name}/"),
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
