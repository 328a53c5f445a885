"""A store of segments: the verbs that a folder and a bucket have in common.

The law: what `put` returned from is as safe as the shelf makes it, and nothing that was
not; puts run one after another, in the order of their calls. `PageStore` opens it on a
folder, `ObjectStore` on a bucket, and both answer in the same words.
"""

import collections
import concurrent.futures
import numbers
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from kvmem.errors import ConfigError, FormatMismatch, InvalidId, say
from kvmem.store import durable, erase
from kvmem.store.chain_file import Link
from kvmem.store.index import Index
from kvmem.store.keeper import Keeper
from kvmem.store.page_key import PageKey
from kvmem.store.reader import Reader
from kvmem.store.requests import checked_parent, checked_request, checked_rows
from kvmem.store.results import (
    Erased,
    GcReport,
    GetResult,
    PutResult,
    SegmentReport,
    StoreStats,
)
from kvmem.store.rows import NEVER
from kvmem.store.segment import Facts
from kvmem.store.shelf import Shelf, extend
from kvmem.store.sidecar import Key
from kvmem.store.writer import Lease, PutFuture, Writer


class SegmentStore:
    """Chunks of one model id and format id; `PageStore` and `ObjectStore` are such."""

    swept: tuple[str, ...] = ()
    """Leftovers of a dead writer that opening took away, by name."""

    def __init__(
        self,
        shelf: Shelf,
        max_nbytes: int | None,
        lease_s: float,
        deadline_s: float | None,
    ):
        """Rebuild the index from what stands on the shelf."""
        self.facts: Facts = shelf.facts
        self._shelf, self._deadline_s = shelf, deadline_s
        self._counts: collections.Counter[str] = collections.Counter()
        self._misses: collections.Counter[str] = collections.Counter()
        self._index = Index()
        self.refresh()
        self._reader = Reader(self._index, shelf)
        self._keeper = Keeper(shelf, self._index, max_nbytes)
        self._writer = Writer(lease_s)

    @property
    def writable(self) -> bool:
        """Say whether this object may write."""
        raise NotImplementedError

    def _require_writer(self, verb: str) -> None:
        """Raise StoreLocked unless this object may write."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Let the next writer in."""
        raise NotImplementedError

    def _before_writing(self) -> None:
        """Make sure, in the writer's turn, that this process still is the writer."""

    def close(self) -> None:
        """Wait for puts in flight and let the next writer in; reading goes on.

        Raises:
            Whatever a put failed with that nobody has asked its future about.
        """
        if not self.writable:
            return
        self._writer.drain()
        self._keeper.save_recency()
        self._let_go()
        if failure := self._writer.first_unseen_failure():
            raise failure

    def __enter__(self):
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
            InvalidId: `parent` is no page key, or one of `keys`.
            StoreLocked: not the writer, or not any more. Nothing is kept then.
            Busy: the write did not end within the store's lease.
            OSError: the disk or the server refused, or did not answer.
        """
        keys, tokens, records = self._checked_put(keys, tokens, records)
        parent = checked_parent(keys, parent)
        # The records stay the caller's, which may change them once it has its thread
        # back: so that thread says what they are, while the write is under way.
        sums: concurrent.futures.Future = concurrent.futures.Future()
        try:
            future = self._submit(keys, tokens.copy(), records, parent, sums)
            sums.set_result(tuple(map(durable.digest, records)))
        except BaseException as error:
            sums.set_exception(error)
            raise
        return future.result()

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
        parent = checked_parent(keys, parent)
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
            deadline_s: what has not come by then is a miss; the store's own if None. At
                0 nothing is waited for, and nothing is held against what did not come.

        Raises:
            ConfigError: a deadline that is no number from 0 up.
        """
        check_limits(deadline_s=deadline_s)
        keys, tokens = checked_request(self.facts, keys, tokens)
        wait = self._deadline_s if deadline_s is None else deadline_s

        def deadline() -> float:
            return NEVER if wait is None else time.monotonic() + wait

        found = self._reader.get(keys, tokens, deadline, self._take_in, bool(wait))
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
        self._require_writer("pin")
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
        self._require_writer("gc")
        return self._in_turn(self._keeper.collect).result()

    def retain(self, keep: Collection[PageKey]) -> Erased:
        """Keep the chunks of these keys alone, pinned or not.

        Segments are rewritten without the others: when this returns, their bytes are
        on no file that can be read.
        """
        self._require_writer("retain")
        return self._in_turn(
            lambda lease: erase.retain(self._keeper, lease, keep)
        ).result()

    def refresh(self) -> int:
        """Take in segments that another process sealed since; return how many.

        Chunks that did not answer, or could not be asked for, are tried again.
        """
        self._index.retry()
        return self._take_in()

    def _take_in(self) -> int:
        added = extend(self._index, self._shelf)
        _refuse_other_format(self._index, self.facts)
        return added

    def links(self) -> dict[Key, Link]:
        """Return the tokens of every held chunk, what it continues, and its age."""
        with self._index.lock:
            return {
                key: Link(
                    place.segment.tokens[place.row], place.parent, place.segment.created
                )
                for key, place in self._index.places.items()
            }

    def verify(self) -> tuple[SegmentReport, ...]:
        """Read everything of this model and format and report every segment."""
        return self._shelf.verify()

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
                unread_nbytes=held.unread_nbytes,
                num_pinned=len(held.pins),
                in_flight=self._writer.in_flight,
                misses=dict(self._misses),
                **{name: self._counts[name] for name in counted},
            )

    def _submit(self, keys, tokens, records, parent, sums=None) -> PutFuture:
        def work(lease: Lease) -> PutResult:
            done = self._keeper.keep(lease, keys, tokens, records, parent, sums)
            with self._index.lock:
                self._counts.update(
                    written=done.written,
                    already_present=done.already_present,
                    evicted=done.evicted,
                    refused=done.refused,
                )
            return done

        return self._in_turn(work)

    def _in_turn(self, work: Callable[[Lease], Any]) -> PutFuture:
        def checked(lease: Lease) -> Any:
            self._before_writing()
            return work(lease)

        return self._writer.submit(checked)

    def _checked_put(self, keys, tokens, records):
        keys, tokens = checked_request(self.facts, keys, tokens)
        records = checked_rows(self.facts, len(keys), records)
        self._require_writer("put")
        return keys, tokens, records


def check_limits(**limits: float | None) -> None:
    """Raise unless every limit is a number that can be kept to."""
    for name, value in limits.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Real) or not value >= 0:
            raise ConfigError(
                say(
                    f"{name}={value!r}",
                    "a limit is 0 or more",
                    "Use a number from 0 up",
                )
            )


def _refuse_other_format(held: Index, facts: Facts) -> None:
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
