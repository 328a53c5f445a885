"""A segment: one folder of many chunks, written once, sealed, never changed.

    <segment>/orbax/             an Orbax checkpoint of one array, u8[files, file bytes]
              chunks.safetensors keys, tokens and checksums, one row a chunk
              manifest.json      what this is and every file's size and digest, last

The law: `write` returns after every file, every folder and then the manifest are
synced, so what it returned from survives a power loss; without its manifest a segment
is not there. Orbax commits, and kvmem seals: Orbax syncs its chunk files, but neither
its own metadata nor the parent after its rename. A row is one chunk's token records;
rows are read through TensorStore, each into its place, and leave only after their
checksum was compared.

Rows are stacked in one array; a file holds as many as make about a MiB (each file costs
a millisecond or two to make durable), and one where a row alone is as large.

Orbax is used in this file alone, and imported by the first write: it brings jax, which
a process that reads, lists or verifies has no need of.
"""

import contextlib
import dataclasses
import functools
import itertools
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
FILE_NBYTES = 2**20  # rows are gathered into files of about this


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
    rows_per_file: int

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def nbytes(self) -> int:
        """Bytes of its records."""
        return len(self.keys) * self.facts.row_nbytes

    @functools.cached_property
    def array(self) -> tensorstore.TensorStore:  # u8[files, file bytes]
        """The records on disk, opened; rows are read when they are asked for."""
        path = str(self.folder / ORBAX / ARRAY)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        num_files = -(-len(self.keys) // self.rows_per_file)
        shape = [num_files, self.rows_per_file * self.facts.row_nbytes]
        opened = tensorstore.open(spec, read=True, dtype=tensorstore.uint8, shape=shape)
        return opened.result()


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
    rows_per_file = _rows_per_file(*rows.shape)
    folder.mkdir(mode=durable.FOLDER_MODE)
    try:
        _save_with_orbax(folder / ORBAX, _by_file(rows, rows_per_file))
        (folder / SIDECAR).write_bytes(_pack_sidecar(keys, tokens, checksums))
        files = durable.seal_tree(folder)
        durable.sync(folder.parent)
        body = _body(folder.name, facts, len(keys), created, rows_per_file, files)
        durable.write_file(folder / manifest.NAME, manifest.pack(body))
    except BaseException:
        (folder / manifest.NAME).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Segment(
        folder, facts, tuple(keys), tokens, checksums, created, rows_per_file
    )


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
    (array,) = body["arrays"]
    created, rows_per_file = body["created"], array["rows_per_file"]
    return Segment(folder, facts, keys, tokens, checksums, created, rows_per_file)


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
    nbytes, target = segment.facts.row_nbytes, tensorstore.array(out.reshape(-1))
    pending = []
    for start, stop in _runs(rows, segment.rows_per_file):
        file, first = divmod(rows[start], segment.rows_per_file)
        source = array[file, first * nbytes : (first + stop - start) * nbytes]
        future = target[start * nbytes : stop * nbytes].write(source)
        pending += [future] * (stop - start)
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
    out = np.empty((segment.rows_per_file, segment.facts.row_nbytes), np.uint8)
    for rows in itertools.batched(range(len(segment.keys)), len(out)):
        for row, fault in zip(rows, read(segment, rows, out[: len(rows)]), strict=True):
            if fault:
                problems.append(f"chunk {row}: {fault[0]}: {fault[1]}")
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


def _rows_per_file(num_rows: int, row_nbytes: int) -> int:
    """Return how many rows make a file of about FILE_NBYTES, shared out evenly."""
    most = max(1, FILE_NBYTES // row_nbytes)
    num_files = -(-num_rows // most)
    return -(-num_rows // num_files)


def _by_file(rows: np.ndarray, per_file: int) -> np.ndarray:
    """Return u8[files, file bytes]; zeros fill the last file, no copy if it is full."""
    num_files = -(-len(rows) // per_file)
    if num_files * per_file != len(rows):
        filler = np.zeros((num_files * per_file - len(rows), rows.shape[1]), np.uint8)
        rows = np.concatenate([rows, filler])
    return rows.reshape(num_files, -1)


def _settle(future, row: np.ndarray, checksum: bytes) -> tuple[str, str] | None:
    try:
        future.result()
    except (ValueError, OSError) as error:
        return "damaged", str(error)
    if durable.digest(row) != checksum:
        return "checksum", "the bytes read differ from those written"
    return None


def _save_with_orbax(path: Path, files: np.ndarray) -> None:
    """Commit as an Orbax checkpoint: zarr3, uncompressed, one file a first index."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=True, use_compression=False
    )
    save_args = {ARRAY: ocp.SaveArgs(shard_axes=(0,))}
    with _quiet_absl(), ocp.Checkpointer(handler) as checkpointer:
        tree = ocp.args.PyTreeSave({ARRAY: files}, save_args=save_args)
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
        return Unusable(name, "foreign", detail)
    if found != facts:
        detail = (
            f"{found.chunk_tokens} tokens of {found.record_nbytes} bytes a chunk, "
            f"asked for {facts.chunk_tokens} of {facts.record_nbytes}"
        )
        return Unusable(name, "format", detail, found)
    return None
