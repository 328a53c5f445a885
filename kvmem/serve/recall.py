"""Between the engine's pages and the page store: fetch before a prefill, keep after.

Records are what crosses: a sequence written on one topology is fetched on any other.
The
law: what is fetched is a prefix of the sequence's own tokens, compared and verified by
the store, and it lands in pages that this sequence alone holds; any doubt shortens it.

    pool, fetched = recall.fetch(pool, sequence)    # tokens that need no prefill
    recall.keep(pool, sequence)                     # durable when it returns
"""

import dataclasses

import numpy as np

from kvmem import canonical, transfer
from kvmem import pool as pools
from kvmem.serve.request import Sequence
from kvmem.store import PageStore, PutResult, chain_keys

__all__ = ["Fetched", "Recall"]

_THREADS = 2


@dataclasses.dataclass(frozen=True)
class Fetched:
    """What the store answered for one sequence; `reason` says why it ends there."""

    num_tokens: int
    num_chunks: int
    nbytes: int
    reason: str | None


class Recall:
    """One store seen from one engine: its plan, its chunks, its namespace."""

    def __init__(
        self, store: PageStore, plan: canonical.CopyPlan, ledger: pools.Ledger
    ):
        self.store = store
        self.plan = plan
        self._ledger = ledger
        self._chunk = store.facts.chunk_tokens
        self._namespace = f"{store.facts.model_id}/{store.facts.format_id}"

    def fetch(self, pool: pools.Pool, sequence: Sequence) -> tuple[pools.Pool, Fetched]:
        """Donates `pool`. Fill a sequence's pages beyond what it has computed.

        At least one known token is left to compute. The sequence's pages must be handed
        out on the device, and those from `num_computed` on be its own.
        """
        known = sequence.tokens[: len(sequence.tokens) - 1]
        first = sequence.num_computed // self._chunk
        keys = chain_keys(self._namespace, known, self._chunk)[first:]
        if not keys:
            return pool, Fetched(0, 0, 0, "shorter than a chunk")
        asked = known[first * self._chunk : (first + len(keys)) * self._chunk]
        found = self.store.get(keys, np.asarray(asked, np.int32))
        records = found.records[sequence.num_computed - first * self._chunk :]
        if len(records) == 0:
            return pool, Fetched(0, found.num_hit, 0, found.reason)
        pages = transfer.import_records(
            pool.pages,
            self._physical(sequence),
            records,
            self.plan,
            first_token=sequence.num_computed,
            threads=_THREADS,
        )
        fetched = Fetched(len(records), found.num_hit, records.nbytes, found.reason)
        return dataclasses.replace(pool, pages=pages), fetched

    def keep(self, pool: pools.Pool, sequence: Sequence) -> PutResult:
        """Put a sequence's whole computed chunks; return once they are durable."""
        whole = sequence.num_computed // self._chunk * self._chunk
        tokens = np.asarray(sequence.tokens[:whole], np.int32)
        keys = chain_keys(self._namespace, tokens, self._chunk)
        held = self.store.contains(keys)
        first = held * self._chunk
        records = transfer.export_records(
            pool.pages,
            self._physical(sequence),
            self.plan,
            num_tokens=whole - first,
            first_token=first,
            threads=_THREADS,
        )
        return self.store.put(keys[held:], tokens[first:], records)

    def _physical(self, sequence: Sequence) -> np.ndarray:
        return self._ledger.translate(0, sequence.vpages)
