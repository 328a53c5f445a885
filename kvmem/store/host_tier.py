"""The host tier: token records in RAM under the keys that they have on disk.

The law: the tier's records never take more than `max_nbytes`, and a chunk is served
only for its own tokens and with the bytes it was put with. Room for a new chunk is made
by forgetting the least recently used one that nothing held continues: suffixes go
before their prefixes, and pinned chunks stay, with all that they continue.

    tier = HostTier(1 << 30, record_nbytes=46_080, chunk_tokens=16)
    tier.put(keys, tokens, records)
    tier.get(keys, tokens).num_hit      # leading chunks, as `PageStore` answers

Keys of one call are taken to continue one another; `parent` names what the first one
continues, where a caller puts only what was missing.
"""

import collections
import dataclasses
import numbers
import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvmem.errors import ConfigError, say
from kvmem.store import durable, host_memory, requests
from kvmem.store.chains import Chains
from kvmem.store.host_memory import MemoryKind
from kvmem.store.page_key import PageKey
from kvmem.store.results import Erased, GetResult, PutResult
from kvmem.store.segment import Facts

_GONE_KEYS = 65_536  # remembered, so that a miss can say "evicted"


class _Chunk(NamedTuple):
    """Where a chunk is and what it must be."""

    slot: int
    tokens: bytes
    checksum: bytes


@dataclasses.dataclass(frozen=True)
class HostStats:
    """Counters since the tier was made, and what is held now; chunks are counted."""

    memory: MemoryKind
    max_nbytes: int
    num_chunks: int
    nbytes: int
    num_pinned: int
    written: int
    already_present: int
    evicted: int
    refused: int  # put while nothing could make room for them
    hits: int
    misses: dict[str, int]  # calls of get that fell short, by reason


class HostTier:
    """Chunks in RAM, least recently used suffixes forgotten first."""

    def __init__(
        self,
        max_nbytes: int,
        record_nbytes: int,
        chunk_tokens: int = 16,
        *,
        memory: MemoryKind = "pageable",
        model_id: str = "any-model",
        format_id: str = "any-format",
    ):
        """Reserve the memory.

        Args:
            max_nbytes: most bytes of records.
            record_nbytes: bytes of one token's record.
            chunk_tokens: tokens a chunk.
            memory: "pageable", or "pinned_host" where the backend has it; refused where
                it has not.
            model_id: whose bytes, for an engine that has no other store.
            format_id: what the bytes mean, likewise.

        Raises:
            ConfigError: `max_nbytes` does not hold a chunk, or no such memory.
        """
        sizes = (max_nbytes, record_nbytes, chunk_tokens)
        if not all(isinstance(n, numbers.Integral) for n in sizes) or min(sizes) < 1:
            raise ConfigError(_no_sizes(*sizes))
        self.facts = Facts(model_id, format_id, int(chunk_tokens), int(record_nbytes))
        self.max_nbytes = int(max_nbytes)
        num_slots = self.max_nbytes // self.facts.row_nbytes
        if num_slots < 1:
            raise ConfigError(_too_small(self.max_nbytes, self.facts))
        self._memory = host_memory.make(memory, num_slots, self.facts.row_nbytes)
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[PageKey, _Chunk] = {}
        self._gone: dict[PageKey, None] = {}  # evicted, in order
        self._chains = Chains()
        self._counts: collections.Counter[str] = collections.Counter()
        self._misses: collections.Counter[str] = collections.Counter()
        self._lock = threading.RLock()

    @property
    def writable(self) -> bool:
        """Say that `put` may be called."""
        return True

    def put(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        records: np.ndarray,
        parent: PageKey | None = None,
    ) -> PutResult:
        """Keep the chunks that are not held yet; where room ends, the leading ones.

        Args:
            keys: n keys, each continuing the one before.
            tokens: i32[n, chunk_tokens] or flat.
            records: u8[n * chunk_tokens, record_nbytes], or the same with chunks first.
            parent: the key that the first one continues, None for a text's first chunk.

        Raises:
            Conflict: a key is held, or repeated, with other tokens or records; nothing
                changes then.
            FormatMismatch: shapes or dtypes that are not the tier's.
        """
        keys, tokens = requests.checked_request(self.facts, keys, tokens)
        rows = requests.checked_rows(self.facts, len(keys), records)
        parent = requests.checked_parent(keys, parent)
        said = list(map(requests.said_of, tokens, rows))
        with self._lock:
            new = requests.new_positions(keys, said.__getitem__, self._said)
            before, written = self._counts["evicted"], 0
            for i in new:
                above = keys[i - 1] if i else parent
                if not self._take_in(keys[: i + 1], above, said[i], rows[i]):
                    break
                written += 1
            last = new[written] if written < len(new) else len(keys)
            leading = dict.fromkeys(keys[:last])  # a prefix may push its suffix out
            self._chains.touch([key for key in leading if key in self._held])
            evicted = self._counts["evicted"] - before
            done = PutResult(
                written,
                len(keys) - len(new),
                written * self.facts.row_nbytes,
                None,
                refused=len(new) - written,
                evicted=evicted,
            )
            for name in ("written", "already_present", "refused"):
                self._counts[name] += getattr(done, name)
        return done

    def check(
        self, keys: Sequence[PageKey], tokens: np.ndarray, rows: np.ndarray
    ) -> None:
        """Raise Conflict where `put` would; i32[n, chunk_tokens], u8[n, row_nbytes]."""
        with self._lock:
            requests.new_positions(
                keys, lambda i: requests.said_of(tokens[i], rows[i]), self._said
            )

    def get(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        deadline_s: float | None = None,
    ) -> GetResult:
        """Return the records of the leading chunks that are held and whole.

        A chunk whose bytes changed in memory is forgotten. RAM makes nobody wait, so
        every deadline is met.
        """
        keys, tokens = requests.checked_request(self.facts, keys, tokens)
        with self._lock:
            found, reason, detail = self._find(keys, tokens)
            rows = np.empty((len(found), self.facts.row_nbytes), np.uint8)
            self._memory.read([chunk.slot for chunk in found], rows)
            num_hit = 0
            for row, chunk in zip(rows, found, strict=True):
                if durable.digest(row) != chunk.checksum:
                    reason = "checksum"
                    detail = f"chunk {num_hit}: its bytes in memory changed"
                    self._forget(keys[num_hit])
                    break
                num_hit += 1
            self._chains.touch(keys[:num_hit])
            self._counts["hits"] += num_hit
            if reason:
                self._misses[reason] += 1
        records = rows[:num_hit].reshape(-1, self.facts.record_nbytes)
        return GetResult(records, num_hit, reason, detail)

    def contains(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are held; changes nothing."""
        with self._lock:
            for count, key in enumerate(keys):
                if key not in self._held:
                    return count
        return len(keys)

    def pin(self, keys: Sequence[PageKey]) -> int:
        """Keep the leading chunks that are held until `unpin`; return how many."""
        with self._lock:
            count = self.contains(keys)
            self._chains.pin(keys[:count])
        return count

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Undo one `pin` of each key; InvalidId if one has no pin left."""
        with self._lock:
            self._chains.unpin(keys)

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Forget those of `keys` that are held, pinned or not."""
        with self._lock:
            for key in keys:
                if key in self._held:
                    self._forget(key)

    def retain(self, keep: Collection[PageKey]) -> Erased:
        """Keep the chunks of these keys alone, pinned or not."""
        wanted = frozenset(keep)
        with self._lock:
            gone = [key for key in self._held if key not in wanted]
            self.drop(gone)
        return Erased(len(gone))

    def stats(self) -> HostStats:
        """Return counters and what is held."""
        counted = ("written", "already_present", "evicted", "refused", "hits")
        with self._lock:
            return HostStats(
                memory=self._memory.kind,
                max_nbytes=self.max_nbytes,
                num_chunks=len(self._held),
                nbytes=len(self._held) * self.facts.row_nbytes,
                num_pinned=self._chains.num_pinned,
                misses=dict(self._misses),
                **{name: self._counts[name] for name in counted},
            )

    def close(self) -> None:
        """Forget every chunk."""
        with self._lock:
            self.drop(list(self._held))

    def _find(self, keys, tokens) -> tuple[list[_Chunk], str | None, str]:
        """Return the leading chunks held for these tokens, and why they end."""
        found = []
        for key, asked in zip(keys, tokens, strict=True):
            chunk = self._held.get(key)
            if chunk is None:
                reason = "evicted" if key in self._gone else "not_found"
                return found, reason, f"chunk {len(found)} is not in memory"
            if chunk.tokens != asked.tobytes():
                return found, "tokens", f"chunk {len(found)} is of other tokens"
            found.append(chunk)
        return found, None, ""

    def _said(self, key: PageKey) -> requests.Said | None:
        chunk = self._held.get(key)
        return (chunk.tokens, chunk.checksum) if chunk else None

    def _take_in(self, chain, parent, said, row) -> bool:
        """Hold a chain's last chunk, making room for it; say whether there was any."""
        key = chain[-1]
        self._chains.add(key, parent)  # first, so that its parent is not the one to go
        try:
            if not self._free and not self._evict_one(chain):
                self._chains.forget(key)
                return False
            self._memory.write(self._free[-1], row)
        except BaseException:
            self._chains.forget(key)
            raise
        self._held[key] = _Chunk(self._free.pop(), *said)
        self._gone.pop(key, None)
        return True

    def _evict_one(self, but: Sequence[PageKey]) -> bool:
        """Free a slot by forgetting a chunk, none of `but`; say whether one may go."""
        victim = self._chains.oldest(frozenset(but))
        if victim is None:
            return False
        self._forget(victim)
        self._gone[victim] = None
        if len(self._gone) > _GONE_KEYS:
            del self._gone[next(iter(self._gone))]
        self._counts["evicted"] += 1
        return True

    def _forget(self, key: PageKey) -> None:
        chunk = self._held.pop(key)
        self._chains.forget(key)
        self._memory.free(chunk.slot)
        self._free.append(chunk.slot)


def _no_sizes(max_nbytes, record_nbytes, chunk_tokens) -> str:
    return say(
        f"a host tier of max_nbytes={max_nbytes!r}, record_nbytes={record_nbytes!r}, "
        f"chunk_tokens={chunk_tokens!r}",
        "sizes are whole numbers above 0",
        "Give bytes and tokens as integers",
    )


def _too_small(max_nbytes: int, facts: Facts) -> str:
    return say(
        f"a host tier of {max_nbytes:,} B",
        f"one chunk of {facts.chunk_tokens} tokens takes {facts.row_nbytes:,} B",
        f"Give at least {facts.row_nbytes:,} B",
    )
