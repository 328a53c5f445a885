"""A segment: one folder of many chunks, written once, sealed, never changed.

    <segment>/orbax/             an Orbax checkpoint of one array, u8[files, file bytes]
              chunks.safetensors keys, parents, tokens and checksums, one row a chunk
              manifest.json      what this is and every file's size and digest, last

The law: `write` returns after every file, every folder and then the manifest are
synced, so what it returned from survives a power loss; without its manifest a segment
is not there, and `drop` takes the manifest first. Orbax commits, and kvmem seals: Orbax
syncs its chunk files, but neither its own metadata nor the parent after its rename.

Rows are stacked in one array; a file holds as many as make about a MiB (each file costs
a millisecond or two to make durable), and one where a row alone is as large.
"""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from kvmem.errors import CorruptPage
from kvmem.store import durable, manifest, orbax_save
from kvmem.store.io import DISK, Disk
from kvmem.store.page_key import KEY_NBYTES, PageKey

ARRAY = "records"
ORBAX = "orbax"
SIDECAR = "chunks.safetensors"
FILE_NBYTES = 2**20  # rows are gathered into files of about this
_NO_PARENT = bytes(KEY_NBYTES)  # no digest is zero
_FIXED_NBYTES, _NBYTES_A_FILE, _NBYTES_A_CHUNK = 4096, 192, 96  # besides the rows


@dataclasses.dataclass(frozen=True)
class Facts:
    """Whose bytes these are and how they are cut; equal for a whole store folder."""

    model_id: str
    format_id: str
    chunk_tokens: int
    record_nbytes: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of one chunk's records."""
        return self.chunk_tokens * self.record_nbytes


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """What manifest and sidecar say of a sealed segment; C chunks."""

    folder: Path
    facts: Facts
    keys: tuple[PageKey, ...]
    parents: tuple[PageKey | None, ...]  # the key that each continues, None: unknown
    tokens: np.ndarray  # i32[C, chunk_tokens]
    checksums: tuple[bytes, ...]
    created: float  # seconds since the epoch
    rows_per_file: int
    file_nbytes: int  # of all its files
    used_ns: int  # when a chunk of it was last asked for, as far as the disk says

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def nbytes(self) -> int:
        """Bytes of its records."""
        return len(self.keys) * self.facts.row_nbytes

    @property
    def is_there(self) -> bool:
        """Say whether the disk still has it: a dropped one loses its manifest first."""
        return (self.folder / manifest.NAME).exists()


@dataclasses.dataclass(frozen=True)
class Unusable:
    """Why a folder is no segment of this store.

    Status: "unfinished" (no manifest: being written, or left by a dead writer),
    "damaged", "foreign" (another's ids or name), "version" (another layout), "format"
    (another record or chunk size under these ids).
    """

    name: str
    status: str
    detail: str
    found: Facts | None = None


def write(
    folder: Path,
    facts: Facts,
    keys: Sequence[PageKey],
    tokens: np.ndarray,
    rows: np.ndarray,
    parents: Sequence[PageKey | None] | None = None,
    disk: Disk = DISK,
) -> Segment:
    """Write a new segment and return it once it is durable; on failure leave nothing.

    Args:
        folder: a path that does not exist, in a durable folder.
        facts: the store's facts.
        keys: C keys.
        tokens: i32[C, chunk_tokens].
        rows: u8[C, row_nbytes], C-contiguous, C > 0.
        parents: the key that each chunk continues, None where that is unknown.
        disk: what the steps go through.
    """
    checksums = tuple(durable.digest(row) for row in rows)
    parents = tuple(parents or [None] * len(keys))
    created = time.time()
    per_file = rows_per_file(*rows.shape)
    disk.mkdir(folder)
    try:
        files_ = by_file(rows, per_file)
        disk.orbax(
            folder / ORBAX, lambda: orbax_save.save(folder / ORBAX, ARRAY, files_)
        )
        disk.write(folder / SIDECAR, pack_sidecar(keys, parents, tokens, checksums))
        files = durable.seal_tree(folder, disk)
        disk.sync(folder.parent)
        body = _body(folder.name, facts, len(keys), created, per_file, files)
        data = manifest.pack(body)
        durable.write_file(folder / manifest.NAME, data, disk)
    except BaseException:
        with contextlib.suppress(OSError):
            drop(folder, disk)
        raise
    return Segment(
        folder,
        facts,
        tuple(keys),
        parents,
        tokens,
        checksums,
        created,
        per_file,
        len(data) + sum(nbytes for nbytes, _ in files.values()),
        time.time_ns(),
    )


def drop(folder: Path, disk: Disk = DISK) -> None:
    """Take a segment away: first the manifest, durably, then the rest.

    In this order a crash leaves either a whole segment or one without a manifest, which
    is not there.
    """
    disk.unlink(folder / manifest.NAME)
    disk.sync(folder)
    disk.remove(folder)


def load(folder: Path, facts: Facts) -> Segment | Unusable:
    """Return the segment in `folder` by manifest and sidecar; no array is read."""
    try:
        data = (folder / manifest.NAME).read_bytes()
        body = manifest.unpack(data)
        used_ns = (folder / manifest.NAME).stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return Unusable(folder.name, "unfinished", "it has no manifest")
    except (CorruptPage, OSError) as error:
        return Unusable(folder.name, "damaged", f"{manifest.NAME}: {error}")
    if refusal := _refuse(folder.name, facts, body):
        return refusal
    try:
        sidecar = (folder / SIDECAR).read_bytes()
    except OSError as error:
        return Unusable(folder.name, "damaged", f"{SIDECAR}: {error}")
    if [len(sidecar), durable.digest(sidecar).hex()] != body["files"][SIDECAR]:
        return Unusable(folder.name, "damaged", f"{SIDECAR}: digest differs")
    (array,) = body["arrays"]
    return Segment(
        folder,
        facts,
        *unpack_sidecar(sidecar),
        created=body["created"],
        rows_per_file=array["rows_per_file"],
        file_nbytes=len(data) + sum(nbytes for nbytes, _ in body["files"].values()),
        used_ns=used_ns,
    )


def estimate(facts: Facts, num_chunks: int) -> int:
    """Return the most bytes that the files of a segment of so many chunks take."""
    if not num_chunks:
        return 0
    per_file = rows_per_file(num_chunks, facts.row_nbytes)
    num_files = -(-num_chunks // per_file)
    chunk_nbytes = _NBYTES_A_CHUNK + 4 * facts.chunk_tokens
    return (
        _FIXED_NBYTES
        + num_files * (per_file * facts.row_nbytes + _NBYTES_A_FILE)
        + num_chunks * chunk_nbytes
    )


def rows_per_file(num_rows: int, row_nbytes: int) -> int:
    """Return how many rows make a file of about FILE_NBYTES, shared out evenly."""
    most = max(1, FILE_NBYTES // row_nbytes)
    num_files = -(-num_rows // most)
    return -(-num_rows // num_files)


def by_file(rows: np.ndarray, per_file: int) -> np.ndarray:
    """Return u8[files, file bytes]; zeros fill the last file, no copy if it is full."""
    num_files = -(-len(rows) // per_file)
    if num_files * per_file != len(rows):
        filler = np.zeros((num_files * per_file - len(rows), rows.shape[1]), np.uint8)
        rows = np.concatenate([rows, filler])
    return rows.reshape(num_files, -1)


def pack_sidecar(
    keys: Sequence[PageKey],
    parents: Sequence[PageKey | None],
    tokens: np.ndarray,
    checksums: Sequence[bytes],
) -> bytes:
    """Return the table of a segment's chunks; `unpack_sidecar` reads it."""

    def table(rows) -> np.ndarray:
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(keys), -1)

    tensors = {
        "keys": table(keys),
        "parents": table(parent or _NO_PARENT for parent in parents),
        "tokens": np.ascontiguousarray(tokens, "<i4"),
        "checksums": table(checksums),
    }
    return safetensors.numpy.save(tensors)


def unpack_sidecar(data: bytes) -> tuple[tuple, tuple, np.ndarray, tuple]:
    """Return keys, parents, tokens, checksums."""
    tensors = safetensors.numpy.load(data)

    def rows(name) -> list[bytes]:
        table = tensors[name]
        width, flat = table.shape[1], table.tobytes()
        return [flat[at : at + width] for at in range(0, len(flat), width)]

    keys = tuple(map(PageKey, rows("keys")))
    known = {bytes(key): key for key in keys} | {_NO_PARENT: None}
    parents = tuple(
        known[row] if row in known else PageKey(row) for row in rows("parents")
    )
    return keys, parents, tensors["tokens"], tuple(rows("checksums"))


def _body(name, facts, num_chunks, created, rows_per_file, files) -> dict:
    """Return the manifest's body; `arrays` leaves room for one array a group."""
    array = {
        "name": ARRAY,
        "path": f"{ORBAX}/{ARRAY}",
        "dtype": "uint8",
        "rows_per_file": rows_per_file,
    }
    return {
        "kind": "kvmem segment",
        "version": manifest.VERSION,
        "segment": name,
        "facts": dataclasses.asdict(facts),
        "num_chunks": num_chunks,
        "created": created,
        "arrays": [array],
        "checksum": "xxh3-128",
        "files": {path: [nbytes, sum_.hex()] for path, (nbytes, sum_) in files.items()},
    }


def _refuse(name: str, facts: Facts, body: dict) -> Unusable | None:
    """Return why a whole manifest does not describe a segment of this store."""
    if body["version"] != manifest.VERSION:
        detail = f"layout version {body['version']}, read here: {manifest.VERSION}"
        return Unusable(name, "version", detail)
    found = Facts(**body["facts"])
    if body["segment"] != name:
        detail = f"written as segment {body['segment']}"
        return Unusable(name, "foreign", detail)
    if (found.model_id, found.format_id) != (facts.model_id, facts.format_id):
        detail = f"written for {found.model_id}/{found.format_id}"
        return Unusable(name, "foreign", detail, found)
    if found != facts:
        detail = (
            f"{found.chunk_tokens} tokens of {found.record_nbytes} bytes a chunk, "
            f"asked for {facts.chunk_tokens} of {facts.record_nbytes}"
        )
        return Unusable(name, "format", detail, found)
    return None
