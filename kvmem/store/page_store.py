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
import dataclasses
import itertools
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvmem.errors import Conflict, FormatMismatch, StoreLocked, say
from kvmem.store import durable, index, root_folder, segment
from kvmem.store.index import Place
from kvmem.store.page_key import PageKey, token_array
from kvmem.store.segment import Facts


@dataclasses.dataclass(frozen=True)
class PutResult:
    """What a put did; chunks are counted."""

    written: int
    already_present: int
    nbytes: int  # of records written
    segment: str | None  # name of the new segment, None if none was needed


@dataclasses.dataclass(frozen=True, eq=False)
class GetResult:
    """The usable prefix and why it ends.

    Reasons: None (all there), "not_found", "tokens" (the key is held for other tokens),
    "checksum" (the bytes differ from those written), "damaged" (they cannot be read).
    """

    records: np.ndarray  # u8[num_hit * chunk_tokens, record_nbytes]
    num_hit: int  # leading chunks found, verified and returned
    reason: str | None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class SegmentReport:
    """A row of `verify`: status "ok" or as in `segment.Unusable`."""

    segment: str
    status: str
    num_chunks: int
    nbytes: int
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Counters since opening, and what is held now; chunks are counted."""

    num_segments: int
    num_chunks: int
    nbytes: int
    num_masked: int
    num_unusable_segments: int
    written: int
    already_present: int
    hits: int
    misses: dict[str, int]  # calls of get that fell short, by reason


class PageStore:
    """Chunks of one model id and format id under one root; make it with `open`."""

    def __init__(self, root: Path, facts: Facts, lock: durable.WriterLock | None):
        """Rebuild the index; `open` has checked root and facts and taken the lock."""
        self.root, self.facts = root, facts
        self._folder = root / facts.model_id / facts.format_id
        self._lock = lock
        self._putting = threading.Lock()
        self._counts = collections.Counter()
        self._misses = collections.Counter()
        self._index = index.rebuild(self._folder, facts)
        _refuse_other_format(self._index, facts)

    @classmethod
    def open(
        cls,
        root: str | Path,
        model_id: str,
        format_id: str,
        record_nbytes: int,
        chunk_tokens: int = 16,
        read_only: bool = False,
    ) -> "PageStore":
        """Open `root` for this model and format, making it if it is new.

        Args:
            root: the store's folder; a new one is made 0700.
            model_id: whose bytes (weights, tokenizer); safe as a file name.
            format_id: what the bytes mean; safe as a file name.
            record_nbytes: bytes of one token's record.
            chunk_tokens: tokens a chunk; belongs to the root.
            read_only: take no lock and make nothing.

        Raises:
            StoreLocked: another writer has the root open.
            FormatMismatch: the root holds another chunk or record size.
        """
        facts = Facts(model_id, format_id, int(chunk_tokens), int(record_nbytes))
        root_folder.check_facts(facts)
        root = Path(root).absolute()
        if read_only:
            root_folder.check(root, chunk_tokens)
            return cls(root, facts, None)
        lock = root_folder.take(root, chunk_tokens)
        try:
            durable.make_folder(root / model_id / format_id)
            return cls(root, facts, lock)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Give the writer's lock back; reading goes on working."""
        if self._lock:
            self._lock.release()

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
        self, keys: Sequence[PageKey], tokens: np.ndarray, records: np.ndarray
    ) -> PutResult:
        """Write the chunks that are not held yet; return once they are durable.

        Chunks that are held are compared and not written again; all new chunks of one
        call make one segment. Call with as many chunks as there are: a segment costs
        about 20 ms however small.

        Args:
            keys: n keys.
            tokens: i32[n, chunk_tokens] or flat.
            records: u8[n * chunk_tokens, record_nbytes], or the same with chunks first.

        Raises:
            Conflict: a key is held, or repeated, with other tokens or records. Nothing
                is written then. Records computed again need not have equal bits: put
                what lies beyond `contains`.
            FormatMismatch: shapes or dtypes that are not the store's.
        """
        keys, tokens = self._checked_request(keys, tokens)
        rows = self._checked_rows(len(keys), records)
        with self._putting:
            self._require_lock()
            new = self._new_rows(keys, tokens, rows)
            present = len(keys) - len(new)
            self._counts.update(written=len(new), already_present=present)
            if not new:
                return PutResult(0, present, 0, None)
            if present:
                keys, tokens, rows = [keys[i] for i in new], tokens[new], rows[new]
            folder = self._folder / self._next_name()
            sealed = segment.write(folder, self.facts, keys, tokens.copy(), rows)
            self._index.add(sealed)
        return PutResult(len(new), present, rows.nbytes, sealed.name)

    def get(self, keys: Sequence[PageKey], tokens: np.ndarray) -> GetResult:
        """Return the records of the leading chunks that are held and whole.

        Args:
            keys: n keys.
            tokens: i32[n, chunk_tokens] or flat; compared with those stored.
        """
        keys, tokens = self._checked_request(keys, tokens)
        places, reason, detail = self._find(keys, tokens)
        rows = np.empty((len(places), self.facts.row_nbytes), np.uint8)
        faults = self._read(places, rows)
        num_hit = min(faults, default=len(places))
        if faults:
            reason, detail = faults[num_hit]
            detail = f"{places[num_hit].segment.name}: {detail}"
        for i, (why, _) in faults.items():
            self._index.mask(keys[i], why)
        self._counts["hits"] += num_hit
        if reason:
            self._misses[reason] += 1
        records = rows[:num_hit].reshape(-1, self.facts.record_nbytes)
        return GetResult(records, num_hit, reason, detail)

    def contains(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are held; nothing is read or verified."""
        return self._index.prefix(keys)

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
        held = self._index
        return StoreStats(
            num_segments=len(held.segments),
            num_chunks=len(held.places),
            nbytes=len(held.places) * self.facts.row_nbytes,
            num_masked=len(held.masked),
            num_unusable_segments=len(held.unusable),
            written=self._counts["written"],
            already_present=self._counts["already_present"],
            hits=self._counts["hits"],
            misses=dict(self._misses),
        )

    def _find(self, keys, tokens) -> tuple[list[Place], str | None, str]:
        """Return the places of the leading keys held for these tokens, and the end."""
        places = []
        for key, asked in zip(keys, tokens, strict=True):
            place = self._index.places.get(key)
            if place is None:
                reason = self._index.masked.get(key, "not_found")
                return places, reason, f"chunk {len(places)} is not held"
            if place.tokens != asked.tobytes():
                return places, "tokens", f"chunk {len(places)} is of other tokens"
            places.append(place)
        return places, None, ""

    def _read(self, places, rows) -> dict[int, tuple[str, str]]:
        """Fill `rows`, segment by segment; return faults by position."""
        faults = {}
        for _, run in itertools.groupby(
            range(len(places)), key=lambda i: places[i].segment.name
        ):
            run = list(run)
            source = places[run[0]].segment
            numbers = [places[i].row for i in run]
            found = segment.read(source, numbers, rows[run[0] : run[-1] + 1])
            faults |= {i: fault for i, fault in zip(run, found, strict=True) if fault}
        return faults

    def _new_rows(self, keys, tokens, rows) -> list[int]:
        """Return the positions to write, or raise Conflict before anything is."""
        new, first = [], {}
        for i, key in enumerate(keys):
            place = self._index.places.get(key)
            if place is not None:
                held = place.tokens, place.checksum
            elif key in first:
                j = first[key]
                held = tokens[j].tobytes(), durable.digest(rows[j])
            else:
                first[key] = i
                new.append(i)
                continue
            if held != (tokens[i].tobytes(), durable.digest(rows[i])):
                raise Conflict(_conflict(i, key, held[0] == tokens[i].tobytes()))
        return new

    def _next_name(self) -> str:
        """Return a name never used before, in the order of writing."""
        last = max(map(index.number, index.names(self._folder)), default=0)
        return f"{last + 1:08d}-{secrets.token_hex(4)}"

    def _report(self, name: str) -> SegmentReport:
        found = segment.load(self._folder / name, self.facts)
        if isinstance(found, segment.Unusable):
            return SegmentReport(name, found.status, 0, 0, (found.detail,))
        problems = segment.inspect(found)
        status = "damaged" if problems else "ok"
        return SegmentReport(name, status, len(found.keys), found.nbytes, problems)

    def _require_lock(self) -> None:
        if not self.writable:
            raise StoreLocked(
                say(
                    f"put into {self.root}, opened read-only or closed",
                    "only the holder of the writer's lock writes",
                    "Open the store with read_only=False and put before close",
                )
            )

    def _checked_request(self, keys, tokens) -> tuple[list[PageKey], np.ndarray]:
        keys = [PageKey(key) for key in keys]
        tokens = token_array(tokens)
        shape = len(keys), self.facts.chunk_tokens
        if tokens.shape not in (shape, (shape[0] * shape[1],)):
            raise FormatMismatch(
                say(
                    f"tokens of shape {tokens.shape} for {len(keys)} keys",
                    f"a key stands for {shape[1]} tokens, so their shape is {shape}",
                    "Pass the tokens of full chunks, one key each",
                )
            )
        return keys, tokens.reshape(shape)

    def _checked_rows(self, num_chunks: int, records: np.ndarray) -> np.ndarray:
        chunk, record = self.facts.chunk_tokens, self.facts.record_nbytes
        shapes = (num_chunks * chunk, record), (num_chunks, chunk, record)
        if records.dtype != np.uint8 or records.shape not in shapes:
            raise FormatMismatch(
                say(
                    f"records {records.dtype}{list(records.shape)}",
                    f"{num_chunks} chunks of {chunk} tokens of {record} bytes are "
                    f"uint8{list(shapes[0])}",
                    "View the bytes as uint8, one record a token",
                )
            )
        return np.ascontiguousarray(records).reshape(num_chunks, chunk * record)


def _conflict(position: int, key: PageKey, same_tokens: bool) -> str:
    what = "records" if same_tokens else "tokens"
    return say(
        f"put of chunk {position} under {key!r}",
        f"the key is taken with other {what}, and a key names one content",
        "Put only what lies beyond contains(keys)"
        if same_tokens
        else "Make keys with chain_keys from the tokens that are put",
    )


def _refuse_other_format(held: index.Index, facts: Facts) -> None:
    """Raise if a segment under these very ids has records of another size."""
    for refused in held.unusable.values():
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
