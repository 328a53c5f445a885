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

__all__ = ["Admission", "Feed", "Row", "Work"]


class Feed(NamedTuple):
    """New tokens for the pages of one holding, behind `start` tokens in them."""

    tokens: ListLike[int]
    start: int
    held: Holding

    @property
    def end(self) -> int:
        """Tokens in the pages after the step."""
        return self.start + len(self.tokens)


class Row(NamedTuple):
    """Compute `count` tokens of one sequence from `start` on, drafted ones the last."""

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def feed(self) -> Feed:
        """What a step reads."""
        own = self.start + self.count - len(self.drafts)
        tokens = (*self.sequence.tokens[self.start : own], *self.drafts)
        return Feed(tokens, self.start, self.sequence.held)


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


class Admission(NamedTuple):
    """A sequence that begins to run, for the first time or again."""

    sequence: Sequence
    is_first: bool
