"""Companions: pages of other groups that go with a cached page of full attention.

The prefix tree holds one page a unit of text, that of full attention; the table beside
it says for the same unit which page a window, index keys or a state's snapshot has, or
that there is none. So a window's page may leave a cached text while the text stays. The
law: a companion is in the table only while its unit is in the tree.

A companion is spare once a longer text has moved past it: it serves only texts that
part from that one here, and may leave alone, those first that were passed longest ago.
What stands at the end of a text goes with the text.

    companions.put(1, units, vpages)
    companions.pass_by(1, units, now)  # a sequence has read on
    companions.take_out(units)         # {1: [vpage, ...]}
"""

from collections.abc import Sequence

import numpy as np

__all__ = ["Companions"]


class Companions:
    """The table of units x groups, and which of its pages are spare.

    Args:
        num_units: ids of units are below it.
        nulls: the null id of each group that has companions, by the group's number.
    """

    def __init__(self, num_units: int, nulls: dict[int, int]):
        self._nulls = nulls
        self._pages = {
            group: np.full(num_units, null, np.int32) for group, null in nulls.items()
        }
        # (group, unit) and when it was passed, the oldest first
        self.spares: dict[tuple[int, int], int] = {}

    def pages(self, group: int, units: Sequence[int]) -> np.ndarray:
        """Return i32[n]: a group's page of each unit, null where it has none."""
        return self._pages[group][np.asarray(units, np.int64)]

    def has(self, group: int, units: Sequence[int]) -> np.ndarray:
        """Return bool[n]: whether a group has its page of each unit."""
        return self.pages(group, units) != self._nulls[group]

    def units(self, group: int) -> np.ndarray:
        """Return every unit of which a group has a page, ascending."""
        return np.flatnonzero(self._pages[group] != self._nulls[group])

    def put(self, group: int, units: Sequence[int], vpages: Sequence[int]) -> None:
        """Let pages go with units that had none of this group."""
        self._pages[group][np.asarray(units, np.int64)] = vpages

    def drop(self, group: int, unit: int) -> int:
        """Take one page out and leave its unit; return the page."""
        vpage = int(self._pages[group][unit])
        self._pages[group][unit] = self._nulls[group]
        self.spares.pop((group, unit), None)
        return vpage

    def take_out(self, units: Sequence[int]) -> dict[int, list[int]]:
        """Take out what goes with units that leave the tree; return it by group."""
        return {
            group: [self.drop(group, unit) for unit in np.asarray(units)[has].tolist()]
            for group in self._pages
            if (has := self.has(group, units)).any()
        }

    def use(self, group: int, units: Sequence[int]) -> None:
        """Note that a text goes on from these pages: they are spare no more."""
        for unit in units:
            self.spares.pop((group, int(unit)), None)

    def pass_by(self, group: int, units: Sequence[int], now: int) -> None:
        """Note that a text has moved past these pages: spare, the newest of them."""
        for unit in units:
            self.spares.pop((group, int(unit)), None)
            self.spares[group, int(unit)] = now
