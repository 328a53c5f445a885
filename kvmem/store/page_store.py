"""The page store: token records on disk under chained keys, and their tokens with them.

    <root>/_store.json, _writer.lock         see root_folder.py
           <model_id>/<format_id>/<segment>/   see segment.py

The law: a chunk is served only if its key is held, its tokens equal those asked for
and its bytes have the checksum they were written with; else the answer is a miss that
says why. What `put` returned from is durable. Nothing read ever deletes anything.

    with PageStore.open(root, model_id, format_id, record_nbytes=46080) as store:
        store.put(keys, tokens, records)
        hit = store.get(keys, tokens)     # hit.records u8[n, record], hit.reason

One process writes, and its lock dies with it; readers take no lock. POSIX only.
"""

import collections
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvmem.errors import ConfigError, FormatMismatch, InvalidId, StoreLocked, say
from kvmem.store import bucket, durable, index, root_folder, rows, segment
from kvmem.store.io import DISK, Disk
from kvmem.store.keeper import Keeper
from kvmem.store.page_key import PageKey
from kvmem.store.places import Place
from kvmem.store.requests import checked_request, checked_rows
from kvmem.store.results import (
    GcReport,
    GetResult,
    PutResult,
    SegmentReport,
    StoreStats,
)
from kvmem.store.segment import Facts
from kvmem.store.writer import Lease, PutFuture, Writer


class PageStore:
    """Chunks of one model id and format id under one root; make it with `open`."""

    def __init__(
        self,
        root: Path,
        facts: Facts,
        lock: durable.WriterLock | None,
        disk: Disk = DISK,
        max_nbytes: int | None = None,
        lease_s: float = 300.0,
        deadline_s: float = 30.0,
    ):
        """Rebuild the index; `open` has checked root and facts and taken the lock."""
        self.root, self.facts = root, facts
        self._folder = root / facts.model_id / facts.format_id
        self._lock, self._deadline_s = lock, deadline_s
        self._counts = collections.Counter()
        self._misses = collections.Counter()
        self._index = index.rebuild(self._folder, facts)
        _refuse_other_format(self._index, facts)
        self._keeper = Keeper(self._folder, facts, self._index, disk, max_nbytes)
        self._writer = Writer(lease_s)
        self.swept = self._keeper.sweep() if lock else ()
        """Leftovers of a dead writer that opening took away, by name."""

    @classmethod
    def open(
        cls,
        root: str | Path,
        model_id: str,
        format_id: str,
        record_nbytes: int,
        chunk_tokens: int = 16,
        read_only: bool = False,
        *,
        max_nbytes: int | None = None,
        io: Disk | None = None,
        lease_s: float = 300.0,
        deadline_s: float = 30.0,
    ) -> "PageStore":
        """Open `root` for this model and format, making it if it is new.

        Args:
            root: the store's folder; a new one is made 0700.
            model_id: whose bytes (weights, tokenizer); safe as a file name.
            format_id: what the bytes mean; safe as a file name.
            record_nbytes: bytes of one token's record.
            chunk_tokens: tokens a chunk; belongs to the root.
            read_only: take no lock and make nothing.
            max_nbytes: what the files of this model and format may take together;
                room is made by eviction, least recently used and suffixes first.
            io: what every change of the disk goes through.
            lease_s: the longest that one write may hold up the next.
            deadline_s: the longest that a `get` waits, unless it says otherwise.

        Raises:
            StoreLocked: another writer has the root open.
            FormatMismatch: the root holds another chunk or record size.
        """
        _refuse_url(root)
        facts = Facts(model_id, format_id, int(chunk_tokens), int(record_nbytes))
        root_folder.check_facts(facts)
        _check_limits(max_nbytes=max_nbytes, lease_s=lease_s, deadline_s=deadline_s)
        root = Path(root).absolute()
        if read_only:
            root_folder.check(root, chunk_tokens)
            return cls(root, facts, None, deadline_s=deadline_s)
        disk = io or DISK
        lock = root_folder.take(root, chunk_tokens, disk)
        try:
            durable.make_folder(root / model_id, disk)
            durable.make_folder(root / model_id / format_id, disk)
            return cls(root, facts, lock, disk, max_nbytes, lease_s, deadline_s)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Wait for puts in flight and give the writer's lock back; reading goes on.

        Raises:
            Whatever a put failed with that nobody has asked its future about.
        """
        if not self.writable:
            return
        self._writer.drain()
        self._keeper.save_recency()
        self._lock.release()
        if failure := self._writer.first_unseen_failure():
            raise failure

    @property
    def writable(self) -> bool:
        """Say whether this object holds the writer's lock."""
        return self._lock is not None and self._lock.is_held

    def __enter__(self) -> "PageStore":
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
        """Write the chunks that are not held yet; return once they are durable.

        Chunks that are held are compared and not written again; all new chunks of one
        call make one segment, or several where a budget would find one too large. Call
        with as many chunks as there are: a segment costs about 20 ms however small.

        Args:
            keys: n keys, each continuing the one before it.
            tokens: i32[n, chunk_tokens] or flat.
            records: u8[n * chunk_tokens, record_nbytes], or the same with chunks first.
            parent: the key that the first one continues, where only what was missing is
                put; eviction takes a chunk only after all that continue it.

        Raises:
            Conflict: a key is held, or repeated, with other tokens or records. Nothing
                is written then. Records computed again need not have equal bits: put
                what lies beyond `contains`.
            FormatMismatch: shapes or dtypes that are not the store's.
            Busy: the write did not end within the store's lease.
        """
        request = self._checked_put(keys, tokens, records)
        return self._submit(*request, parent).result()

    def put_async(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        records: np.ndarray,
        parent: PageKey | None = None,
    ) -> PutFuture:
        """Do `put` behind the caller's back; the future's result is the put's.

        Tokens and records are copied before this returns, so they may be changed,
        donated or freed at once. A failure is raised by the future, or by `close` if
        nobody asks the future. Puts run in the order of their calls.
        """
        keys, tokens, records = self._checked_put(keys, tokens, records)
        return self._submit(keys, tokens.copy(), records.copy(), parent)

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
            deadline_s: what has not come by then is a miss; the store's own if None.
        """
        keys, tokens = checked_request(self.facts, keys, tokens)
        wait = self._deadline_s if deadline_s is None else deadline_s
        found = self._get(keys, tokens, time.monotonic() + wait)
        if found.reason == "evicted" and self.refresh():
            # Rewritten elsewhere, perhaps: what this index says is out of date.
            found = self._get(keys, tokens, time.monotonic() + wait)
        with self._index.lock:
            self._counts["hits"] += found.num_hit
            if found.reason:
                self._misses[found.reason] += 1
        if self.writable:
            self._index.touch(keys[: found.num_hit])
        return found

    def contains(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are held; nothing is read or verified."""
        return self._index.prefix(keys)

    def pin(self, keys: Sequence[PageKey]) -> int:
        """Keep the leading chunks that are held until `unpin`; return how many.

        A pin holds in the process that writes: a reader's keeps nobody from evicting.
        """
        self._require_lock("pin")
        with self._index.lock:
            count = self._index.prefix(keys)
            self._index.pin(keys[:count])
        return count

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Undo one `pin` of each key; InvalidId if one has no pin left."""
        with self._index.lock:
            wanted = collections.Counter(keys)
            if not wanted <= self._index.pins:
                raise InvalidId(
                    say(
                        f"unpin of {len(keys)} keys",
                        "a key is unpinned as often as it was pinned, and one is not",
                        "Unpin keys[:n] with the n that pin returned, once",
                    )
                )
            self._index.unpin(keys)

    def gc(self) -> GcReport:
        """Sweep leftovers, keep to the budget, rewrite segments less than half live."""
        self._require_lock("gc")
        return self._writer.submit(self._keeper.collect).result()

    def refresh(self) -> int:
        """Take in segments that another process sealed since; return how many."""
        added = index.extend(self._index, self._folder, self.facts)
        _refuse_other_format(self._index, self.facts)
        return added

    def verify(self) -> tuple[SegmentReport, ...]:
        """Read everything in this store's folder and report every segment."""
        return tuple(self._report(name) for name in index.names(self._folder))

    def stats(self) -> StoreStats:
        """Return counters and what is held."""
        counted = ("written", "already_present", "hits", "evicted", "refused")
        with self._index.lock:
            held = self._index
            return StoreStats(
                num_segments=len(held.segments),
                num_chunks=len(held.places),
                nbytes=len(held.places) * self.facts.row_nbytes,
                num_masked=len(held.masked),
                num_unusable_segments=len(held.unusable),
                file_nbytes=held.file_nbytes,
                num_pinned=len(held.pins),
                in_flight=self._writer.in_flight,
                misses=dict(self._misses),
                **{name: self._counts[name] for name in counted},
            )

    def _submit(self, keys, tokens, records, parent) -> PutFuture:
        def work(lease: Lease) -> PutResult:
            done = self._keeper.keep(lease, keys, tokens, records, parent)
            with self._index.lock:
                self._counts.update(
                    written=done.written,
                    already_present=done.already_present,
                    evicted=done.evicted,
                    refused=done.refused,
                )
            return done

        return self._writer.submit(work)

    def _checked_put(self, keys, tokens, records):
        keys, tokens = checked_request(self.facts, keys, tokens)
        records = checked_rows(self.facts, len(keys), records)
        self._require_lock("put")
        return keys, tokens, records

    def _get(self, keys, tokens, deadline: float) -> GetResult:
        """Find, read and verify once."""
        places, reason, detail = self._find(keys, tokens)
        out = np.empty((len(places), self.facts.row_nbytes), np.uint8)
        faults = self._read(places, out, deadline)
        num_hit = min(faults, default=len(places))
        if faults:
            reason, detail = faults[num_hit]
            detail = f"{places[num_hit].segment.name}: {detail}"
        for i, fault in faults.items():
            self._index.mask(keys[i], fault.reason, places[i])
        records = out[:num_hit].reshape(-1, self.facts.record_nbytes)
        return GetResult(records, num_hit, reason, detail)

    def _find(self, keys, tokens) -> tuple[list[Place], str | None, str]:
        """Return the places of the leading keys held for these tokens, and the end."""
        places = []
        for key, asked in zip(keys, tokens, strict=True):
            place = self._index.find(key)
            if place is None:
                return places, *self._absent(key, len(places))
            if place.tokens != asked.tobytes():
                return places, "tokens", f"chunk {len(places)} is of other tokens"
            places.append(place)
        return places, None, ""

    def _absent(self, key: PageKey, position: int) -> tuple[str, str]:
        """Return why a key is not held, as well as the root can tell."""
        detail = f"chunk {position} is not held"
        if reason := self._index.why_not(key):
            return reason, detail
        reason, other = root_folder.explain(self.root, self.facts, self._index)
        return reason, detail + other

    def _read(self, places, out, deadline: float) -> dict[int, rows.Fault]:
        """Fill `out`, segment by segment; return faults by position."""
        faults = {}
        for _, run in itertools.groupby(
            range(len(places)), key=lambda i: places[i].segment.name
        ):
            run = list(run)
            source = places[run[0]].segment
            numbers = [places[i].row for i in run]
            part = out[run[0] : run[-1] + 1]
            found = rows.read(source, numbers, part, deadline)
            faults |= {i: fault for i, fault in zip(run, found, strict=True) if fault}
        return faults

    def _report(self, name: str) -> SegmentReport:
        found = segment.load(self._folder / name, self.facts)
        if isinstance(found, segment.Unusable):
            return SegmentReport(name, found.status, 0, 0, (found.detail,))
        problems = rows.inspect(found)
        status = "damaged" if problems else "ok"
        return SegmentReport(name, status, len(found.keys), found.nbytes, problems)

    def _require_lock(self, verb: str) -> None:
        if not self.writable:
            raise StoreLocked(
                say(
                    f"{verb} of {self.root}, opened read-only or closed",
                    "only the holder of the writer's lock writes",
                    "Open the store with read_only=False and call before close",
                )
            )


def _check_limits(**limits: float | None) -> None:
    """Raise unless every limit is a number that can be kept to."""
    for name, value in limits.items():
        if value is not None and not value >= 0:
            raise ConfigError(
                say(f"{name}={value}", "a limit is 0 or more", "Use a number from 0 up")
            )


def _refuse_other_format(held: index.Index, facts: Facts) -> None:
    """Raise if a segment under these very ids has records of another size."""
    for refused in list(held.unusable.values()):
        if refused.status == "format":
            raise FormatMismatch(
                say(
                    f"{facts.model_id}/{facts.format_id} with "
                    f"record_nbytes={facts.record_nbytes}",
                    f"segment {refused.name} holds {refused.detail}",
                    f"Use record_nbytes={refused.found.record_nbytes}, "
                    "or another format id",
                )
            )


def _refuse_url(root: str | Path) -> None:
    """Raise if the root is a URL: Orbax would write a folder of that name."""
    if bucket.scheme_of(root):
        raise ConfigError(
            say(
                f"a page store at {root}",
                "a page store is a folder, and a URL never reaches Orbax",
                "Use store.open_root, which keeps s3:// on its server",
            )
        )
