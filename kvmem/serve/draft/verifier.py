"""Verification: drafted tokens beside the work of a step, and what follows of it.

A decode step is widened by what the proposer proposes; the target computes all of it at
once and chooses a token for each place. The law: drafted tokens stand as far as each
equals the choice before it, so what is emitted is what plain steps would emit; and when
a step is settled, pages, states and counts are those that the emitted tokens alone
would have left.

    work = verifier.widen(work)               # rows of 1 to k + 1 tokens
    again = verifier.again(settled)           # tokens to be read into states again
    verifier.settle(settled)                  # books; then, on the device:
    pool = verifier.wipe(pool)
"""

from collections.abc import Sequence as ListLike
from typing import NamedTuple

from kvmem import pool as pools
from kvmem.serve.draft import room
from kvmem.serve.draft.counts import DraftCounts
from kvmem.serve.draft.protocol import Proposer
from kvmem.serve.draft.rejection import Proposed
from kvmem.serve.draft.trees import Mover
from kvmem.serve.draft.wipe import Wiper
from kvmem.serve.request import Sequence
from kvmem.serve.scheduler import Scheduler
from kvmem.serve.work import Row, Work
from kvmem.speculative.capacity import proposable

__all__ = ["Settled", "Verifier"]


class Settled(NamedTuple):
    """A drafted row, and how many tokens it gave, which are its sequence's by now."""

    row: Row
    num_emitted: int


class Verifier:
    """One proposer on one engine.

    Args:
        proposer: who drafts.
        scheduler: whose sequences; its table's pages take the drafted rows.
        wiper: zeroes what rejected rows wrote.
        mover: puts accepted rows of a tree behind each other.
        capacity: tokens of the longest row of a table.
    """

    def __init__(
        self,
        proposer: Proposer,
        scheduler: Scheduler,
        wiper: Wiper,
        mover: Mover | None,
        capacity: int,
    ):
        self.proposer = proposer
        self._mover, self._capacity = mover, capacity
        self.counts = DraftCounts()
        self.proposed: Proposed | None = None  # what the last proposal was drawn from
        self._scheduler, self._table, self._wiper = scheduler, scheduler.table, wiper
        self._before: dict[Sequence, dict[int, int]] = {}  # states before the step
        self._dirty: list[tuple[int, int, int]] = []  # group, vpage, slots that stay

    def widen(self, work: Work) -> Work:
        """Put proposed tokens behind the rows of a decode step, where there is room."""
        if work.kind != "decode":
            return work
        most = [self._most(row.sequence) for row in work.rows]
        if self.proposer.needs_room:
            most = [
                self._reserve(row.sequence, count)
                for row, count in zip(work.rows, most, strict=True)
            ]
        asking = [at for at, count in enumerate(most) if count]
        self.proposed = None
        if not asking:
            return work
        proposal = self.proposer.propose(
            [work.rows[at].sequence for at in asking], [most[at] for at in asking]
        )
        if proposal.probs is not None:
            whose = {work.rows[at].sequence: row for row, at in enumerate(asking)}
            self.proposed = Proposed(proposal.probs, whose)
        for reason in proposal.faults.values():
            self.counts.fault(reason)
        rows = list(work.rows)
        for at, tokens in zip(asking, proposal.tokens, strict=True):
            rows[at] = self._widened(rows[at], tokens[: most[at]], most[at])
        return Work(work.kind, tuple(rows))

    def again(self, settled: ListLike[Settled]) -> Work | None:
        """Go back to the states before the step where drafted tokens were rejected.

        Returns:
            The accepted tokens, to be read into those states again; None: nothing.
        """
        rows = []
        for row, num_emitted in settled:
            before = self._before.pop(row.sequence, {})
            is_whole = num_emitted == row.count
            room.join(self._table, row.sequence.held, before, is_kept=is_whole)
            if before and not is_whole:
                rows.append(Row(row.sequence, row.start, num_emitted))
        return Work("decode", tuple(rows)) if rows else None

    def move(self, pool: pools.Pool, settled: ListLike[Settled]) -> pools.Pool:
        """Donates `pool`. Put the accepted rows of a later chain into the slots of the
        first, which are those behind the text."""
        moves = []
        for row, num_emitted in settled:
            at = self._chain_of(row)
            if row.chains is None or at == 0:
                continue
            first, length, _ = row.chains
            moves += [
                (*self._slot(row, first + at * length + step), *self._slot(row, to))
                for step, to in enumerate(range(first, first + num_emitted - 1))
            ]
        return self._mover(pool, 0, moves) if moves else pool

    def settle(self, settled: ListLike[Settled]) -> None:
        """Count what was emitted, and give back the pages without an accepted token."""
        for row, num_emitted in settled:
            sequence = row.sequence
            self.counts.step(len(row.drafts), num_emitted)
            self._scheduler.take(sequence, num_emitted)
            self._cut(sequence.held, sequence.num_computed, row.start + row.count)
            self.proposer.accepted(sequence, num_emitted - 1)

    def wipe(self, pool: pools.Pool) -> pools.Pool:
        """Donates `pool`. Zero what the rejected rows of settled steps wrote."""
        dirty, self._dirty = self._dirty, []
        for group in sorted({group for group, _, _ in dirty}):
            vpages = [vpage for of, vpage, _ in dirty if of == group]
            kept = [slots for of, _, slots in dirty if of == group]
            pool = self._wiper(pool, group, vpages, kept)
        return pool

    def _most(self, sequence: Sequence) -> int:
        """Return how many drafted tokens could stand behind a sequence's own.

        None behind the first token of a text, which its samples part from; none that
        would be the last, for that is never fed; and where states are kept for reuse,
        none beyond the end of the page, where the next is due.
        """
        if not sequence.output_ids:
            return 0
        length, width = len(sequence.tokens), self.proposer.width
        drafted, longest = self.proposer.num_drafted, sequence.max_length
        most = proposable(drafted, length, longest=longest, width=width)
        most = min(most, (self._capacity - length) // width * width)
        if self._table.has_states and self._scheduler.prefix_cache:
            most = min(most, -len(sequence.tokens) % self._table.page_size)
        return max(0, most)

    def _reserve(self, sequence: Sequence, most: int) -> int:
        """Make room for up to `most` tokens more, of whole levels; say for how many."""
        found = room.widen(self._table, sequence.held, len(sequence.tokens), most)
        return found - found % self.proposer.width

    def _widened(self, row: Row, tokens: tuple[int, ...], most: int) -> Row:
        """Return the row with as many of the tokens as find room.

        Args:
            most: tokens that were asked for.
        """
        sequence, held = row.sequence, row.sequence.held
        count = self._reserve(sequence, len(tokens))
        if count and self._table.has_states:
            before = room.part(self._table, held)
            count = 0 if before is None else count
            if before is not None:
                self._before[sequence] = before
        length = len(sequence.tokens) + count
        written = len(sequence.tokens) + most if self.proposer.needs_room else length
        if count < len(tokens) or written > length:
            self._cut(held, length, written)
        drafts, width = tuple(tokens[:count]), self.proposer.width
        return row._replace(count=row.count + count, drafts=drafts, width=width)

    def _chain_of(self, row: Row) -> int:
        """Return which of a row's chains the token behind its own one begins."""
        if row.chains is None:
            return 0
        first, length, _ = row.chains
        begins = row.drafts[::length]
        token = row.sequence.tokens[first]
        return begins.index(token) if token in begins else 0

    def _slot(self, row: Row, place: int) -> tuple[int, int]:
        ordinal, slot = divmod(place, self._table.page_size)
        return row.sequence.held.columns[0][ordinal], slot

    def _cut(self, held, length: int, written: int) -> None:
        """Give back whole pages of rejected rows; note the one that holds others."""
        room.cut(self._table, held, length)
        kept = length % self._table.page_size
        if written == length or not kept:
            return
        for group, life in enumerate(self._table.lives):
            if life.kind != "state":
                last = held.within(group, self._table.needs.pages_for(length))[-1]
                self._dirty.append((group, last, kept))
