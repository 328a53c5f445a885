"""A segment: one folder of many chunks, written once, sealed, never changed.

    <segment>/orbax/             an Orbax checkpoint of one array, u8[chunks, row bytes]
              chunks.safetensors keys, tokens and checksums, one row a chunk
              manifest.json      what this is and every file's size and digest, last

The law: `write` returns after every file, every folder and then the manifest are
synced, so what it returned from survives a power loss; without its manifest a segment
is not there. Orbax commits, and kvmem seals: Orbax syncs its chunk files, but neither
its own metadata nor the parent after its rename. A row is one chunk's token records;
rows are read through TensorStore, each into its place, and leave only after their
checksum was compared.

Orbax is used in this file alone, and imported by the first write: it brings jax, which
a process that reads, lists or verifies has no need of.
"""

import contextlib
import dataclasses
import functools
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
import tensorstore

from kvmem.errors import CorruptPage
from kvmem.store import durable, manifest
from kvmem.store.page_key import PageKey

ARRAY = "records"
ORBAX = "orbax"
SIDECAR = "chunks.safetensors"


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
    tokens: np.ndarray  # i32[C, chunk_tokens]
    checksums: tuple[bytes, ...]
    created: float  # seconds since the epoch

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def nbytes(self) -> int:
        """Bytes of its records."""
        return len(self.keys) * self.facts.row_nbytes

    @functools.cached_property
    def array(self) -> tensorstore.TensorStore:  # u8[C, row_nbytes]
        """The records on disk, opened; rows are read when they are asked for."""
        path = str(self.folder / ORBAX / ARRAY)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        shape = [len(self.keys), self.facts.row_nbytes]
        opened = tensorstore.open(spec, read=True, dtype=tensorstore.uint8, shape=shape)
        return opened.result()


@dataclasses.dataclass(frozen=True)
class Unusable:
    """Why a folder is no segment of this store.

    Status: "unfinished" (no manifest), "damaged", "foreign" (another's ids or name),
    "version" (a later layout), "format" (another record or chunk size under these ids).
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
) -> Segment:
    """Write a new segment and return it once it is durable; on failure leave nothing.

    Args:
        folder: a path that does not exist, in a durable folder.
        facts: the store's facts.
        keys: C keys.
        tokens: i32[C, chunk_tokens].
        rows: u8[C, row_nbytes], C-contiguous, C > 0.
    """
    checksums = tuple(durable.digest(row) for row in rows)
    created = time.time()
    folder.mkdir(mode=durable.FOLDER_MODE)
    try:
        _save_with_orbax(folder / ORBAX, rows)
        (folder / SIDECAR).write_bytes(_pack_sidecar(keys, tokens, checksums))
        files = durable.seal_tree(folder)
        durable.sync(folder.parent)
        body = _body(folder.name, facts, len(keys), created, files)
        durable.write_file(folder / manifest.NAME, manifest.pack(body))
    except BaseException:
        (folder / manifest.NAME).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Segment(folder, facts, tuple(keys), tokens, checksums, created)


def load(folder: Path, facts: Facts) -> Segment | Unusable:
    """Return the segment in `folder` by manifest and sidecar; no array is read."""
    try:
        body = manifest.unpack((folder / manifest.NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return Unusable(folder.name, "unfinished", "it has no manifest")
    except (CorruptPage, OSError) as error:
        return Unusable(folder.name, "damaged", f"{manifest.NAME}: {error}")
    if refusal := _refuse(folder.name, facts, body):
        return refusal
    try:
        data = (folder / SIDECAR).read_bytes()
    except OSError as error:
        return Unusable(folder.name, "damaged", f"{SIDECAR}: {error}")
    if [len(data), durable.digest(data).hex()] != body["files"][SIDECAR]:
        return Unusable(folder.name, "damaged", f"{SIDECAR}: digest differs")
    keys, tokens, checksums = _unpack_sidecar(data)
    return Segment(folder, facts, keys, tokens, checksums, body["created"])


def read(
    segment: Segment, rows: Sequence[int], out: np.ndarray
) -> list[tuple[str, str] | None]:
    """Read `rows` into `out` and compare checksums; return a fault or None for each.

    Rows are checked while later ones are still being read. A fault is (reason, detail),
    reason "damaged" where reading failed and "checksum" where the bytes differ; the
    row's bytes in `out` mean nothing then.

    Args:
        segment: where from.
        rows: row numbers, n of them.
        out: u8[n, row_nbytes], C-contiguous.
    """
    try:
        array = segment.array
    except (ValueError, OSError) as error:
        return [("damaged", str(error))] * len(rows)
    target = tensorstore.array(out)
    pending = [target[i].write(array[row]) for i, row in enumerate(rows)]
    return [
        _settle(future, out[i], segment.checksums[row])
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
    for i in range(len(segment.keys)):
        out = np.empty((1, segment.facts.row_nbytes), np.uint8)
        if fault := read(segment, [i], out)[0]:
            problems.append(f"chunk {i}: {fault[0]}: {fault[1]}")
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


def _settle(future, row: np.ndarray, checksum: bytes) -> tuple[str, str] | None:
    try:
        future.result()
    except (ValueError, OSError) as error:
        return "damaged", str(error)
    if durable.digest(row) != checksum:
        return "checksum", "the bytes read differ from those written"
    return None


def _save_with_orbax(path: Path, rows: np.ndarray) -> None:
    """Commit `rows` as an Orbax checkpoint: zarr3, uncompressed, one file a row."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False
    )
    save_args = {ARRAY: ocp.SaveArgs(shard_axes=(0,))}
    with _quiet_absl(), ocp.Checkpointer(handler) as checkpointer:
        tree = ocp.args.PyTreeSave({ARRAY: rows}, save_args=save_args)
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


def _pack_sidecar(keys, tokens, checksums) -> bytes:
    count = len(keys)
    tensors = {
        "keys": np.frombuffer(b"".join(keys), np.uint8).reshape(count, -1),
        "tokens": np.ascontiguousarray(tokens, "<i4"),
        "checksums": np.frombuffer(b"".join(checksums), np.uint8).reshape(count, -1),
    }
    return safetensors.numpy.save(tensors)


def _unpack_sidecar(data: bytes) -> tuple[tuple, np.ndarray, tuple]:
    tensors = safetensors.numpy.load(data)
    keys = tuple(PageKey(bytes(row)) for row in tensors["keys"])
    checksums = tuple(bytes(row) for row in tensors["checksums"])
    return keys, tensors["tokens"], checksums


def _body(name, facts, num_chunks, created, files) -> dict:
    """Return the manifest's body; `arrays` leaves room for one array a group."""
    return {
        "kind": "kvmem segment",
        "version": manifest.VERSION,
        "segment": name,
        "facts": dataclasses.asdict(facts),
        "num_chunks": num_chunks,
        "created": created,
        "arrays": [{"name": ARRAY, "path": f"{ORBAX}/{ARRAY}", "dtype": "uint8"}],
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
        return Unusable(name, "foreign", detail)
    if found != facts:
        detail = (
            f"{found.chunk_tokens} tokens of {found.record_nbytes} bytes a chunk, "
            f"asked for {facts.chunk_tokens} of {facts.record_nbytes}"
        )
        return Unusable(name, "format", detail, found)
    return None
