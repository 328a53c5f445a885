"""Between the engine's pages and the page store: fetch before a prefill, keep after.

Token records are what crosses, so a sequence written on one topology is fetched on any
other. The law: what is fetched is a prefix of the sequence's own tokens, compared and
verified by the store, and it lands in pages that this sequence alone holds; any doubt
shortens it.

    pool, fetched = recall.fetch(pool, sequence)    # tokens that need no prefill
    recall.keep(pool, sequence)                     # durable when it returns
"""

import dataclasses
import time
from typing import NamedTuple

import numpy as np

from kvmem import canonical, transfer
from kvmem import pool as pools
from kvmem.serve.identity import PLAIN, Identity
from kvmem.serve.request import Sequence
from kvmem.store import PageKey, PutResult, RecordStore, chain_keys

__all__ = ["Fetched", "Recall", "Records"]

_GROUP = 0
_THREADS = 2


class Records:
    """A sequence's pages as token records, out of a pool and into it."""

    def __init__(self, plan: canonical.CopyPlan, ledger: pools.Ledger):
        self.plan = plan
        self._ledger = ledger

    def export(
        self,
        pool: pools.Pool,
        sequence: Sequence,
        first: int = 0,
        end: int | None = None,
    ) -> np.ndarray:
        """Return u8[tokens, record] of computed tokens [first, end)."""
        end = sequence.num_computed if end is None else end
        return transfer.export_records(
            pool.pages,
            self._ledger.translate(_GROUP, sequence.vpages),
            self.plan,
            num_tokens=end - first,
            first_token=first,
            threads=_THREADS,
        )

    def fill(
        self, pool: pools.Pool, sequence: Sequence, records: np.ndarray
    ) -> pools.Pool:
        """Donates `pool`. Write the records of the tokens that come next."""
        pages = transfer.import_records(
            pool.pages,
            self._ledger.translate(_GROUP, sequence.vpages),
            records,
            self.plan,
            first_token=sequence.num_computed,
            threads=_THREADS,
        )
        return dataclasses.replace(pool, pages=pages)


class Fetched(NamedTuple):
    """What the store answered for one sequence; `reason` says why it ends there."""

    num_tokens: int
    num_chunks: int
    nbytes: int
    reason: str | None


class Recall:
    """One store seen from one engine.

    `fetch_s` and `keep_s` are seconds spent in it so far.
    """

    def __init__(self, store: RecordStore, records: Records):
        self.store = store
        self.fetch_s = 0.0
        self.keep_s = 0.0
        self._records = records
        self._chunk = store.facts.chunk_tokens
        self._namespace = f"{store.facts.model_id}/{store.facts.format_id}"

    def fetch(self, pool: pools.Pool, sequence: Sequence) -> tuple[pools.Pool, Fetched]:
        """Donates `pool`. Fill a sequence's pages beyond what it has computed.

        At least one known token is left to compute. The sequence's pages must be handed
        out on the device, and those from `num_computed` on be its own.
        """
        started = time.perf_counter()
        known = sequence.tokens[: len(sequence.tokens) - 1]
        first = sequence.num_computed // self._chunk
        keys = self.keys(known, sequence.identity)[first:]
        if not keys:
            return pool, Fetched(0, 0, 0, "shorter than a chunk")
        asked = known[first * self._chunk : (first + len(keys)) * self._chunk]
        found = self.store.get(keys, np.asarray(asked, np.int32))
        records = found.records[sequence.num_computed - first * self._chunk :]
        if len(records):
            pool = self._records.fill(pool, sequence, records)
        self.fetch_s += time.perf_counter() - started
        return pool, Fetched(len(records), found.num_hit, records.nbytes, found.reason)

    def keep(self, pool: pools.Pool, sequence: Sequence) -> PutResult:
        """Put a sequence's whole computed chunks; return once they are durable."""
        started = time.perf_counter()
        whole = sequence.num_computed // self._chunk * self._chunk
        tokens = np.asarray(sequence.tokens[:whole], np.int32)
        keys = self.keys(tokens, sequence.identity)
        # Computed again, a held chunk need not have equal bits: only what is missing.
        missing = [at for at, key in enumerate(keys) if not self.store.contains([key])]
        first = missing[0] if missing else len(keys)
        records = self._records.export(pool, sequence, first * self._chunk, whole)
        by_chunk = records.reshape(len(keys) - first, self._chunk, records.shape[1])
        kept = self.store.put(
            [keys[at] for at in missing],
            tokens.reshape(len(keys), self._chunk)[missing],
            by_chunk[[at - first for at in missing]],
            parent=keys[first - 1] if missing and first else None,
        )
        self.keep_s += time.perf_counter() - started
        return kept

    def keys(
        self, tokens: list[int] | np.ndarray, identity: Identity = PLAIN
    ) -> tuple[PageKey, ...]:
        """Return the keys of the whole chunks of a text of this identity."""
        images = identity.run_extras(self._chunk)
        return chain_keys(self._namespace, tokens, self._chunk, identity.extras, images)
