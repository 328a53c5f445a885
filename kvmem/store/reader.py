"""The reader: what a get does, whoever writes.

The law: a chunk is served only if its key is held, its tokens equal those asked for and
its bytes have the checksum they were written with; the answer is the leading chunks of
which that is true, and why they end. A chunk that failed is masked, never deleted; one
that another process moved meanwhile is looked for once more.

    found = Reader(index, shelf).get(keys, tokens, deadline)      # GetResult
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from kvmem.store.index import Index
from kvmem.store.places import Place
from kvmem.store.results import GetResult
from kvmem.store.rows import Fault
from kvmem.store.shelf import Shelf
from kvmem.store.sidecar import Key


class Reader:
    """An index, and the shelf that its places are on."""

    def __init__(self, held: Index, shelf: Shelf):
        """Read what `held` says from `shelf`."""
        self._index, self._shelf, self.facts = held, shelf, shelf.facts

    def get(
        self,
        keys: Sequence[Key],
        tokens: np.ndarray,
        deadline: Callable[[], float],
        refresh: Callable[[], int],
        is_patient: bool = True,
    ) -> GetResult:
        """Find, read and verify.

        Args:
            keys: n keys.
            tokens: i32[n, chunk_tokens].
            deadline: returns when a read that begins now must have come.
            refresh: takes in what other processes wrote; returns how many segments.
            is_patient: whether a chunk that missed the deadline was given time at all.
        """
        found = self._get(keys, tokens, deadline(), is_patient)
        if found.reason == "evicted" and refresh():
            # Rewritten elsewhere, perhaps: what this index says is out of date.
            found = self._get(keys, tokens, deadline(), is_patient)
        return found

    def _get(self, keys, tokens, deadline: float, is_patient: bool) -> GetResult:
        places, reason, detail = self._find(keys, tokens)
        out = np.empty((len(places), self.facts.row_nbytes), np.uint8)
        faults = self._read(places, out, deadline)
        num_hit = min(faults, default=len(places))
        if faults:
            reason, detail = faults[num_hit]
            detail = f"{places[num_hit].segment.name}: {detail}"
        for i, fault in faults.items():
            if is_patient or fault.reason != "deadline":
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

    def _absent(self, key: Key, position: int) -> tuple[str, str]:
        """Return why a key is not held, as well as the shelf can tell."""
        detail = f"chunk {position} is not held"
        if reason := self._index.why_not(key):
            return reason, detail
        reason, other = self._shelf.explain(self._index)
        return reason, detail + other

    def _read(self, places, out, deadline: float) -> dict[int, Fault]:
        """Fill `out`, segment by segment; return faults by position."""
        faults = {}
        for _, run in itertools.groupby(
            range(len(places)), key=lambda i: places[i].segment.name
        ):
            run = list(run)
            source = places[run[0]].segment
            numbers = [places[i].row for i in run]
            part = out[run[0] : run[-1] + 1]
            found = self._shelf.read(source, numbers, part, deadline)
            faults |= {i: fault for i, fault in zip(run, found, strict=True) if fault}
        return faults
