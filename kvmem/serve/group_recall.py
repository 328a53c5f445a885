"""Between the pages of several groups and a store of parts: fetch, and keep.

What `recall` is for token records alone. A text goes on from the longest prefix that
every group has: all its tokens under full attention and index keys, the trailing ones
of windows, the state that stands exactly there. The law: all parts land before the
sequence runs, in pages that it alone holds, or none does and it computes as if the
store were not there; a state serves no text one token longer or shorter than itself.

    pool, fetched = recall.fetch(pool, sequence)    # tokens that need no prefill
    recall.keep(pool, sequence)                     # durable when it returns

What a window has given back, and states that the text has passed, are kept as far as
the prefix cache still has them. Groups behind those of the table are a draft's, in
pages of its own (`travel`).
"""

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike

import numpy as np

from kvmem import pool as pools
from kvmem.serve import landing
from kvmem.serve.group_records import GroupRecords
from kvmem.serve.identity import PLAIN, Identity
from kvmem.serve.page_table import PageTable
from kvmem.serve.recall import Fetched
from kvmem.serve.request import Sequence
from kvmem.serve.travel import Traveller
from kvmem.store import (
    PageKey,
    Part,
    PartedResult,
    PartedStore,
    PutResult,
    Rows,
    chain_keys,
)

__all__ = ["GroupRecall"]


class GroupRecall:
    """One store of parts seen from one engine.

    `fetch_s` and `keep_s` are seconds spent in it so far.
    """

    def __init__(self, store: PartedStore, records: GroupRecords, table: PageTable):
        self.store = store
        self.fetch_s = 0.0
        self.keep_s = 0.0
        self._records = records
        self._table = table
        self._page = table.page_size
        self._chunk = store.facts.chunk_tokens
        self._namespace = f"{store.facts.model_id}/{store.facts.format_id}"
        self._num_shared = len(table.lives)
        self._apart: Traveller | None = None

    def travel_with(self, drafts: Traveller) -> None:
        """Fetch and keep what a draft has in pages of its own, too."""
        self._apart = drafts if drafts.apart else None

    def fetch(self, pool: pools.Pool, sequence: Sequence) -> tuple[pools.Pool, Fetched]:
        """Donates `pool`. Let a sequence go on from what the store has of its text.

        At least one known token is left to compute. Where a draft has tokens that are
        found computed again, those are among what was found. Where there is no room for
        what windows read, or nothing that every part has, the sequence is as it was.
        """
        started = time.perf_counter()
        known, done = sequence.tokens[:-1], sequence.num_computed
        again = self._table.shelf.back_off
        keys = self.keys(known, sequence.identity)
        if len(keys) * self._chunk <= done + again:
            return pool, Fetched(0, 0, 0, "shorter than a chunk")
        of_draft = done if self._apart is None else self._apart.known(sequence)
        if of_draft is None:
            return pool, Fetched(0, 0, 0, "no room for what the draft keeps")
        first = min(done, of_draft) // self._chunk
        asked = np.asarray(known[: len(keys) * self._chunk], np.int32)
        found = self.store.get(keys, asked, first=first, page_tokens=self._page)
        length, fetched = found.num_hit * self._chunk, Fetched(0, 0, 0, found.reason)
        if length > done + again:
            if landing.prepare(self._table, sequence.held, length):
                pool = self._land(self._table.apply(pool), sequence, found)
                count = length - (done + again if done else 0)
                chunks = found.num_hit - first
                fetched = Fetched(count, chunks, found.nbytes, found.reason)
            else:
                fetched = Fetched(0, 0, 0, "no room for what windows read")
        self.fetch_s += time.perf_counter() - started
        return pool, fetched

    def keep(self, pool: pools.Pool, sequence: Sequence) -> PutResult:
        """Put what a later text may go on from; return once it is durable.

        Nothing is kept behind the last place where every part is at hand.
        """
        started = time.perf_counter()
        length = sequence.num_computed
        if self._apart is not None:
            length = min(length, self._apart.caught_up(sequence))
        whole = length // self._chunk
        tokens = np.asarray(sequence.tokens[: whole * self._chunk], np.int32)
        keys = self.keys(tokens, sequence.identity)
        held = {part.name: self.store.holds(part.name, keys) for part in self._parts}
        pages = self._pages(sequence)
        ends = self._ends(sequence, whole, held, pages)
        rows, length = {}, max(ends, default=0)
        for part in self._parts:
            wanted = {i for n in ends for i in part.needed(n, self._chunk)}
            missing = [i for i in sorted(wanted) if not held[part.name][i]]
            rows[part.name] = self._rows(pool, sequence, part, missing, pages)
        kept = self.store.put(keys[:length], tokens[: length * self._chunk], rows)
        self.keep_s += time.perf_counter() - started
        return kept

    def rows(
        self, pool: pools.Pool, sequence: Sequence, part: Part, ordinals: ListLike[int]
    ) -> Rows:
        """Return rows of a part as this sequence's own pages have them."""
        held, pages = sequence.held, {}
        for group in self._shared(part):
            columns = zip(held.ordinals(group), held.columns[group], strict=True)
            pages[group] = dict(columns)
            if part.is_state:
                (live,) = held.columns[group]
                pages[group] = {(i + 1) * self._chunk: live for i in ordinals}
        return self._rows(pool, sequence, part, ordinals, pages)

    def keys(
        self, tokens: list[int] | np.ndarray, identity: Identity = PLAIN
    ) -> tuple[PageKey, ...]:
        """Return the keys of the whole chunks of a text of this identity."""
        images = identity.run_extras(self._chunk)
        return chain_keys(self._namespace, tokens, self._chunk, identity.extras, images)

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self.store.parts

    def _land(
        self, pool: pools.Pool, sequence: Sequence, found: PartedResult
    ) -> pools.Pool:
        """Donates `pool`. Write what was found into pages that are there for it."""
        length = found.num_hit * self._chunk
        for part in self._parts:
            rows = found.rows[part.name]
            if part.is_state:
                for group, record in self._split(part, rows.rows[0]):
                    (live,) = sequence.held.columns[group]
                    pool = self._records.fill_state(pool, group, live, record)
                continue
            at_hand = np.arange(length) < sequence.num_computed
            for first, end, records in self._wanted(sequence, part, rows):
                pool = self._fill(pool, sequence, part, first, records)
                at_hand[first:end] = True
            if not self._is_whole(sequence.held.ordinals(part.groups[0]), at_hand):
                # A window's page that holds no more than is read here serves nobody
                # else: what this sequence computes on top of it is neither published
                # nor kept.
                sequence.is_mixed = True
        if self._apart is not None:
            self._land_apart(sequence, found)
        return pool

    def _land_apart(self, sequence: Sequence, found: PartedResult) -> None:
        """Write what was found of a draft's rows into the pages that it has."""
        base, *_ = self._parts
        for first, _, records in self._runs(base, found.rows[base.name]):
            for group, share in self._split(base, records):
                if group >= self._num_shared:
                    self._apart.fill(sequence, group - self._num_shared, first, share)
        self._apart.landed(sequence, found.num_hit * self._chunk)

    def _wanted(
        self, sequence: Sequence, part: Part, rows: Rows
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield runs of tokens [first, end) that pages are held for, and records."""
        held, done = sequence.held, sequence.num_computed
        for first, end, records in self._runs(part, rows):
            for low, high in self._inside(held.ordinals(part.groups[0])):
                low, high = max(low, first, done), min(high, end)
                if low < high:
                    yield low, high, records[low - first : high - first]

    def _fill(
        self,
        pool: pools.Pool,
        sequence: Sequence,
        part: Part,
        first: int,
        records: np.ndarray,
    ) -> pools.Pool:
        """Donates `pool`. Write a run of tokens of one part, group by group."""
        held = sequence.held
        for group, share in self._split(part, records):
            if group in self._shared(part):
                columns = zip(held.ordinals(group), held.columns[group], strict=True)
                pool = self._records.fill(pool, group, dict(columns), first, share)
        return pool

    def _is_whole(self, ordinals: Iterable[int], at_hand: np.ndarray) -> bool:
        """Say whether every page that is held has all of its tokens."""
        return all(
            at_hand[page * self._page : (page + 1) * self._page].all()
            for page in ordinals
        )

    def _ends(self, sequence: Sequence, whole: int, held, pages) -> list[int]:
        """Return after how many chunks a later text may go on: all parts are at hand.

        Where a state stands; without states at the end of the text and of its prompt.
        """
        prompt = (sequence.num_prompt - 1) // self._chunk
        ends = {whole, min(prompt, whole)}
        if any(part.is_state for part in self._parts):
            ends = set(range(whole + 1))
        others = self._parts[1:]
        return [
            n
            for n in sorted(ends - {0})
            if all(
                held[part.name][i] or self._has(part, i, pages)
                for part in others
                for i in part.needed(n, self._chunk)
            )
        ]

    def _pages(self, sequence: Sequence) -> dict[int, dict[int, int]]:
        """Return every page at hand of a text, by group and its place in the text.

        A state's place is the number of tokens it stands after.
        """
        shelf, held = self._table.shelf, sequence.held
        computed = sequence.tokens[: sequence.num_computed]
        identity = sequence.identity
        marks = identity.run_extras(self._page)
        units = shelf.cache.pages(computed, identity.extras, marks)
        found = {}
        for group, life in enumerate(self._table.lives):
            there = {}
            if group in shelf.others and units:
                at = np.flatnonzero(shelf.companions.has(group, units))
                cached = shelf.companions.pages(group, np.asarray(units)[at])
                there = dict(zip(at.tolist(), cached.tolist(), strict=True))
            if life.kind == "state":
                there = {(at + 1) * self._page: page for at, page in there.items()}
                there[sequence.num_computed] = held.columns[group][0]
            else:
                there |= zip(held.ordinals(group), held.columns[group], strict=True)
            found[group] = there
        return found

    def _has(self, part: Part, ordinal: int, pages) -> bool:
        """Say whether a row of a part can be read from the pages at hand."""
        first, end = ordinal * self._chunk, (ordinal + 1) * self._chunk
        if part.is_state:
            return all(end in pages[group] for group in part.groups)
        touched = range(first // self._page, -(-end // self._page))
        return all(page in pages[group] for group in part.groups for page in touched)

    def _rows(
        self,
        pool: pools.Pool,
        sequence: Sequence,
        part: Part,
        ordinals: ListLike[int],
        pages,
    ) -> Rows:
        """Return rows of a part out of pages, groups side by side."""
        out = np.empty((len(ordinals), part.row_nbytes(self._chunk)), np.uint8)
        if part.is_state:
            for row, ordinal in zip(out, ordinals, strict=True):
                at = (ordinal + 1) * self._chunk
                for group, record in self._split(part, row):
                    vpage = pages[group][at]
                    record[...] = self._records.state(pool, group, vpage)
            return Rows(tuple(ordinals), out)
        for first, end, block in self._runs(part, Rows(tuple(ordinals), out)):
            for group, records in self._split(part, block):
                if group >= self._num_shared:
                    number = group - self._num_shared
                    records[...] = self._apart.export(sequence, number, first, end)
                    continue
                records[...] = self._records.tokens(
                    pool, group, pages[group], first, end
                )
        return Rows(tuple(ordinals), out)

    def _shared(self, part: Part) -> list[int]:
        """Return the groups of a part that take pages of the engine's pool."""
        return [group for group in part.groups if group < self._num_shared]

    def _runs(self, part: Part, rows: Rows) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield tokens [first, end) of chunks that follow one another, and records."""
        at, start = rows.ordinals, 0
        for stop in range(1, len(at) + 1):
            if stop < len(at) and at[stop] == at[stop - 1] + 1:
                continue
            block = rows.rows[start:stop].reshape(-1, part.record_nbytes)
            yield at[start] * self._chunk, (at[stop - 1] + 1) * self._chunk, block
            start = stop

    def _inside(self, ordinals: list[int]) -> Iterator[tuple[int, int]]:
        """Yield tokens [first, end) of held pages that follow one another."""
        start = 0
        for stop in range(1, len(ordinals) + 1):
            if stop == len(ordinals) or ordinals[stop] != ordinals[stop - 1] + 1:
                yield (
                    ordinals[start] * self._page,
                    (ordinals[stop - 1] + 1) * self._page,
                )
                start = stop

    def _split(
        self, part: Part, records: np.ndarray
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each group's share of records that lie side by side."""
        start = 0
        for group, size in zip(part.groups, part.sizes, strict=True):
            yield group, records[..., start : start + size]
            start += size
