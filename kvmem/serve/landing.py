"""Landing: pages for records that come from elsewhere, not from a step.

A text that was computed here gives pages of its windows back as it grows. One whose
first `length` tokens are about to be read from a store jumps there: its windows must
hold what a query at `length` reads, whatever they held for its first step. The law: all
windows land or none does, and pages that are read on both sides of the jump stay.

    if landing.prepare(table, sequence.held, 704):
        pool = table.apply(pool)         # then fill tokens up to 704
"""

from kvmem.serve.holding import Holding
from kvmem.serve.page_table import PageTable

__all__ = ["prepare"]


def prepare(table: PageTable, held: Holding, length: int) -> bool:
    """Let windows hold what a query at `length` reads; say whether there was room.

    Pages behind `length`, for the first step, stay; fresh ones come zeroed.
    """
    windows = [g for g, life in enumerate(table.lives) if life.kind == "window"]
    wanted = {group: _wanted(table, held, group, length) for group in windows}
    counts = [0 for _ in table.lives]
    for group, ordinals in wanted.items():
        counts[group] = len(set(ordinals) - set(held.ordinals(group)))
    if not table.room.make(counts):
        return False
    for group, ordinals in wanted.items():
        fresh = iter(table.books.handout(group, counts[group]))
        there = dict(zip(held.ordinals(group), held.columns[group], strict=True))
        held.columns[group] = [
            there.pop(ordinal) if ordinal in there else next(fresh)
            for ordinal in ordinals
        ]
        table.books.release(group, tuple(there.values()))
        stale = table.lives[group].stale(length, table.page_size)
        held.firsts[group] = max(held.sinks[group], stale.stop)
    ends = [held.end(g) for g, life in enumerate(table.lives) if life.kind != "state"]
    held.room = min(ends) * table.page_size
    return True


def _wanted(table: PageTable, held: Holding, group: int, length: int) -> list[int]:
    """Return the pages of a text that a group is to hold, ascending."""
    stale = table.lives[group].stale(length, table.page_size)
    end = max(held.end(group), table.needs.pages_for(length))
    return [*range(stale.start), *range(stale.stop, end)]
