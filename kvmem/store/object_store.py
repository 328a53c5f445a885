"""The object store: `PageStore`'s verbs on s3://, without a folder and without Orbax.

    _store.json                              see object_root.py
    _writer.json                             the one writer's lease
    <model_id>/<format_id>/…                 see object_segment.py

The law: what `put` returned from is on the server, committed by one object put last;
one process writes, by lease, and a second one that believes itself alone is refused at
its commit. A chunk is served only for its tokens and with its bytes. Nothing read ever
deletes anything.

    with ObjectStore.open("s3://bucket/kv", model_id, format_id, 46_080) as store:
        store.put(keys, tokens, records)

Objects of a writer that died before its commit are never read, and swept by the next.
Nothing is evicted here: what a bucket costs is its owner's to limit.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmem.errors import FormatMismatch, StoreLocked, say
from kvmem.store import bucket, object_root, object_segment, requests, root_folder
from kvmem.store.bucket import Bucket
from kvmem.store.chain_file import Link
from kvmem.store.object_segment import ObjectSegment, Unreadable
from kvmem.store.page_key import PageKey
from kvmem.store.results import GetResult, PutResult, SegmentReport
from kvmem.store.segment import Facts
from kvmem.store.writer_lease import WriterLease, take

LEASE_S = 60.0
_AT_ONCE = 16


class _Place(NamedTuple):
    """Where a chunk's records are."""

    segment: ObjectSegment
    row: int

    @property
    def said(self) -> tuple[bytes, bytes]:
        """The chunk's tokens and checksum."""
        tokens = self.segment.tokens[self.row].tobytes()
        return tokens, self.segment.checksums[self.row]


@dataclasses.dataclass(frozen=True)
class ObjectStats:
    """Counters since opening, and what is held now; chunks are counted."""

    num_segments: int
    num_chunks: int
    nbytes: int
    num_masked: int
    num_unusable_segments: int
    swept: int  # objects of a dead writer
    written: int
    already_present: int
    hits: int
    misses: dict[str, int]  # calls of get that fell short, by reason


class ObjectStore:
    """Chunks of one model id and format id in a bucket; make it with `open`."""

    def __init__(self, objects: Bucket, facts: Facts, lease: WriterLease | None):
        """Read every manifest; `open` has checked the root and taken the lease."""
        self.root, self.facts = objects.url, facts
        self._bucket, self._lease = objects, lease
        self._putting = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._misses: collections.Counter[str] = collections.Counter()
        self._segments: dict[int, ObjectSegment | Unreadable | None] = {}
        self._places: dict[PageKey, _Place] = {}
        self._masked: dict[PageKey, str] = {}
        self._is_unsure = False
        self.refresh()

    @classmethod
    def open(
        cls,
        root: str,
        model_id: str,
        format_id: str,
        record_nbytes: int,
        chunk_tokens: int = 16,
        read_only: bool = False,
        endpoint: str | None = None,
        region: str | None = None,
        lease_s: float = LEASE_S,
    ) -> "ObjectStore":
        """Open a bucket's prefix for this model and format, making it if it is new.

        Args:
            root: s3://bucket/prefix.
            model_id: whose bytes (weights, tokenizer).
            format_id: what the bytes mean.
            record_nbytes: bytes of one token's record.
            chunk_tokens: tokens a chunk; belongs to the root.
            read_only: take no lease and put nothing.
            endpoint: address of the server, None for Amazon's.
            region: of the bucket; None: the environment's.
            lease_s: seconds after which a silent writer may be taken over.

        Raises:
            StoreLocked: another writer has the root open.
            FormatMismatch: the root holds another chunk or record size.
            ConfigError: the server has no conditional put, or no such scheme.
        """
        facts = Facts(model_id, format_id, int(chunk_tokens), int(record_nbytes))
        root_folder.check_facts(facts)
        objects = bucket.open_bucket(root, endpoint, region)
        if read_only:
            object_root.check(objects, chunk_tokens)
            return cls(objects, facts, None)
        object_root.make(objects, chunk_tokens)
        lease = take(objects, lease_s)
        try:
            store = cls(objects, facts, lease)
            store._sweep()
        except BaseException:
            lease.release()
            raise
        return store

    def close(self) -> None:
        """Give the lease back; reading goes on working."""
        if self._lease:
            with self._putting:
                self._lease.release()

    @property
    def writable(self) -> bool:
        """Say whether this object holds the writer's lease, as far as it knows."""
        return self._lease is not None and self._lease.is_held

    def __enter__(self) -> "ObjectStore":
        """Return the store."""
        return self

    def __exit__(self, *_) -> None:
        """Close the store."""
        self.close()

    def put(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        records: np.ndarray,
        parent: PageKey | None = None,
    ) -> PutResult:
        """Write the chunks that are not held yet; return once they are committed.

        All new chunks of one call make one segment.

        Args:
            keys: n keys.
            tokens: i32[n, chunk_tokens] or flat.
            records: u8[n * chunk_tokens, record_nbytes], or the same with chunks first.
            parent: the key that the first one continues, None for a text's first chunk.

        Raises:
            Conflict: a key is held, or repeated, with other tokens or records.
            StoreLocked: not the writer, or not any more. Nothing is kept then.
            OSError: the server refused, or did not answer.
        """
        keys, tokens = requests.checked_request(self.facts, keys, tokens)
        rows = requests.checked_rows(self.facts, len(keys), records)
        with self._putting:
            self._require_lease()
            if self._is_unsure:  # a commit whose answer was lost may have stood
                self.refresh()
                self._is_unsure = False
            said = requests.said_of(tokens, rows)
            new = requests.new_positions(keys, said, self._said)
            present = len(keys) - len(new)
            self._counts["already_present"] += present
            if not new:
                return PutResult(0, present, 0, None)
            number = max(self._segments, default=0) + 1
            try:
                sealed = object_segment.write(
                    self._bucket,
                    self.facts,
                    number,
                    [keys[i] for i in new],
                    tokens[new],
                    rows[new],
                    [keys[i - 1] if i else parent for i in new],
                )
            except StoreLocked:
                self._lease.lose()
                raise
            except OSError:
                self._is_unsure = True
                raise
            self._add(number, sealed)
            self._counts["written"] += len(new)
        return PutResult(len(new), present, sealed.nbytes, sealed.name)

    def get(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        deadline_s: float | None = None,
    ) -> GetResult:
        """Return the records of the leading chunks that are held and whole.

        Args:
            keys: n keys.
            tokens: i32[n, chunk_tokens] or flat; compared with those stored.
            deadline_s: seconds that the server may take; what is later is a miss.
        """
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        keys, tokens = requests.checked_request(self.facts, keys, tokens)
        places, reason, detail = self._find(keys, tokens)
        rows = np.empty((len(places), self.facts.row_nbytes), np.uint8)
        faults = self._read(places, rows, deadline)
        num_hit = min(faults, default=len(places))
        if faults:
            reason, detail = faults[num_hit]
            detail = f"{places[num_hit].segment.name}: {detail}"
        for i, (why, _) in faults.items():
            if why != "deadline":
                self._masked[keys[i]] = why
                self._places.pop(keys[i], None)
        self._counts["hits"] += num_hit
        if reason:
            self._misses[reason] += 1
        records = rows[:num_hit].reshape(-1, self.facts.record_nbytes)
        return GetResult(records, num_hit, reason, detail)

    def contains(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are held; nothing is asked of the server."""
        for count, key in enumerate(keys):
            if key not in self._places:
                return count
        return len(keys)

    def put_beside(self, name: str, data: bytes) -> None:
        """Put an object that no segment lists, unless it stands there already."""
        self._require_lease()
        if self._bucket.read(name) != data:
            self._bucket.put(name, data)

    def links(self) -> dict[PageKey, Link]:
        """Return the tokens of every held chunk, and what it continues."""
        return {
            key: Link(place.segment.tokens[place.row], place.segment.parents[place.row])
            for key, place in self._places.items()
        }

    def refresh(self) -> int:
        """Take in segments that were committed since; return how many."""
        given = object_segment.numbers(self._bucket, self.facts)
        fresh = [number for number in given if number not in self._segments]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            found = list(threads.map(self._load, fresh))
        for number, each in zip(fresh, found, strict=True):
            if isinstance(each, Unreadable) and each.status == "format":
                raise FormatMismatch(_other_format(self.facts, each))
            self._add(number, each)
        return sum(isinstance(each, ObjectSegment) for each in found)

    def verify(self) -> tuple[SegmentReport, ...]:
        """Read everything of this model and format and report every segment."""
        reports = []
        for number in object_segment.numbers(self._bucket, self.facts):
            match self._load(number):
                case ObjectSegment() as found:
                    problems = object_segment.inspect(found)
                    status = "damaged" if problems else "ok"
                    said = found.name, status, len(found.keys), found.nbytes, problems
                    reports.append(SegmentReport(*said))
                case Unreadable() as bad:
                    name = f"{number:08d}"
                    reports.append(SegmentReport(name, bad.status, 0, 0, (bad.detail,)))
        return tuple(reports)

    def stats(self) -> ObjectStats:
        """Return counters and what is held."""
        known = self._segments.values()
        counted = ("swept", "written", "already_present", "hits")
        return ObjectStats(
            num_segments=sum(isinstance(each, ObjectSegment) for each in known),
            num_chunks=len(self._places),
            nbytes=len(self._places) * self.facts.row_nbytes,
            num_masked=len(self._masked),
            num_unusable_segments=sum(isinstance(each, Unreadable) for each in known),
            misses=dict(self._misses),
            **{name: self._counts[name] for name in counted},
        )

    def _load(self, number: int) -> ObjectSegment | Unreadable | None:
        return object_segment.load(self._bucket, self.facts, number)

    def _add(self, number: int, found: ObjectSegment | Unreadable | None) -> None:
        self._segments[number] = found
        if isinstance(found, ObjectSegment):
            for row, key in enumerate(found.keys):
                self._places[key] = _Place(found, row)
                self._masked.pop(key, None)

    def _said(self, key: PageKey) -> tuple[bytes, bytes] | None:
        place = self._places.get(key)
        return place.said if place else None

    def _find(self, keys, tokens) -> tuple[list[_Place], str | None, str]:
        """Return the places of the leading keys held for these tokens, and the end."""
        places = []
        for key, asked in zip(keys, tokens, strict=True):
            place = self._places.get(key)
            if place is None:
                reason = self._masked.get(key, "not_found")
                return places, reason, f"chunk {len(places)} is not held"
            if place.said[0] != asked.tobytes():
                return places, "tokens", f"chunk {len(places)} is of other tokens"
            places.append(place)
        return places, None, ""

    def _read(self, places, rows, deadline) -> dict[int, tuple[str, str]]:
        """Fill `rows`, segment by segment; return faults by position."""
        faults = {}
        for _, run in itertools.groupby(
            range(len(places)), key=lambda i: places[i].segment.number
        ):
            run = list(run)
            found = object_segment.read(
                places[run[0]].segment,
                [places[i].row for i in run],
                rows[run[0] : run[-1] + 1],
                deadline,
            )
            faults |= {i: fault for i, fault in zip(run, found, strict=True) if fault}
        return faults

    def _sweep(self) -> None:
        """Take away what dead writers left uncommitted, after shutting them out.

        One that only stalled could still commit what is being taken away; the fence
        takes the number that its commit would need.
        """
        home = f"{self.facts.model_id}/{self.facts.format_id}/"
        names = self._bucket.names(home)
        left = [name for name in names if self._is_left(name.removeprefix(home))]
        if left:
            number = max(self._segments, default=0) + 1
            object_segment.fence(self._bucket, self.facts, number)
            self._segments[number] = None
            self._bucket.delete(left)
            self._counts["swept"] += len(left)

    def _is_left(self, name: str) -> bool:
        """Say whether an object is of no committed segment, readable or not."""
        folder, slash, _ = name.partition("/")
        if not slash or folder == object_segment.MANIFESTS:
            return False
        number = folder.partition("-")[0]
        known = self._segments.get(int(number)) if number.isdecimal() else None
        if isinstance(known, ObjectSegment):
            return folder != known.name
        return known is None

    def _require_lease(self) -> None:
        if not self.writable:
            raise StoreLocked(
                say(
                    f"put into {self.root}, opened read-only, closed or taken over",
                    "only the holder of the writer's lease writes",
                    "Open the store with read_only=False and put before close",
                )
            )
        self._lease.renew()


def _other_format(facts: Facts, refused: Unreadable) -> str:
    return say(
        f"{facts.model_id}/{facts.format_id} with record_nbytes={facts.record_nbytes}",
        f"segment {refused.number} was {refused.detail}",
        "Use the record size that it was written with, or another format id",
    )
