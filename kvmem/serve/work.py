"""Work: what one step is to compute, sequence by sequence.

A row feeds tokens [start, start + count) of a sequence. Its first ones are the
sequence's own; behind the last of those may stand drafted tokens, which are fed like
the others and are part of the text only if they are accepted. The law: a row feeds at
least one token of its sequence's own.

    Row(sequence, start=7, count=1)                     # decode: the last token
    Row(sequence, start=7, count=4, drafts=(5, 9, 2))   # and three that are proposed
"""

from collections.abc import Sequence as ListLike
from typing import NamedTuple

from kvmem.serve.holding import Holding
from kvmem.serve.request import Sequence

__all__ = ["Admission", "Chains", "Feed", "Row", "Work"]


class Chains(NamedTuple):
    """Drafted tokens as `count` chains of equal length behind one text.

    They lie in consecutive slots from `first` on, chain behind chain.
    """

    first: int
    length: int
    count: int

    def layout(self, slots: range) -> tuple[list[int], list[int], list[int]]:
        """Return of each slot: its position in the text, and the gap it does not see.

        The gap is [first, begin of its own chain); of slots before `first`, empty.
        """
        positions, firsts, ends = [], [], []
        for slot in slots:
            chain, depth = divmod(slot - self.first, self.length)
            own = self.first + max(0, chain) * self.length
            positions.append(slot if slot < self.first else self.first + depth)
            firsts.append(self.first)
            ends.append(own)
        return positions, firsts, ends


class Feed(NamedTuple):
    """New tokens for the pages of one holding, behind `start` tokens in them.

    `chains` says where drafted ones among them stand, if not each behind the other.
    """

    tokens: ListLike[int]
    start: int
    held: Holding
    chains: Chains | None = None

    @property
    def end(self) -> int:
        """Tokens in the pages after the step."""
        return self.start + len(self.tokens)


class Row(NamedTuple):
    """Compute `count` tokens of one sequence from `start` on, drafted ones the last.

    Of a tree, the drafted tokens are `width` chains of equal length, one behind the
    other.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    width: int = 1

    @property
    def feed(self) -> Feed:
        """What a step reads."""
        sequence, own = self.sequence, self.start + self.count - len(self.drafts)
        tokens = sequence.tokens[self.start : own]
        if not self.drafts:
            return Feed(tokens, self.start, sequence.held)
        return Feed([*tokens, *self.drafts], self.start, sequence.held, self.chains)

    @property
    def chains(self) -> Chains | None:
        """How its drafted tokens stand; None: each behind the other."""
        if self.width == 1 or not self.drafts:
            return None
        first = self.start + self.count - len(self.drafts)
        return Chains(first, len(self.drafts) // self.width, self.width)


class Work(NamedTuple):
    """One step: a "prefill" chunk of one sequence, or a "decode" of several."""

    kind: str
    rows: tuple[Row, ...]

    @property
    def end(self) -> int:
        """Tokens of its longest sequence after the step."""
        return max(row.start + row.count for row in self.rows)

    @property
    def is_drafted(self) -> bool:
        """Say whether any row feeds tokens that are only proposed."""
        return any(row.drafts for row in self.rows)

    @property
    def plain(self) -> "Work":
        """The same step without the rows that feed drafted tokens."""
        if not self.is_drafted:
            return self
        return Work(self.kind, tuple(row for row in self.rows if not row.drafts))


class Admission(NamedTuple):
    """A sequence that begins to run, for the first time or again."""

    sequence: Sequence
    is_first: bool
