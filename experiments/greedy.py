"""Greedy continuations held against a reference's.

The law of equality, here and wherever greedy tokens are compared: equal, or the first
difference stands where the reference's best two logits are closer than `MARGIN`, which
rounding may decide either way. Of what follows a tie nothing is known. More than one
sequence in a hundred that differs elsewhere is a failure.

    judge([ours], [Continuation(ids, margins)]).ok
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["MARGIN", "Continuation", "Verdict", "judge"]

MARGIN = 1e-3
_ALLOWED = 0.01


class Continuation(NamedTuple):
    """What the reference generated, and how far ahead each token was."""

    ids: Sequence[int]
    margins: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Sequences that are equal, that differ first at a tie, and that really differ."""

    equal: int
    ties: int
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Say whether at most one sequence in a hundred really differs."""
        return len(self.differences) <= _ALLOWED * self.num_sequences

    @property
    def num_sequences(self) -> int:
        """Sequences that were compared."""
        return self.equal + self.ties + len(self.differences)

    def __str__(self) -> str:
        """Count the three kinds, and name each real difference."""
        said = f"{self.equal} of {self.num_sequences} equal, {self.ties} differ at a "
        said += f"tie (margin < {MARGIN}), {len(self.differences)} elsewhere"
        return "; ".join([said, *self.differences])


def judge(ours: Iterable[Sequence[int]], reference: Iterable[Continuation]) -> Verdict:
    """Compare sequence by sequence; lengths must be equal."""
    equal, ties, differences = 0, 0, []
    for number, (ids, known) in enumerate(zip(ours, reference, strict=True)):
        pairs = zip(ids, known.ids, strict=True)
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            equal += 1
        elif known.margins[first] < MARGIN:
            ties += 1
        else:
            differences.append(
                f"sequence {number} at {first}: {ids[first]} for {known.ids[first]}, "
                f"margin {known.margins[first]:.4f}"
            )
    return Verdict(equal, ties, tuple(differences))
