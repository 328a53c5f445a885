"""The keeper: what the one writer does to a store's shelf.

The law: a chunk is in the index only after it is durable on its shelf, and leaves the
index before it leaves the shelf. Room is made before anything is written, so the files
of segments, those included that cannot be read, never take more than the budget. What
could not be read is never deleted to save space: a segment with such a chunk is kept as
it is until LRU reaches every row of it.

    keeper.keep(lease, keys, tokens, rows, parent)     # PutResult
    keeper.collect(lease)                              # GcReport
"""

import bisect
import concurrent.futures
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvmem.store import eviction, requests, segment
from kvmem.store.index import Index
from kvmem.store.page_key import PageKey
from kvmem.store.places import Place
from kvmem.store.results import GcReport, PutResult
from kvmem.store.rows import NEVER
from kvmem.store.segment import Segment
from kvmem.store.shelf import Shelf, extend
from kvmem.store.writer import Lease

_SEGMENTS_A_BUDGET = 8  # a budget holds at least so many, or rewriting finds no room
_REWRITE_NBYTES = 256 << 20  # of rows held in memory at once, without a budget


class Keeper:
    """A shelf, its index, and the budget of its files."""

    def __init__(self, shelf: Shelf, held: Index, max_nbytes: int | None):
        """Take over a shelf whose writer this process is."""
        self.shelf, self.facts, self.max_nbytes = shelf, shelf.facts, max_nbytes
        self.index = held
        self._moved: set[str] = set()  # segments whose live rows were rewritten

    def keep(
        self,
        lease: Lease,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        records: np.ndarray,
        parent: PageKey | None,
        sums: concurrent.futures.Future | None = None,
    ) -> PutResult:
        """Write the chunks that are not held; return once they are durable.

        `sums` will hold the checksums of the records as they were put, where these may
        change meanwhile.
        """
        with self.index.lock:
            new = self._new_rows(keys, tokens, records)
        present = [key for key in keys if key in self.index.places]
        self.index.touch(present)
        parents = self._parents(keys, new, parent)
        protect = [*present, parent] if parent else present
        kept, evicted = self._make_room(lease, len(new), protect)
        refused, new = len(new) - kept, new[:kept]
        name = None
        size = self._part_chunks(len(new))
        for part in [new[at : at + size] for at in range(0, len(new), size)]:
            whole = len(part) == len(keys)
            name = self._write(
                lease,
                [keys[i] for i in part],
                tokens.copy() if whole else tokens[part],
                records if whole else records[part],
                [parents[i] for i in part],
                sums and (lambda part=part: [sums.result()[i] for i in part]),
            ).name
        self.save_recency()
        nbytes = len(new) * self.facts.row_nbytes
        return PutResult(
            len(new), len(keys) - len(new) - refused, nbytes, name, refused, evicted
        )

    def collect(self, lease: Lease) -> GcReport:
        """Sweep leftovers, keep to the budget, rewrite what is less than half live."""
        extend(self.index, self.shelf)
        swept = self.shelf.sweep(self.index)
        nbytes, before = self.index.file_nbytes, set(self.index.segments)
        self._moved.clear()
        self._make_room(lease, 0, ())
        kept = self._rewrite(lease)
        self.save_recency()
        after = set(self.index.segments)
        return GcReport(
            swept=swept,
            dropped=tuple(sorted(before - after - self._moved)),
            rewritten=tuple(sorted(before & self._moved)),
            written=tuple(sorted(after - before)),
            kept=tuple(sorted(kept)),
            freed_nbytes=nbytes - self.index.file_nbytes,
            unread_nbytes=self.index.unread_nbytes,
        )

    @property
    def _budget(self) -> int:
        """What readable segments may take: what cannot be read stays, and counts."""
        return self.max_nbytes - self.index.unread_nbytes

    def save_recency(self) -> None:
        """Let the shelf note when segments were last asked for."""
        with self.index.lock:
            touched, self.index.touched_ns = self.index.touched_ns, {}
        self.shelf.note_used(touched)

    def _new_rows(self, keys, tokens, records) -> list[int]:
        """Return the positions to write, or raise Conflict before anything is."""

        def held(key: PageKey) -> requests.Said | None:
            place = self.index.places.get(key)
            return place and (place.tokens, place.checksum)

        return requests.new_positions(
            keys, lambda i: requests.said_of(tokens[i], records[i]), held
        )

    def _parents(self, keys, new, parent) -> dict[int, PageKey | None]:
        """Return what each new chunk continues, None where it would go in circles."""
        parents = {i: keys[i - 1] if i else parent for i in new}
        written = {keys[i] for i in new}
        held = {above for above in parents.values() if above not in written} - {None}
        with self.index.lock:
            above = eviction.ancestors(self.index, held)
        if not above & written:
            return parents
        return {i: None if p in held else p for i, p in parents.items()}

    def _make_room(self, lease, num_new: int, protect: Iterable[PageKey]):
        """Evict until `num_new` chunks fit, or as many as can; return both counts."""
        if self.max_nbytes is None:
            return num_new, 0
        with lease.hold(), self.index.lock:
            need = self._need(num_new)
            plan = eviction.make(self.index, need, self._budget, tuple(protect))
            fitting = bisect.bisect_right(
                range(1, num_new + 1), plan.room_nbytes, key=self._need
            )
            if num_new and not fitting:
                return 0, 0
            for key in plan.evict:
                self.index.evict(key)
        self.drop_dead(lease)
        if self.index.file_nbytes + self._need(fitting) > self._budget:
            self._rewrite(lease)
        return fitting, len(plan.evict)

    def has_room(self, nbytes: int) -> bool:
        """Say whether so many bytes of files fit beside what is there."""
        limit = self.max_nbytes
        return limit is None or self.index.file_nbytes + nbytes <= self._budget

    def _need(self, num_chunks: int) -> int:
        """Return the most bytes that the files of new chunks take."""
        whole, rest = divmod(num_chunks, self._part_chunks(num_chunks))
        most = segment.estimate(self.facts, self._part_chunks(num_chunks))
        return whole * most + segment.estimate(self.facts, rest)

    def _part_chunks(self, num_chunks: int) -> int:
        """Return how many chunks go into one segment."""
        if self.max_nbytes is None:
            return max(1, num_chunks)
        cap = self.max_nbytes // _SEGMENTS_A_BUDGET
        fitting = bisect.bisect_right(
            range(1, num_chunks + 1),
            cap,
            key=lambda count: segment.estimate(self.facts, count),
        )
        return max(1, fitting)

    def _write(self, lease, keys, tokens, records, parents, sums=None) -> Segment:
        """Write one segment and publish it."""

        def publish(sealed: Segment) -> None:
            with lease.hold():
                self.index.add(sealed, is_fresh=True)

        said = keys, tokens, records, parents
        return self.shelf.write(*said, sums, lease.confirm, publish)

    def drop_dead(self, lease) -> tuple[str, ...]:
        """Take the segments away in which no row is live; return their names."""
        with lease.hold(), self.index.lock:
            dead = [
                each
                for name, each in self.index.segments.items()
                if not self.index.live[name]
            ]
            for each in dead:
                self.index.leave(each.name)
        for each in dead:
            self.shelf.drop(each)
        return tuple(each.name for each in dead)

    def _rewrite(self, lease) -> set[str]:
        """Gather the live chunks of sparse segments in new ones, as far as room lets.

        Returns the names of those that are kept, for a chunk that could not be read.
        """
        self.drop_dead(lease)
        kept = self._faulty()
        while batch := self._next_batch(kept):
            found = {each.name: self.read_live(each) for each in batch}
            kept |= {name for name, live in found.items() if live is None}
            whole = [live for live in found.values() if live is not None]
            if whole:
                self.gather(lease, whole)
                self._moved.update(self.drop_dead(lease))
        return kept

    def _faulty(self) -> set[str]:
        """Return the names of sparse segments with a chunk that could not be read."""
        with self.index.lock:
            return {
                mask.place.segment.name
                for mask in self.index.masked.values()
                if eviction.is_sparse(self.index, mask.place.segment)
            }

    def _next_batch(self, skip: set[str]) -> list[Segment]:
        """Return sparse segments, the emptiest first, whose chunks fit into one."""
        with self.index.lock:
            sparse = sorted(
                (self.index.live[name], name)
                for name, each in self.index.segments.items()
                if name not in skip and eviction.is_sparse(self.index, each)
            )
            room = _REWRITE_NBYTES
            if self.max_nbytes is not None:
                room = self._budget - self.index.file_nbytes
            batch, chunks = [], 0
            for live, name in sparse:
                chunks += live
                if segment.estimate(self.facts, chunks) > room:
                    if batch or self.max_nbytes is not None:
                        break
                batch.append(self.index.segments[name])
        return batch

    def read_live(self, sparse: Segment) -> "_Live | None":
        """Read the live rows of a segment, None if one of them cannot be read."""
        with self.index.lock:
            live = [
                row
                for row, key in enumerate(sparse.keys)
                if self.index.places.get(key) == Place(sparse, row)
            ]
        out = np.empty((len(live), self.facts.row_nbytes), np.uint8)
        faults = self.shelf.read(sparse, live, out, NEVER)
        for row, fault in zip(live, faults, strict=True):
            if fault:
                self.index.mask(sparse.keys[row], fault.reason, Place(sparse, row))
        return None if any(faults) else _Live(sparse, live, out)

    def gather(self, lease, whole: "Sequence[_Live]") -> Segment:
        """Write the live rows of several segments into one, as old as they were."""
        keys = [each.source.keys[row] for each in whole for row in each.rows]
        parents = [each.source.parents[row] for each in whole for row in each.rows]
        tokens = np.concatenate([each.source.tokens[each.rows] for each in whole])
        records = np.concatenate([each.records for each in whole])
        with self.index.lock:
            used_ns = max(self.index.used_ns.get(key, 0) for key in keys)
        sealed = self._write(lease, keys, tokens, records, parents)
        with self.index.lock:
            self.index.touched_ns[sealed.name] = used_ns
        return sealed


class _Live(NamedTuple):
    """Rows of a sparse segment that are to be kept."""

    source: Segment
    rows: list[int]
    records: np.ndarray  # u8[rows, row_nbytes]
