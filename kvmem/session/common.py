"""What two histories have in common: the longest row of marks that both hold in order.

The law: as many as can be are matched, and of equal ways the one whose places in the
new history are first. A row of the table of lengths is one integer, a bit for each
mark of the old history, so that a history of thousands takes milliseconds (Hyyrö,
"Bit-parallel LCS-length computation revisited", 2004).

    matched("abc", "xbcb")  # {1, 2}
"""

from collections.abc import Hashable, Sequence


def matched(old: Sequence[Hashable], new: Sequence[Hashable]) -> set[int]:
    """Return the places in `new` of a longest common subsequence."""
    where: dict[Hashable, int] = {}
    for at, each in enumerate(old):
        where[each] = where.get(each, 0) | 1 << at
    everything = (1 << len(old)) - 1
    rows, row = [], everything  # of a row, a bit is 0 where one more is common
    for each in new:
        both = row & where.get(each, 0)
        row = ((row + both) | (row - both)) & everything
        rows.append(row)
    return _traced(rows, old, new)


def _traced(rows: Sequence[int], old: Sequence, new: Sequence) -> set[int]:
    """Walk the table back from its end; drop what is new where that costs nothing."""

    def length(at: int, mine: int) -> int:
        row = rows[at - 1] if at else -1
        return mine - (row & (1 << mine) - 1).bit_count()

    found, at, mine = set(), len(new), len(old)
    while at and mine:
        if length(at, mine) == length(at - 1, mine):
            at -= 1
        elif old[mine - 1] == new[at - 1]:
            at, mine = at - 1, mine - 1
            found.add(at)
        else:
            mine -= 1
    return found
