"""Two tiers as one store: RAM in front, a durable store behind.

    put   the store behind, then RAM: acknowledged, and only then there
    get   the leading chunks from RAM, the rest from behind, which RAM then keeps

The law: what a put did not acknowledge is not in RAM either, and an answer is the one
that the store behind would have given, only sooner. RAM forgets when it must and the
store behind goes on holding; where the store behind lost a chunk, RAM may still serve.

    store = TieredStore(HostTier(1 << 30, record_nbytes), PageStore.open(...))
"""

import collections
import dataclasses
import time
from collections.abc import Collection, Sequence

import numpy as np

from kvmem.errors import FormatMismatch, say
from kvmem.store import requests
from kvmem.store.host_tier import HostStats, HostTier
from kvmem.store.page_key import PageKey
from kvmem.store.record_store import RecordStats, RecordStore
from kvmem.store.results import Erased, GetResult, PutResult
from kvmem.store.segment import Facts


@dataclasses.dataclass(frozen=True)
class TieredStats:
    """Both tiers as one, and each by itself; chunks are counted."""

    num_chunks: int  # of the store behind
    nbytes: int
    written: int
    already_present: int
    hits: int
    misses: dict[str, int]  # calls of get that fell short of both tiers, by reason
    host: HostStats
    behind: RecordStats


class TieredStore:
    """A host tier over a store that keeps."""

    def __init__(self, host: HostTier, behind: RecordStore):
        """Join two tiers of equal chunks.

        Raises:
            FormatMismatch: chunks of different sizes.
        """
        sizes = [(t.facts.chunk_tokens, t.facts.record_nbytes) for t in (host, behind)]
        if sizes[0] != sizes[1]:
            raise FormatMismatch(
                say(
                    f"a host tier of {sizes[0][0]} tokens of {sizes[0][1]} bytes",
                    f"the store behind holds {sizes[1][0]} tokens of {sizes[1][1]} "
                    "bytes a chunk",
                    "Make both with the same chunk_tokens and record_nbytes",
                )
            )
        self.host, self.behind = host, behind
        self._hits = 0
        self._misses: collections.Counter[str] = collections.Counter()

    @property
    def facts(self) -> Facts:
        """Whose bytes are kept: what the store behind says."""
        return self.behind.facts

    @property
    def writable(self) -> bool:
        """Say whether the store behind takes a put."""
        return self.behind.writable

    def put(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        records: np.ndarray,
        parent: PageKey | None = None,
    ) -> PutResult:
        """Keep the chunks in both tiers; return when the store behind has them.

        Args:
            keys: n keys, each continuing the one before.
            tokens: i32[n, chunk_tokens] or flat.
            records: u8[n * chunk_tokens, record_nbytes], or the same with chunks first.
            parent: the key that the first one continues, None for a text's first chunk.

        Raises:
            Conflict, FormatMismatch, StoreLocked, OSError: as the store behind; RAM
                keeps none of the new chunks then.
        """
        keys, tokens = requests.checked_request(self.facts, keys, tokens)
        rows = requests.checked_rows(self.facts, len(keys), records)
        self.host.check(keys, tokens, rows)
        done = self.behind.put(keys, tokens, records, parent)
        kept = self.behind.contains(keys) if done.refused else len(keys)
        chunk = self.facts.chunk_tokens
        taken = rows[:kept].reshape(kept, chunk, self.facts.record_nbytes)
        self.host.put(keys[:kept], tokens[:kept], taken, parent)
        return done

    def get(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        deadline_s: float | None = None,
    ) -> GetResult:
        """Return the records of the leading chunks that either tier holds whole.

        Args:
            keys: n keys, each continuing the one before.
            tokens: i32[n, chunk_tokens] or flat; compared with those stored.
            deadline_s: seconds that the store behind may take.
        """
        started = time.monotonic()
        keys, tokens = requests.checked_request(self.facts, keys, tokens)
        near = self.host.get(keys, tokens)
        if near.reason is None:
            return self._answer(near)
        at = near.num_hit
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (time.monotonic() - started))
        far = self.behind.get(keys[at:], tokens[at:], deadline_s)
        end = at + far.num_hit
        self._promote(keys[:end], tokens[:end], far.records, at)
        if not at:
            return self._answer(far)
        records = near.records
        if far.num_hit:
            records = np.concatenate([near.records, far.records])
        detail = far.detail and f"behind {at} chunks in memory: {far.detail}"
        return self._answer(GetResult(records, end, far.reason, detail))

    def contains(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are held by one tier or the other."""
        count, grew = 0, True
        while grew and count < len(keys):
            grew = self.host.contains(keys[count:])
            grew += self.behind.contains(keys[count + grew :])
            count += grew
        return count

    def retain(self, keep: Collection[PageKey]) -> Erased:
        """Keep the chunks of these keys alone, in both tiers."""
        self.host.retain(keep)
        return self.behind.retain(keep)

    def stats(self) -> TieredStats:
        """Return counters and what is held."""
        host, behind = self.host.stats(), self.behind.stats()
        return TieredStats(
            num_chunks=behind.num_chunks,
            nbytes=behind.nbytes,
            written=behind.written,
            already_present=behind.already_present,
            hits=self._hits,
            misses=dict(self._misses),
            host=host,
            behind=behind,
        )

    def close(self) -> None:
        """Close both tiers."""
        self.host.close()
        self.behind.close()

    def _promote(self, keys, tokens, records: np.ndarray, at: int) -> None:
        """Let RAM take chunks `at` and on, read from behind; it may hold some of them.

        Those may have other bits: a damaged chunk may be computed and put again.
        """
        fresh = [i for i in range(at, len(keys)) if not self.host.contains([keys[i]])]
        if not fresh:
            return
        rows = records.reshape(len(keys) - at, -1, records.shape[1])
        if len(fresh) < len(rows):
            rows = rows[[i - at for i in fresh]]
        parent = keys[fresh[0] - 1] if fresh[0] else None
        self.host.put([keys[i] for i in fresh], tokens[fresh], rows, parent)

    def _answer(self, result: GetResult) -> GetResult:
        self._hits += result.num_hit
        if result.reason:
            self._misses[result.reason] += 1
        return result
