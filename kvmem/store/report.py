"""What a root holds, for whoever looks at it: read-only, no lock, no jax, no device.

The law: everything under the root has a row, also what is damaged, foreign or left
behind; each row says what its own manifest says, so nothing needs to be known about the
models beforehand. With `verify` every byte is read, and `problems` says what is wrong.

    for row in report.inspect("runs/store"):
        print(row.model_id, row.format_id, row.segment, row.status, row.file_nbytes)
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvmem.errors import CorruptPage
from kvmem.store import folder_shelf, manifest, root_folder, row_files, rows, segment
from kvmem.store.segment import Facts, Unusable


@dataclasses.dataclass(frozen=True)
class ArrayReport:
    """An array of a segment."""

    path: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SegmentRow:
    """One folder under a root.

    Status: "ok", or as in `segment.Unusable`; "damaged" also where `problems` were
    found by reading.
    """

    model_id: str
    format_id: str
    segment: str
    status: str
    problems: tuple[str, ...]
    num_chunks: int = 0
    chunk_tokens: int = 0
    record_nbytes: int = 0
    nbytes: int = 0  # of records
    file_nbytes: int = 0  # of all files as they are
    created: float = 0.0  # seconds since the epoch
    used: float = 0.0  # when last asked for, as far as the disk says
    arrays: tuple[ArrayReport, ...] = ()


def inspect(root: str | Path, verify: bool = False) -> tuple[SegmentRow, ...]:
    """Return a row for everything under a root, by model, format and age.

    Raises:
        ConfigError: there is no store.
        FormatMismatch: a root of another layout version.
        CorruptPage: the root's own facts are damaged.
    """
    root = Path(root).absolute()
    root_folder.chunk_tokens(root)
    return tuple(_rows(root, verify))


def _rows(root: Path, verify: bool) -> Iterator[SegmentRow]:
    for model in _folders(root):
        try:
            for format_ in _folders(model):
                yield from _rows_of(format_, verify)
        except PermissionError as error:
            yield SegmentRow(model.name, "", "", "unreachable", (str(error),))


def _rows_of(format_: Path, verify: bool) -> Iterator[SegmentRow]:
    try:
        for name in folder_shelf.names(format_):
            if row := _row(format_ / name, verify):
                yield row
    except PermissionError as error:
        ids = format_.parent.name, format_.name
        yield SegmentRow(*ids, "", "unreachable", (str(error),))


def _row(folder: Path, verify: bool) -> SegmentRow | None:
    """Return a folder's row, None if its writer took it away meanwhile."""
    try:
        row = _look(folder, verify)
        if row.status == "format":  # it got its manifest between two looks
            row = _look(folder, verify)
    except FileNotFoundError:
        row = None
    if row and (row.status == "ok" or (folder / manifest.NAME).exists()):
        return row
    if not os.path.lexists(folder):
        return None
    return dataclasses.replace(_look(folder, False), arrays=())


def _look(folder: Path, verify: bool) -> SegmentRow:
    model_id, format_id, name = folder.parts[-3:]
    facts = _own_facts(folder) or Facts("", "", 1, 1)
    expected = dataclasses.replace(facts, model_id=model_id, format_id=format_id)
    found = segment.load(folder, expected)
    nbytes = folder_shelf.file_nbytes(folder)
    if isinstance(found, Unusable):
        problems = (found.detail,)
        return SegmentRow(
            model_id, format_id, name, found.status, problems, file_nbytes=nbytes
        )
    problems = rows.inspect(found) if verify else ()
    return SegmentRow(
        model_id,
        format_id,
        name,
        "damaged" if problems else "ok",
        problems,
        num_chunks=len(found.keys),
        chunk_tokens=facts.chunk_tokens,
        record_nbytes=facts.record_nbytes,
        nbytes=found.nbytes,
        file_nbytes=nbytes,
        created=found.created,
        used=found.used_ns / 1e9,
        arrays=arrays(found, f"{segment.ORBAX}/"),
    )


def arrays(held: Any, under: str = "") -> tuple[ArrayReport, ...]:
    """Return a segment's arrays, below what they lie."""
    return tuple(
        ArrayReport(
            under + part.name,
            "uint8",
            ((part.stop - part.start) * held.facts.row_nbytes,),
        )
        for part in row_files.cut(len(held.keys), held.rows_per_file)
    )


def _own_facts(folder: Path) -> Facts | None:
    """Return what the segment says of itself, None if it says nothing readable."""
    try:
        body = manifest.unpack((folder / manifest.NAME).read_bytes())
        return Facts(**body["facts"])
    except (CorruptPage, OSError, TypeError, KeyError):
        return None


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())
