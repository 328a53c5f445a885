"""A segment: one folder of many chunks, written once, sealed, never changed.

    <segment>/orbax/             an Orbax checkpoint of the rows: see row_files.py
              chunks.safetensors keys, parents, tokens and checksums, one row a chunk
              manifest.json      what this is and every file's size and digest, last

The law: `write` returns after every file, every folder and then the manifest are
synced, so what it returned from survives a power loss; without its manifest a segment
is not there, and `drop` takes the manifest first. Orbax commits, and kvmem seals: Orbax
syncs its chunk files, but neither its own metadata nor the parent after its rename.

Digests are those of the records that were put, made when put was called or while Orbax
writes them; only what Orbax added is read back. The manifest gets its name only after
`confirm` said that the write still has its lease: before that, a caller that was told
"too late" may have changed the records.
"""

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from kvmem.errors import CorruptPage
from kvmem.store import durable, manifest, orbax_save, passing, row_files, sidecar
from kvmem.store.io import DISK, Disk
from kvmem.store.page_key import PageKey
from kvmem.store.row_files import Part
from kvmem.store.sidecar import Key

ORBAX = "orbax"
_FIXED_NBYTES, _NBYTES_A_FILE, _NBYTES_A_CHUNK = 5120, 192, 96  # besides the rows


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
    keys: tuple[Key, ...]
    parents: tuple[Key | None, ...]  # the key that each continues, None: unknown
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
    "damaged", "unreachable" (a failure that passes), "foreign" (another's ids or name),
    "version" (another layout), "format" (another record or chunk size under these ids).
    """

    name: str
    status: str
    detail: str
    found: Facts | None = None
    file_nbytes: int = (
        0  # that stay and cannot be served; of what the shelf has looked at
    )


def write(
    folder: Path,
    facts: Facts,
    keys: Sequence[PageKey],
    tokens: np.ndarray,
    rows: np.ndarray,
    parents: Sequence[PageKey | None] | None = None,
    disk: Disk = DISK,
    checksums: Callable[[], Sequence[bytes]] | None = None,
    confirm: Callable[[], None] = lambda: None,
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
        checksums: returns those of the rows as they were put; None: nobody else has the
            rows.
        confirm: called before the manifest gets its name; raises if that is too late.
    """
    parents = tuple(parents or [None] * len(keys))
    created = time.time()
    per_file = row_files.rows_per_file(*rows.shape)
    parts = row_files.cut(len(rows), per_file)
    disk.mkdir(folder)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            summing = beside.submit(_sums, rows, parts, checksums)
            disk.orbax(folder / ORBAX, lambda: _save(folder / ORBAX, rows, parts))
            checksums, written = summing.result()
        table = sidecar.pack(keys, parents, tokens, checksums)
        disk.write(folder / sidecar.NAME, table)
        files = durable.seal_tree(folder, disk, written)
        disk.sync(folder.parent)
        body = _body(folder.name, facts, parts, created, files)
        data = manifest.pack(body)
        durable.write_file(folder / manifest.NAME, data, disk, confirm)
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
        status = passing.reason_of(error)
        return Unusable(folder.name, status, f"{manifest.NAME}: {error}")
    if refusal := _refuse(folder.name, facts, body):
        return refusal
    try:
        table = (folder / sidecar.NAME).read_bytes()
        if [len(table), durable.digest(table).hex()] != body["files"][sidecar.NAME]:
            return Unusable(folder.name, "damaged", f"{sidecar.NAME}: digest differs")
        said = sidecar.unpack(table)
    except (CorruptPage, OSError) as error:
        status = passing.reason_of(error)
        return Unusable(folder.name, status, f"{sidecar.NAME}: {error}")
    return Segment(
        folder,
        facts,
        *said,
        created=body["created"],
        rows_per_file=body["arrays"][0]["rows_per_file"],
        file_nbytes=len(data) + sum(nbytes for nbytes, _ in body["files"].values()),
        used_ns=used_ns,
    )


def estimate(facts: Facts, num_chunks: int) -> int:
    """Return the most bytes that the files of a segment of so many chunks take."""
    if not num_chunks:
        return 0
    num_files = -(-num_chunks // row_files.rows_per_file(num_chunks, facts.row_nbytes))
    chunk_nbytes = facts.row_nbytes + _NBYTES_A_CHUNK + 4 * facts.chunk_tokens
    return _FIXED_NBYTES + num_files * _NBYTES_A_FILE + num_chunks * chunk_nbytes


def _save(path: Path, rows: np.ndarray, parts: Sequence[Part]) -> None:
    """Let Orbax commit the rows, each part an array."""
    nbytes = rows.shape[1]
    arrays = {
        part.name: (
            rows[part.start : part.stop].reshape(-1),
            part.rows_per_file * nbytes,
        )
        for part in parts
    }
    orbax_save.save(path, arrays)


def _sums(
    rows: np.ndarray,
    parts: Sequence[Part],
    checksums: Callable[[], Sequence[bytes]] | None,
) -> tuple[tuple[bytes, ...], dict[str, durable.Written]]:
    """Return the checksum of each row, and what each file of rows is to hold."""
    written = {}
    for part in parts:
        for name, start, stop in part.files():
            running = xxhash.xxh3_128(rows[start:stop])
            nbytes = (stop - start) * rows.shape[1]
            held = durable.Written(nbytes, running, orbax_save.check_tail)
            written[f"{ORBAX}/{name}"] = held
    sums = checksums() if checksums else map(durable.digest, rows)
    return tuple(sums), written


def _body(name, facts, parts, created, files) -> dict:
    """Return the manifest's body."""
    arrays = [
        {
            "name": part.name,
            "path": f"{ORBAX}/{part.name}",
            "dtype": "uint8",
            "rows": part.stop - part.start,
            "rows_per_file": part.rows_per_file,
        }
        for part in parts
    ]
    return {
        "kind": "kvmem segment",
        "version": manifest.VERSION,
        "segment": name,
        "facts": dataclasses.asdict(facts),
        "num_chunks": parts[-1].stop,
        "created": created,
        "arrays": arrays,
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
