"""What drafting brought: counters of one engine.

The law: every step of a sequence that decodes emits one token of the target's own and
as many drafted ones as were accepted, so emitted = steps + accepted, less what a stop
cut off behind itself.

    engine.stats().drafting.tokens_per_step      # 1.0 where nothing was accepted
"""

import collections
import dataclasses
from collections.abc import Mapping

__all__ = ["DraftCounts", "DraftStats"]


@dataclasses.dataclass(frozen=True)
class DraftStats:
    """Counters since the engine began; a step is one sequence's part of a batch."""

    steps: int  # of sequences that decode, with drafted tokens or without
    drafted: int  # tokens proposed and verified
    accepted: int  # of them
    emitted: int  # tokens that those steps gave
    faults: Mapping[str, int]  # proposals that could not be made, by reason

    @property
    def tokens_per_step(self) -> float:
        """Tokens that the target gives for each of its steps."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def accept_rate(self) -> float:
        """What part of the drafted tokens was accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class DraftCounts:
    """The counters behind `DraftStats`."""

    def __init__(self):
        self._sums: collections.Counter[str] = collections.Counter()
        self._faults: collections.Counter[str] = collections.Counter()

    def step(self, drafted: int, emitted: int) -> None:
        """Count a sequence's step: what was drafted, and what came of it."""
        self._sums["steps"] += 1
        self._sums["drafted"] += drafted
        self._sums["accepted"] += emitted - 1
        self._sums["emitted"] += emitted

    def plain_steps(self, count: int) -> None:
        """Count steps of sequences for which nothing was drafted."""
        self._sums["steps"] += count
        self._sums["emitted"] += count

    def fault(self, reason: str) -> None:
        """Count a proposal that could not be made."""
        self._faults[reason] += 1

    def stats(self) -> DraftStats:
        """Return the counters."""
        names = ("steps", "drafted", "accepted", "emitted")
        sums = {name: self._sums[name] for name in names}
        return DraftStats(faults=dict(self._faults), **sums)
