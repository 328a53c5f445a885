"""A segment on an object store: the array of a segment on disk, without a folder.

    <model_id>/<format_id>/<number>-<hex>/records/   zarr3: see row_files.py
                           <number>-<hex>/rest/
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
import secrets
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from kvmem.errors import Busy, CorruptPage, StoreLocked, say
from kvmem.store import durable, manifest, object_arrays, passing, row_files, sidecar
from kvmem.store.bucket import Bucket
from kvmem.store.page_key import PageKey
from kvmem.store.rows import NEVER, Fault
from kvmem.store.segment import Facts, Unusable
from kvmem.store.sidecar import Key

MANIFESTS = "_segments"
_opened: weakref.WeakKeyDictionary["ObjectSegment", object_arrays.Arrays] = (
    weakref.WeakKeyDictionary()
)
_KIND, _FENCE = "kvmem segment", "kvmem fence"


@dataclasses.dataclass(frozen=True, eq=False)
class ObjectSegment:
    """What manifest and sidecar say of a segment; C chunks."""

    bucket: Bucket
    facts: Facts
    number: int
    name: str
    keys: tuple[Key, ...]
    parents: tuple[Key | None, ...]  # the key that each continues, None: unknown
    tokens: np.ndarray  # i32[C, chunk_tokens]
    checksums: tuple[bytes, ...]
    rows_per_file: int
    created: float  # seconds since the epoch
    objects: dict[str, tuple[int, str]]  # name below the segment -> (nbytes, digest)
    file_nbytes: int  # of all of them, and the manifest

    @property
    def used_ns(self) -> int:
        """When it was written: a bucket says no more of its use."""
        return int(self.created * 1e9)

    @property
    def nbytes(self) -> int:
        """Bytes of its records."""
        return len(self.keys) * self.facts.row_nbytes


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
    checksums: Callable[[], Sequence[bytes]] | None = None,
    confirm: Callable[[], None] = lambda: None,
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
        checksums: returns those of the rows as they were put; None: nobody else has the
            rows.
        confirm: called before the commit; raises if that is too late.

    Raises:
        StoreLocked: another writer was given the number.
        OSError: the server refused, or did not answer.
    """
    name = f"{number:08d}-{secrets.token_hex(4)}"
    home, created = _home(facts, name), time.time()
    per_file = row_files.rows_per_file(*rows.shape)
    parts = row_files.cut(len(rows), per_file)
    checksums = tuple(checksums() if checksums else map(durable.digest, rows))
    try:
        objects = object_arrays.put(bucket, home, rows, parts)
        table = sidecar.pack(keys, parents, tokens, checksums)
        bucket.put(home + sidecar.NAME, table)
        objects[sidecar.NAME] = len(table), durable.digest(table).hex()
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
        "arrays": [
            {
                "name": part.name,
                "dtype": "uint8",
                "rows": part.stop - part.start,
                "rows_per_file": part.rows_per_file,
            }
            for part in parts
        ],
        "checksum": "xxh3-128",
        "files": objects,
    }
    data = manifest.pack(body)
    try:
        confirm()
        _commit(bucket, facts, number, data)
    except (Busy, StoreLocked):
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
        len(data) + sum(nbytes for nbytes, _ in objects.values()),
    )


def fence(bucket: Bucket, facts: Facts, number: int) -> None:
    """Give a number to nobody, so that a writer which was taken over cannot commit."""
    _commit(bucket, facts, number, _fence())


def retire(segment: ObjectSegment) -> None:
    """Put a fence in a segment's place: it is there no longer, its objects are."""
    segment.bucket.put(manifest_name(segment.facts, segment.number), _fence())


def delete(segment: ObjectSegment) -> None:
    """Delete the objects of a retired segment; a sweep finds those that are left."""
    home = _home(segment.facts, segment.name)
    segment.bucket.delete(segment.bucket.names(home))


def is_there(segment: ObjectSegment) -> bool:
    """Say whether its manifest still is, or the server does not say."""
    return _stands(segment.bucket, segment.facts, segment.number, segment.name)


def _stands(bucket: Bucket, facts: Facts, number: int, name: str) -> bool:
    try:
        data = bucket.read(manifest_name(facts, number))
        return manifest.unpack(data or b"").get("segment") == name
    except (CorruptPage, OSError):
        return True


def load(bucket: Bucket, facts: Facts, number: int) -> ObjectSegment | Unusable | None:
    """Return what was committed as `number`, None for a fence; no array is read."""
    place = f"{number:08d}"
    try:
        data = bucket.read(manifest_name(facts, number)) or b""
        body = manifest.unpack(data)
    except (CorruptPage, OSError) as error:
        return Unusable(place, passing.reason_of(error), f"manifest: {error}")
    if body["version"] != manifest.VERSION:
        detail = f"layout version {body['version']}, read here: {manifest.VERSION}"
        return Unusable(place, "version", detail, file_nbytes=_nbytes(body, data))
    if body["kind"] == _FENCE:
        return None
    nbytes = _nbytes(body, data)
    found = Facts(**body["facts"])
    if found != facts or not body["segment"].startswith(f"{number:08d}-"):
        detail = f"written as {body['segment']} for {found}"
        is_ours = (found.model_id, found.format_id) == (facts.model_id, facts.format_id)
        resized = is_ours and found != facts
        status = "format" if resized else "foreign"
        return Unusable(place, status, detail, found, nbytes)
    try:
        table = bucket.read(_home(facts, body["segment"]) + sidecar.NAME) or b""
    except OSError as error:
        return Unusable(place, passing.reason_of(error), f"{sidecar.NAME}: {error}")
    if [len(table), durable.digest(table).hex()] != body["files"][sidecar.NAME]:
        if not table and not _stands(bucket, facts, number, body["segment"]):
            return None  # its writer took it away meanwhile
        detail = f"{sidecar.NAME}: missing, or digest differs"
        return Unusable(place, "damaged", detail, file_nbytes=nbytes)
    try:
        said = sidecar.unpack(table)
    except CorruptPage as error:
        detail = f"{sidecar.NAME}: {error}"
        return Unusable(place, "damaged", detail, file_nbytes=nbytes)
    return ObjectSegment(
        bucket,
        facts,
        number,
        body["segment"],
        *said,
        body["arrays"][0]["rows_per_file"],
        body["created"],
        {path: tuple(said) for path, said in body["files"].items()},
        nbytes,
    )


def read(
    segment: ObjectSegment,
    rows: Sequence[int],
    out: np.ndarray,
    deadline: float = NEVER,
) -> list[Fault | None]:
    """Read `rows` into `out` and compare checksums; return a fault or None for each.

    A fault's reason is "damaged" where reading failed, "unreachable" where it failed of
    what passes, "checksum" where the bytes differ, "deadline" where they came too late.

    Args:
        segment: where from.
        rows: row numbers, n of them.
        out: u8[n, row_nbytes].
        deadline: on the clock of `time.monotonic`.
    """
    nbytes, per_file = segment.facts.row_nbytes, segment.rows_per_file
    places: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row // per_file, []).append(i)
    try:
        pending, arrays = [], _open(segment, deadline)
        for mine in places.values():
            at = [rows[i] for i in mine]
            first, last = min(at), max(at)
            part, array = arrays[int(first >= arrays[0][0].stop)]
            span = array[part.span(first, last + 1 - first, nbytes)]
            pending.append((mine, [row - first for row in at], span.read()))
    except (ValueError, OSError) as error:
        return [_fault(error, deadline)] * len(rows)
    faults: list[Fault | None] = [None] * len(rows)
    for mine, at, future in pending:
        block = _settle(future, deadline)
        for i, place in zip(mine, at, strict=True):
            if isinstance(block, Fault):
                faults[i] = block
                continue
            out[i] = block[place * nbytes : (place + 1) * nbytes]
            if durable.digest(out[i]) != segment.checksums[rows[i]]:
                detail = "the bytes read differ from those written"
                faults[i] = Fault("checksum", detail)
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


def _nbytes(body: dict, data: bytes) -> int:
    """Return the bytes of a manifest and of the objects that it lists."""
    return len(data) + sum(nbytes for nbytes, _ in body.get("files", {}).values())


def _fence() -> bytes:
    body = {"kind": _FENCE, "version": manifest.VERSION, "by": secrets.token_hex(8)}
    return manifest.pack(body)


def _home(facts: Facts, name: str) -> str:
    return f"{facts.model_id}/{facts.format_id}/{name}/"


def _take_away(bucket: Bucket, home: str) -> None:
    with contextlib.suppress(OSError):
        bucket.delete(bucket.names(home))


def _commit(bucket: Bucket, facts: Facts, number: int, data: bytes) -> None:
    if bucket.put_new(manifest_name(facts, number), data) is None:
        raise StoreLocked(
            say(
                f"committing segment {number} to {bucket.url}",
                "the number was given to another writer meanwhile, and a root has one",
                "Close one of the two, open the store again, and put again",
            )
        )


def _settle(future, deadline: float) -> np.ndarray | Fault:
    """Return what was read, or the fault."""
    try:
        return object_arrays.wait(future, deadline)
    except (ValueError, OSError) as error:
        return _fault(error, deadline)


def _open(segment: ObjectSegment, deadline: float) -> object_arrays.Arrays:
    """Return the records, opened once; a missing object is an error, not zeros."""
    arrays = _opened.get(segment)
    if arrays is None:
        parts = row_files.cut(len(segment.keys), segment.rows_per_file)
        home = _home(segment.facts, segment.name)
        arrays = object_arrays.open_all(segment.bucket, home, parts, deadline)
        _opened[segment] = arrays
    return arrays


def _fault(error: Exception, deadline: float) -> Fault:
    if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
        detail = "the server had not answered when the deadline came"
        return Fault("deadline", detail)
    return Fault(passing.reason_of(error), str(error))
