"""Prompt look-up: what followed the last tokens when they stood in the text before.

No model and no memory: the sequence's own tokens are searched for the latest earlier
place of their last n, the longest n first, and what followed there is proposed. It
costs next to nothing where a text repeats nothing, for then no token is drafted and the
target's step is the plain one. A sequence whose last proposal was wrong from its first
token needs a longer match for the next; one that was right in any may go by the
shortest again. Source: prompt lookup decoding (Saxena, 2023), which
transformers and vLLM have too.

    NGram(draft_tokens=4).start(engine).propose([sequence], [4])
"""

import dataclasses
from collections.abc import Sequence as ListLike
from typing import ClassVar

import numpy as np

from kvmem import errors, settings
from kvmem.geometry import LifecycleGroup
from kvmem.serve.draft.protocol import Forgetful, Proposal, Target
from kvmem.serve.request import Sequence

__all__ = ["NGram", "continuation"]


@dataclasses.dataclass(frozen=True)
class NGram:
    """Facts of a prompt look-up.

    Args:
        draft_tokens: tokens proposed for a sequence at most.
        min_match, max_match: how many last tokens are looked for, the most first.

    Raises:
        ConfigError: a count below one, or min_match above max_match.
    """

    draft_tokens: int = 4
    min_match: int = 1
    max_match: int = 3
    groups: ClassVar[tuple[LifecycleGroup, ...]] = ()

    def __post_init__(self):
        settings.require_positive(
            draft_tokens=self.draft_tokens, min_match=self.min_match
        )
        if self.min_match > self.max_match:
            raise errors.ConfigError(
                errors.say(
                    f"min_match = {self.min_match}, max_match = {self.max_match}",
                    "the longest match is looked for first, down to the shortest",
                    "Raise max_match, or lower min_match",
                )
            )

    def start(self, target: Target) -> "NGramProposer":
        """Return a proposer; it needs nothing of the target."""
        return NGramProposer(self)


class NGramProposer(Forgetful):
    """Looks into the tokens of each sequence."""

    def __init__(self, facts: NGram):
        self.num_drafted = facts.draft_tokens
        self._fewest, self._most = facts.min_match, facts.max_match
        self._needs: dict[Sequence, int] = {}  # tokens of a match, if not the fewest

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int]) -> Proposal:
        """Propose what followed the latest earlier place of the last tokens."""
        return Proposal(
            tuple(
                continuation(sequence.tokens, self._lengths(sequence), count)
                for sequence, count in zip(sequences, most, strict=True)
            )
        )

    def accepted(self, sequence: Sequence, count: int) -> None:
        """Ask more of the next match after a proposal that was wrong at once."""
        if count:
            self._needs.pop(sequence, None)
        else:
            needs = self._needs.get(sequence, self._fewest)
            self._needs[sequence] = min(needs + 1, self._most)

    def forget(self, sequence: Sequence) -> None:
        """Forget how it was guessed."""
        self._needs.pop(sequence, None)

    def _lengths(self, sequence: Sequence) -> range:
        """Return the lengths of matches to look for, the longest first."""
        return range(self._most, self._needs.get(sequence, self._fewest) - 1, -1)


def continuation(
    tokens: ListLike[int], lengths: ListLike[int], most: int
) -> tuple[int, ...]:
    """Return up to `most` tokens that followed the last n of a text, () if none did.

    The first n of `lengths` that stands anywhere before decides, and of its places the
    latest, so long as `most` tokens follow it; else the latest with the most tokens.
    """
    text = np.asarray(tokens, np.int64)
    for length in lengths:
        starts = _places(text, length)
        if not len(starts):
            continue
        follows = len(text) - starts - length
        whole = starts[follows >= most]
        start = whole[-1] if len(whole) else starts[0]
        return tuple(text[start + length : start + length + most].tolist())
    return ()


def _places(text: np.ndarray, length: int) -> np.ndarray:
    """Return where the last `length` tokens begin in the text, themselves excepted."""
    if len(text) <= length:
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
    return np.flatnonzero((windows == text[-length:]).all(axis=1))
