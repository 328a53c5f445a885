"""Segments in a bucket: numbers given once, leftovers, and what was taken away.

The law: a number is given once and for ever. A segment that is taken away leaves a
small object under its number, so that a writer which was taken over, and wakes up, can
never commit there; its rows are deleted after that. Leftovers are objects of no
committed segment: they are swept after such an object was put under the number that
their writer would need. What cannot be read is never taken away.

    shelf = BucketShelf(bucket, facts, lease)
    extend(index, shelf)

A bucket does not say when a segment was last asked for: a new process takes the time at
which it was written.
"""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvmem.errors import Busy, StoreLocked, say
from kvmem.store import object_segment
from kvmem.store.bucket import Bucket
from kvmem.store.index import Index
from kvmem.store.object_segment import ObjectSegment
from kvmem.store.results import SegmentReport
from kvmem.store.rows import NEVER, Fault
from kvmem.store.segment import Facts, Unusable
from kvmem.store.shelf import Seen
from kvmem.store.sidecar import Key
from kvmem.store.writer_lease import WriterLease

_AT_ONCE = 16


class BucketShelf:
    """Segments of one model and format below a bucket's prefix."""

    def __init__(self, bucket: Bucket, facts: Facts, lease: WriterLease | None):
        """Look at a bucket; only the holder of the lease changes it."""
        self.bucket, self.facts, self.lease = bucket, facts, lease
        self.is_unsure = False  # whether a commit may have stood that was not answered
        self._known: dict[int, ObjectSegment | Unusable | None] = {}  # None: a fence
        self._gone: set[str] = set()
        self._writing: set[int] = set()  # not published yet: nobody else's to take in

    def look(self, held: Index) -> Seen:
        """Load the numbers that are new, and those that could not be read."""
        given = object_segment.numbers(self.bucket, self.facts)
        writing = set(self._writing)  # first: what is published leaves it afterwards
        fresh = [
            number
            for number in given
            if number not in writing
            and isinstance(self._known.get(number, _UNKNOWN), Unusable)
        ]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as threads:
            found = list(threads.map(self._load, fresh))
        before = {self._name(number) for number in fresh}
        self._known.update(zip(fresh, found, strict=True))
        self.is_unsure = False
        new = [each for each in found if each is not None]
        gone, self._gone = self._gone | before, set()
        return Seen(new, gone - {each.name for each in new})

    def write(
        self,
        keys: Sequence[Key],
        tokens: np.ndarray,
        rows: np.ndarray,
        parents: Sequence[Key | None],
        checksums: Callable[[], Sequence[bytes]] | None,
        confirm: Callable[[], None],
        publish: Callable[[ObjectSegment], None],
    ) -> ObjectSegment:
        """Write a segment and commit it under the next number."""
        number = max(self._known, default=0) + 1
        said = keys, tokens, rows, parents, checksums, confirm
        self._writing.add(number)
        try:
            sealed = self._commit(number, said)
            try:
                publish(sealed)
            except BaseException:
                self.drop(sealed)
                raise
        finally:
            self._writing.discard(number)
        return sealed

    def _commit(self, number: int, said: tuple) -> ObjectSegment:
        """Write and commit what was said as `number`, or say who was given it."""
        try:
            sealed = object_segment.write(self.bucket, self.facts, number, *said)
        except StoreLocked as refused:
            if number in self._known:
                raise Busy(_overtaken(number)) from refused
            self.lease.lose()
            raise
        except OSError:
            self.is_unsure = True
            raise
        self._known[number] = sealed
        return sealed

    def drop(self, segment: ObjectSegment) -> None:
        """Put a fence in a segment's place, then delete its objects."""
        self.lease.confirm()
        object_segment.retire(segment)
        self._known[segment.number] = None
        object_segment.delete(segment)

    def read(
        self,
        segment: ObjectSegment,
        rows: Sequence[int],
        out: np.ndarray,
        deadline: float = NEVER,
    ) -> list[Fault | None]:
        """Read and verify rows; those of a segment that was taken away are "evicted".

        A segment of which something failed is asked for once more: another process may
        have taken it away.
        """
        faults = object_segment.read(segment, rows, out, deadline)
        lost = any(
            fault and fault.reason in ("damaged", "checksum") for fault in faults
        )
        if not lost or object_segment.is_there(segment):
            return faults
        self._known[segment.number] = None
        self._gone.add(segment.name)
        evicted = Fault("evicted", f"segment {segment.name} was taken away")
        return [fault and evicted for fault in faults]

    def sweep(self, held: Index) -> tuple[str, ...]:
        """Take away what dead writers left uncommitted, after shutting them out.

        One that only stalled could still commit what is being taken away; the fence
        takes the number that its commit would need.
        """
        home = f"{self.facts.model_id}/{self.facts.format_id}/"
        names = self.bucket.names(home)
        left = [name for name in names if self._is_left(name.removeprefix(home))]
        if left:
            number = max(self._known, default=0) + 1
            object_segment.fence(self.bucket, self.facts, number)
            self._known[number] = None
            self.bucket.delete(left)
        return tuple(left)

    def note_used(self, used_ns: Mapping[str, int]) -> None:
        """Keep nothing: it would cost a put a segment."""

    def explain(self, held: Index) -> tuple[str, str]:
        """Say whether segments of another layout are here, and no more."""
        refused = [each.status for each in list(held.unusable.values())]
        unread = refused.count("damaged") + refused.count("unreachable")
        other = f"; {unread} segments cannot be read" if unread else ""
        if count := refused.count("version"):
            said = f"; {count} segments are of another layout version"
            return "format", said + other
        return "not_found", other

    def verify(self) -> tuple[SegmentReport, ...]:
        """Read everything of this model and format and report every segment."""
        reports = []
        for number in object_segment.numbers(self.bucket, self.facts):
            match self._load(number):
                case ObjectSegment() as found:
                    problems = object_segment.inspect(found)
                    if problems and not object_segment.is_there(found):
                        continue  # its writer took it away meanwhile
                    status = "damaged" if problems else "ok"
                    said = found.name, status, len(found.keys), found.nbytes, problems
                    reports.append(SegmentReport(*said))
                case Unusable() as bad:
                    said = bad.name, bad.status, 0, 0, (bad.detail,)
                    reports.append(SegmentReport(*said))
        return tuple(reports)

    def _load(self, number: int) -> ObjectSegment | Unusable | None:
        return object_segment.load(self.bucket, self.facts, number)

    def _name(self, number: int) -> str:
        return f"{number:08d}"

    def _is_left(self, name: str) -> bool:
        """Say whether an object is of no committed segment, readable or not."""
        folder, slash, _ = name.partition("/")
        if not slash or folder == object_segment.MANIFESTS:
            return False
        number = folder.partition("-")[0]
        known = self._known.get(int(number)) if number.isdecimal() else None
        if isinstance(known, ObjectSegment):
            return folder != known.name
        return known is None


_UNKNOWN = Unusable("", "unknown", "not looked at yet")


def _overtaken(number: int) -> str:
    return say(
        f"committing segment {number}",
        "a write of this process that had outlived its lease took the number first",
        "Put the chunks again",
    )
