"""What an engine asks of a store of token records, whatever keeps them.

`PageStore` (disk), `HostTier` (RAM), `TieredStore` (RAM over another store) and
`ObjectStore` (S3) all speak it. The law: a chunk is served only for the very tokens it
was put with and with the very bytes; else the answer is a miss that says why.

    def keep(store: RecordStore, keys, tokens, records):
        if store.writable and store.contains(keys) < len(keys):
            store.put(keys, tokens, records)
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from kvmem.store.page_key import PageKey
from kvmem.store.results import Erased, GetResult, PutResult
from kvmem.store.segment import Facts


class RecordStats(Protocol):
    """Counters since opening, and what is held now; chunks are counted."""

    num_chunks: int
    nbytes: int
    written: int
    already_present: int
    hits: int
    misses: Mapping[str, int]


class RecordStore(Protocol):
    """Chunks of one model id and format id under chained keys."""

    @property
    def facts(self) -> Facts:
        """Whose bytes are kept, and how they are cut."""

    @property
    def writable(self) -> bool:
        """Say whether `put` may be called."""

    def put(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        records: np.ndarray,
        parent: PageKey | None = None,
    ) -> PutResult:
        """Keep the chunks that are not held yet; return once they are as safe as here.

        Each key continues the one before, and `parent` is what the first continues.

        Raises:
            Conflict: a key is held with other tokens or records; nothing is kept then.
        """

    def get(
        self,
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        deadline_s: float | None = None,
    ) -> GetResult:
        """Return the records of the leading chunks that are held and whole."""

    def contains(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are held; changes nothing."""

    def retain(self, keep: Collection[PageKey]) -> Erased:
        """Keep the chunks of these keys alone; the bytes of others are gone then."""

    def stats(self) -> RecordStats:
        """Return counters and what is held."""

    def close(self) -> None:
        """Give back what the store holds of the machine."""
