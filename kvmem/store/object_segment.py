"""A segment on an object store: the array of a segment on disk, without a folder.

    <model_id>/<format_id>/<number>-<hex>/records/   zarr3, u8[files, file bytes]
                           <number>-<hex>/chunks.safetensors
                           _segments/<number>.json   the manifest, put last

The law: a segment is there when its manifest is. The manifest is put where none stands,
so a number is given once: of two writers that believe they are alone, one is refused
and nothing that it wrote is ever read. Every object is listed with its size and digest;
a row leaves only after its checksum was compared.

Orbax has no part in this: TensorStore writes the array and reads it.
"""

import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Sequence

import numpy as np
import tensorstore

from kvmem.errors import CorruptPage, StoreLocked, say
from kvmem.store import durable, manifest
from kvmem.store import segment as segment_file
from kvmem.store.bucket import Bucket
from kvmem.store.page_key import PageKey
from kvmem.store.segment import ARRAY, SIDECAR, Facts

MANIFESTS = "_segments"
_KIND, _FENCE = "kvmem segment", "kvmem fence"


@dataclasses.dataclass(frozen=True, eq=False)
class ObjectSegment:
    """What manifest and sidecar say of a segment; C chunks."""

    bucket: Bucket
    facts: Facts
    number: int
    name: str
    keys: tuple[PageKey, ...]
    parents: tuple[PageKey | None, ...]  # the key that each continues, None: unknown
    tokens: np.ndarray  # i32[C, chunk_tokens]
    checksums: tuple[bytes, ...]
    rows_per_file: int
    created: float  # seconds since the epoch
    objects: dict[str, tuple[int, str]]  # name below the segment -> (nbytes, digest)

    @property
    def nbytes(self) -> int:
        """Bytes of its records."""
        return len(self.keys) * self.facts.row_nbytes

    @functools.cached_property
    def array(self) -> tensorstore.TensorStore:  # u8[files, file bytes]
        """The records, opened; an object that is missing is an error, not zeros."""
        spec = _array_spec(self.bucket, _home(self.facts, self.name))
        return tensorstore.open(spec, read=True).result()


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A manifest that is no segment of this store; status as in `segment.Unusable`."""

    number: int
    status: str
    detail: str


def manifest_name(facts: Facts, number: int) -> str:
    """Return the name of the object that commits segment `number`."""
    return f"{facts.model_id}/{facts.format_id}/{MANIFESTS}/{number:08d}.json"


def numbers(bucket: Bucket, facts: Facts) -> list[int]:
    """Return the numbers that were given, oldest first."""
    under = f"{facts.model_id}/{facts.format_id}/{MANIFESTS}/"
    stems = [
        name.removeprefix(under).removesuffix(".json") for name in bucket.names(under)
    ]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def write(
    bucket: Bucket,
    facts: Facts,
    number: int,
    keys: Sequence[PageKey],
    tokens: np.ndarray,
    rows: np.ndarray,
    parents: Sequence[PageKey | None],
) -> ObjectSegment:
    """Write a segment and commit it as `number`; on failure leave nothing half-written.

    Where the server did not say whether the commit stood, the segment is there whole,
    or it is a leftover that nobody reads and the next writer sweeps.

    Args:
        bucket: where to.
        facts: the store's facts.
        number: one that was not given yet, as far as the writer knows.
        keys: C keys.
        tokens: i32[C, chunk_tokens].
        rows: u8[C, row_nbytes], C > 0.
        parents: the key that each chunk continues, None where that is unknown.

    Raises:
        StoreLocked: another writer was given the number.
        OSError: the server refused, or did not answer.
    """
    name = f"{number:08d}-{secrets.token_hex(4)}"
    home, created = _home(facts, name), time.time()
    per_file = segment_file.rows_per_file(*rows.shape)
    checksums = tuple(durable.digest(row) for row in rows)
    try:
        objects = _put_array(bucket, home, segment_file.by_file(rows, per_file))
        sidecar = segment_file.pack_sidecar(keys, parents, tokens, checksums)
        bucket.put(home + SIDECAR, sidecar)
        objects[SIDECAR] = len(sidecar), durable.digest(sidecar).hex()
    except BaseException:
        _take_away(bucket, home)
        raise
    body = {
        "kind": _KIND,
        "version": manifest.VERSION,
        "segment": name,
        "facts": dataclasses.asdict(facts),
        "num_chunks": len(keys),
        "created": created,
        "arrays": [{"name": ARRAY, "dtype": "uint8", "rows_per_file": per_file}],
        "checksum": "xxh3-128",
        "files": objects,
    }
    try:
        _commit(bucket, facts, number, body)
    except StoreLocked:
        _take_away(bucket, home)
        raise
    return ObjectSegment(
        bucket,
        facts,
        number,
        name,
        tuple(keys),
        tuple(parents),
        tokens,
        checksums,
        per_file,
        created,
        objects,
    )


def fence(bucket: Bucket, facts: Facts, number: int) -> None:
    """Give a number to nobody, so that a writer which was taken over cannot commit."""
    body = {"kind": _FENCE, "version": manifest.VERSION, "by": secrets.token_hex(8)}
    _commit(bucket, facts, number, body)


def load(
    bucket: Bucket, facts: Facts, number: int
) -> ObjectSegment | Unreadable | None:
    """Return what was committed as `number`, None for a fence; no array is read."""
    try:
        body = manifest.unpack(bucket.read(manifest_name(facts, number)) or b"")
    except (CorruptPage, OSError) as error:
        return Unreadable(number, "damaged", f"manifest: {error}")
    if body["version"] != manifest.VERSION:
        detail = f"layout version {body['version']}, read here: {manifest.VERSION}"
        return Unreadable(number, "version", detail)
    if body["kind"] == _FENCE:
        return None
    found = Facts(**body["facts"])
    if found != facts or not body["segment"].startswith(f"{number:08d}-"):
        detail = f"written as {body['segment']} for {found}"
        is_ours = (found.model_id, found.format_id) == (facts.model_id, facts.format_id)
        resized = is_ours and found != facts
        return Unreadable(number, "format" if resized else "foreign", detail)
    sidecar = bucket.read(_home(facts, body["segment"]) + SIDECAR) or b""
    if [len(sidecar), durable.digest(sidecar).hex()] != body["files"][SIDECAR]:
        return Unreadable(number, "damaged", f"{SIDECAR}: missing, or digest differs")
    (array,) = body["arrays"]
    return ObjectSegment(
        bucket,
        facts,
        number,
        body["segment"],
        *segment_file.unpack_sidecar(sidecar),
        array["rows_per_file"],
        body["created"],
        {path: tuple(said) for path, said in body["files"].items()},
    )


def read(
    segment: ObjectSegment,
    rows: Sequence[int],
    out: np.ndarray,
    deadline: float | None = None,
) -> list[tuple[str, str] | None]:
    """Read `rows` into `out` and compare checksums; return a fault or None for each.

    A fault is (reason, detail), reason "damaged" where reading failed, "checksum" where
    the bytes differ, "deadline" where they came too late.

    Args:
        segment: where from.
        rows: row numbers, n of them.
        out: u8[n, row_nbytes].
        deadline: on the clock of `time.monotonic`, None to wait.
    """
    nbytes, per_file = segment.facts.row_nbytes, segment.rows_per_file
    places: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row // per_file, []).append(i)
    try:
        pending = []
        for file, mine in places.items():
            at = [rows[i] % per_file for i in mine]
            span = segment.array[file, min(at) * nbytes : (max(at) + 1) * nbytes]
            pending.append((mine, [a - min(at) for a in at], span.read()))
    except (ValueError, OSError) as error:
        return [("damaged", str(error))] * len(rows)
    faults: list[tuple[str, str] | None] = [None] * len(rows)
    for mine, at, future in pending:
        block = _settle(future, deadline)
        for i, place in zip(mine, at, strict=True):
            if isinstance(block, tuple):
                faults[i] = block
                continue
            out[i] = block[place * nbytes : (place + 1) * nbytes]
            if durable.digest(out[i]) != segment.checksums[rows[i]]:
                faults[i] = "checksum", "the bytes read differ from those written"
    return faults


def inspect(segment: ObjectSegment) -> tuple[str, ...]:
    """Read every object of a segment and return what is wrong with it."""
    home = _home(segment.facts, segment.name)
    there = {name.removeprefix(home) for name in segment.bucket.names(home)}
    extra = sorted(there - set(segment.objects))
    problems = [f"{name}: not in the manifest" for name in extra]
    names = sorted(segment.objects)
    found = segment.bucket.read_all([home + name for name in names])
    for name, data in zip(names, found, strict=True):
        nbytes, digest = segment.objects[name]
        if data is None:
            problems.append(f"{name}: missing")
        elif len(data) != nbytes:
            problems.append(f"{name}: {len(data)} bytes, written with {nbytes}")
        elif durable.digest(data).hex() != digest:
            problems.append(f"{name}: digest differs")
    return tuple(problems)


def _home(facts: Facts, name: str) -> str:
    return f"{facts.model_id}/{facts.format_id}/{name}/"


def _take_away(bucket: Bucket, home: str) -> None:
    with contextlib.suppress(OSError):
        bucket.delete(bucket.names(home))


def _commit(bucket: Bucket, facts: Facts, number: int, body: dict) -> None:
    name = manifest_name(facts, number)
    if bucket.put_new(name, manifest.pack(body)) is None:
        raise StoreLocked(
            say(
                f"committing segment {number} to {bucket.url}",
                "the number was given to another writer meanwhile, and a root has one",
                "Close one of the two, open the store again, and put again",
            )
        )


def _array_spec(bucket: Bucket, home: str) -> dict:
    return {
        "driver": "zarr3",
        "kvstore": bucket.spec(f"{home}{ARRAY}/"),
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _put_array(
    bucket: Bucket, home: str, files: np.ndarray
) -> dict[str, tuple[int, str]]:
    """Write u8[files, file bytes], an object a file; return its objects."""
    grid = {"chunk_shape": [1, files.shape[1]]}
    metadata = {
        "shape": list(files.shape),
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": grid},
    }
    spec = _array_spec(bucket, home) | {"metadata": metadata}
    with bucket.told("put", home):
        array = tensorstore.open(spec, create=True).result()
        array.write(files).result()
    about = bucket.read(f"{home}{ARRAY}/zarr.json")
    said = {f"{ARRAY}/zarr.json": about} | {
        f"{ARRAY}/c/{i}/0": file for i, file in enumerate(files)
    }
    return {
        name: (len(data), durable.digest(data).hex()) for name, data in said.items()
    }


def _settle(future, deadline: float | None) -> np.ndarray | tuple[str, str]:
    """Return what was read, or the fault."""
    try:
        if deadline is None:
            return future.result()
        return future.result(timeout=max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return "deadline", "the server had not answered when the deadline came"
    except (ValueError, OSError) as error:
        return "damaged", str(error)
