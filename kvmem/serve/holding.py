"""A holding: the pages of one sequence in every group, column by column.

The columns are those that a step sees (`pool.GroupTable`): all pages under full
attention; the pages of sink tokens and then those from `firsts[g]` on of a window; the
one live state of a recurrent group. The law: column k + i of a group with k sink pages
is page firsts[g] + i of its sequence, and no page behind the last column is held.

    holding.end(group)           # pages from the beginning of the text to the last
    holding.column_of(group, 7)  # where page 7 stands
"""

from collections.abc import Sequence

from kvmem import errors

__all__ = ["Holding"]


class Holding:
    """Virtual pages of one sequence; mutable, changed by its `PageTable` alone.

    `peaks` are the columns of each group that it holds at most on its way through the
    `known` tokens, `in_chunks` or token by token. `snapshot` is the unit where its last
    snapshot of a state stands, and whether it moves along with the text (else it stays
    where texts are likely to part); `older` is the one before, where that is kept.
    """

    __slots__ = ("columns", "firsts", "in_chunks", "known", "peaks")
    __slots__ += ("older", "room", "sinks", "snapshot")

    def __init__(self, sinks: Sequence[int]):
        self.sinks = tuple(sinks)  # pages kept for sink tokens, of each group
        self.columns: list[list[int]] = [[] for _ in sinks]
        self.firsts = list(sinks)
        self.known, self.in_chunks = 0, False
        self.peaks = (0,) * len(self.sinks)
        self.room = 0  # tokens that fit the pages held, in every group
        self.snapshot: tuple[int, bool] | None = None
        self.older: tuple[int, bool] | None = None

    def end(self, group: int) -> int:
        """Return how many pages of the text end where the last column does."""
        return len(self.columns[group]) + self.firsts[group] - self.sinks[group]

    def ordinals(self, group: int) -> list[int]:
        """Return which page of the text each column is."""
        sinks, columns = self.sinks[group], len(self.columns[group])
        behind = range(self.firsts[group], self.firsts[group] + columns - sinks)
        return [*range(min(sinks, columns)), *behind]

    def within(self, group: int, end: int) -> list[int]:
        """Return the pages that end with page `end` of the text, or before; a state."""
        columns = self.columns[group]
        beyond = self.end(group) - end
        return columns if beyond <= 0 else columns[: max(0, len(columns) - beyond)]

    def require_length(self, length: int, known: int) -> None:
        """Refuse to cut a text of `known` tokens at a length that it does not reach.

        Raises:
            ConfigError: `length` is below zero, or beyond the text or its pages.
        """
        most = min(known, self.room)
        if not 0 <= length <= most:
            raise errors.ConfigError(
                errors.say(
                    f"a text cut to {length:,} tokens",
                    f"{known:,} are known and {most:,} of them have pages",
                    f"Cut it to a length from 0 to {most:,}",
                )
            )
