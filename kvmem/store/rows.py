"""Rows of a segment: read through TensorStore, each into its place, and verified.

The law: a row leaves only after its checksum was compared, and before the deadline; a
row that cannot is a fault with its reason, and its neighbours are served all the same.
Nothing is read through Orbax, so a reader loads no jax.

    faults = rows.read(segment, [3, 4], out, deadline)     # None where the row is whole
"""

import itertools
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorstore

from kvmem.store import durable, manifest, passing, row_files
from kvmem.store.row_files import Part
from kvmem.store.segment import ORBAX, Segment

NEVER = float("inf")


class Fault(NamedTuple):
    """Why a row is not served.

    "damaged", "checksum", "deadline", "evicted", or "unreachable": a failure that
    passes.
    """

    reason: str
    detail: str


class Opened(NamedTuple):
    """An array of a segment that is open for reading."""

    part: Part
    array: tensorstore.TensorStore  # u8[rows * row_nbytes]


_opened: weakref.WeakKeyDictionary[Segment, tuple[Opened, ...]] = (
    weakref.WeakKeyDictionary()
)


def open_arrays(segment: Segment, deadline: float = NEVER) -> tuple[Opened, ...]:
    """Return a segment's arrays on disk, opened once, in the order of the rows."""
    arrays = _opened.get(segment)
    if arrays is None:
        parts = row_files.cut(len(segment.keys), segment.rows_per_file)
        opening = [_open(segment, part) for part in parts]
        found = [_wait(future, deadline) for future in opening]
        arrays = tuple(map(Opened, parts, found))
        _opened[segment] = arrays
    return arrays


def read(
    segment: Segment,
    rows: Sequence[int],
    out: np.ndarray,
    deadline: float = NEVER,
) -> list[Fault | None]:
    """Read `rows` into `out` and compare checksums; return a fault or None for each.

    Rows are checked while later ones are still being read. A fault's reason is
    "damaged" where reading failed, "unreachable" where it failed of what passes,
    "checksum" where the bytes differ, "deadline" where nothing was known in time,
    "evicted" where the segment is no longer there. The row's
    bytes in `out` mean nothing then, and may change later on.

    Args:
        segment: where from.
        rows: row numbers, n of them.
        out: u8[n, row_nbytes], C-contiguous.
        deadline: on the clock of `time.monotonic`.
    """
    try:
        arrays = open_arrays(segment, deadline)
    except (ValueError, OSError) as error:
        return [_fault(segment, error, deadline)] * len(rows)
    nbytes, target = segment.facts.row_nbytes, tensorstore.array(out.reshape(-1))
    pending = []
    for start, stop in _runs(rows, segment.rows_per_file):
        part, array = arrays[int(rows[start] >= arrays[0].part.stop)]
        source = array[part.span(rows[start], stop - start, nbytes)]
        future = target[start * nbytes : stop * nbytes].write(source)
        pending += [future] * (stop - start)
    return [
        _settle(segment, row, future, out[i], deadline)
        for i, (row, future) in enumerate(zip(rows, pending, strict=True))
    ]


def inspect(segment: Segment) -> tuple[str, ...]:
    """Read everything the segment holds and return what is wrong with it."""
    body = manifest.unpack((segment.folder / manifest.NAME).read_bytes())
    listed = body["files"]
    there = {
        path.relative_to(segment.folder).as_posix()
        for path in segment.folder.rglob("*")
        if path.is_file()
    } - {manifest.NAME}
    problems = [f"{name}: not in the manifest" for name in sorted(there - set(listed))]
    for name, (nbytes, digest) in sorted(listed.items()):
        problems += _inspect_file(segment.folder, name, nbytes, digest)
    out = np.empty((segment.rows_per_file, segment.facts.row_nbytes), np.uint8)
    for rows in itertools.batched(range(len(segment.keys)), len(out)):
        for row, fault in zip(rows, read(segment, rows, out[: len(rows)]), strict=True):
            if fault:
                problems.append(f"chunk {row}: {fault.reason}: {fault.detail}")
    return tuple(problems)


def _inspect_file(folder: Path, name: str, nbytes: int, digest: str) -> list[str]:
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        return [f"{name}: missing"]
    except OSError as error:
        return [f"{name}: {error}"]
    if len(data) != nbytes:
        return [f"{name}: {len(data)} bytes, written with {nbytes}"]
    if durable.digest(data).hex() != digest:
        return [f"{name}: digest differs"]
    return []


def _runs(rows: Sequence[int], per_file: int) -> list[tuple[int, int]]:
    """Cut positions into runs whose rows follow one another within one file."""
    cuts = [
        i
        for i in range(1, len(rows))
        if rows[i] != rows[i - 1] + 1 or rows[i] % per_file == 0
    ]
    return list(itertools.pairwise([0, *cuts, len(rows)])) if rows else []


def _settle(segment, row, future, out, deadline) -> Fault | None:
    try:
        _wait(future, deadline)
    except (ValueError, OSError) as error:
        return _fault(segment, error, deadline)
    if durable.digest(out) != segment.checksums[row]:
        if not segment.is_there:  # TensorStore reads a missing file as zeros
            return _evicted(segment)
        return Fault("checksum", "the bytes read differ from those written")
    return None


def _open(
    segment: Segment, part: Part
) -> "tensorstore.Future[tensorstore.TensorStore]":
    path = str(segment.folder / ORBAX / part.name)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    shape = [(part.stop - part.start) * segment.facts.row_nbytes]
    return tensorstore.open(spec, read=True, dtype=tensorstore.uint8, shape=shape)


def _wait[T](future: "tensorstore.Future[T]", deadline: float) -> T:
    if deadline == NEVER:
        return future.result()
    return future.result(timeout=max(0.0, deadline - time.monotonic()))


def _fault(segment: Segment, error: Exception, deadline: float) -> Fault:
    if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
        return Fault("deadline", "the disk had not answered when the deadline came")
    if not segment.is_there:
        return _evicted(segment)
    return Fault(passing.reason_of(error), str(error))


def _evicted(segment: Segment) -> Fault:
    return Fault("evicted", f"segment {segment.name} is no longer on the disk")
