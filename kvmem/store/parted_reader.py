"""What one call asks of the parts of a store: the longest prefix that suits all.

The law: a row that is not held, cannot be read or is of other tokens is absent, and the
prefix shrinks until each part has every row that is read behind it. It ends, for each
turn takes a row away.

    asked = PartedReader(parts, stores, keys, tokens, first=0, deadline_s=None)
    num_hit, rows = asked.settle()
    asked.blame(num_hit)            # ("state: not_found", "the base has 6 chunks")
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from kvmem.geometry import hit_pages
from kvmem.store.page_key import PageKey
from kvmem.store.parts import BASE, Part, Rows
from kvmem.store.record_store import RecordStore


class PartedReader:
    """One call of get: what is held, what was read, what could not be."""

    def __init__(
        self,
        parts: Sequence[Part],
        stores: Mapping[str, RecordStore],
        keys: Sequence[PageKey],
        tokens: np.ndarray,
        first: int,
        deadline_s: float | None,
    ):
        """Look which keys are held; chunks before `first` are the caller's own."""
        self.parts, self.stores = parts, stores
        self.keys, self.tokens, self.first = keys, tokens, first
        self.chunk = tokens.shape[1]
        self.until = None if deadline_s is None else time.monotonic() + deadline_s
        self.held = {part.name: holds(stores[part.name], keys) for part in parts}
        for held in self.held.values():
            held[:first] = True
        self.why: dict[str, tuple[str, str]] = {}

    def settle(self) -> tuple[int, dict[str, Rows]]:
        """Read until every row that is needed is there; return the length and them."""
        base, *others = self.parts
        records = self.read(base, range(self.first, self.suits(self.parts)))
        while True:
            num_hit, rows = self.suits(self.parts), {}
            for part in others:
                needed = part.needed(num_hit, self.chunk)
                rows[part.name] = self.read(
                    part, [i for i in needed if i >= self.first]
                )
            if self.suits(self.parts) == num_hit:
                break
        count = max(0, num_hit - self.first)
        rows[base.name] = Rows(records.ordinals[:count], records.rows[:count])
        return num_hit, rows

    def suits(self, parts: Sequence[Part]) -> int:
        """Return the longest prefix that these parts could go on from."""
        held = [self.held[part.name] for part in parts]
        return hit_pages([part.life for part in parts], self.chunk, held)

    def read(self, part: Part, ordinals: Sequence[int]) -> Rows:
        """Read leading rows of those asked for; note the first that cannot be had."""
        at = list(ordinals)
        if not at:
            return Rows((), np.empty((0, part.row_nbytes(self.chunk)), np.uint8))
        wait = self.until and max(0.0, self.until - time.monotonic())
        found = self.stores[part.name].get(
            [self.keys[i] for i in at], self.tokens[at], wait
        )
        stored = found.records.reshape(
            found.num_hit, self.chunk * part.stored_nbytes(self.chunk)
        )
        rows = part.unpacked(at[: found.num_hit], stored, self.chunk)
        if len(rows.ordinals) < len(at):
            bad = at[len(rows.ordinals)]
            self.held[part.name][bad] = False
            reason = found.reason or "tokens"
            self.why[part.name] = reason, f"after chunk {bad}: {found.detail}"
        return rows

    def extended(self, part: Part, rows: Rows, page_tokens: int) -> Rows:
        """Return rows with those before them of the same page, if all are there."""
        at = list(rows.ordinals)
        start = at[-1] if at else 0
        while start - 1 in at:
            start -= 1
        page = start * self.chunk // page_tokens * page_tokens
        low = max(self.first, page // self.chunk)
        more = [i for i in range(low, start) if i not in at]
        if not more or not self.held[part.name][more].all():
            return rows
        found = self.read(part, more)
        if len(found.ordinals) < len(more):
            return rows
        split = at.index(start)
        return Rows(
            (*at[:split], *more, *at[split:]),
            np.concatenate([rows.rows[:split], found.rows, rows.rows[split:]]),
        )

    def blame(self, num_hit: int) -> tuple[str, str]:
        """Return which part ends a text after `num_hit` chunks, and why."""
        base, *others = self.parts
        whole = self.suits([base])
        if whole <= num_hit:
            reason, detail = self.why.get(base.name, (None, ""))
            if reason is None:
                at = slice(num_hit, num_hit + 1)
                said = self.stores[BASE].get(self.keys[at], self.tokens[at])
                reason, detail = said.reason or "not_found", said.detail
            return f"{BASE}: {reason}", detail
        short = [part for part in others if self.suits([part, base]) < whole]
        reason, detail = self.why.get(short[0].name, ("not_found", ""))
        named = ", ".join(part.name for part in short)
        return f"{named}: {reason}", detail or f"the base has {whole} chunks"


def holds(store: RecordStore, keys: Sequence[PageKey]) -> np.ndarray:
    """Return bool[n]: which keys a store holds; nothing is read or verified."""
    return np.array([store.contains([key]) > 0 for key in keys], bool)
