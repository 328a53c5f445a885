"""Room for drafted tokens: asked for at admission, taken for a step, given back after.

A step that verifies writes rows behind the text. The law: nobody is preempted for them,
since a draft is a guess: where pages run short, fewer tokens are drafted; and when the
step is over, every page that holds no accepted token has been given back.

A recurrent state cannot be cut, so a step that verifies works on a copy of it: the copy
is kept if all drafted tokens were accepted, else the state from before, and the
accepted tokens are read into it again.

    most = widen(table, held, length=33, most=4)   # pages for 4 more, or for fewer
    cut(table, held, length=35)                    # two were accepted
"""

from kvmem.prefix import Hit
from kvmem.serve.holding import Holding
from kvmem.serve.page_table import PageTable

__all__ = ["can_begin", "cut", "join", "part", "widen"]


def can_begin(table: PageTable, hit: Hit, length: int, step: int) -> bool:
    """Say whether a text that begins with `hit` may get room for `length` tokens."""
    counts = list(table.needs.peak(length, step))
    for group, life in enumerate(table.lives):
        if life.kind == "full":
            counts[group] -= len(hit.vpages)
        elif life.kind == "state":
            counts[group] += 1
    return table.room.can_make(counts, _keeping(table, hit))


def widen(table: PageTable, held: Holding, length: int, most: int) -> int:
    """Make room behind `length` tokens; say for how many more.

    Nobody who runs pays for it: pages are free ones, or such as the cache alone holds.

    Args:
        table, held: whose pages; `length` tokens have room in them.
        most: tokens wished for.
    """
    if most and table.has_states and not table.room.can_make(_states(table)):
        return 0
    while most and not table.extend(held, length + most):
        most = min(most - 1, max(0, held.room - length))
    return most


def cut(table: PageTable, held: Holding, length: int) -> None:
    """Give back the pages behind those of the first `length` tokens."""
    end = table.needs.pages_for(length)
    for group, life in enumerate(table.lives):
        if life.kind == "state":
            continue
        kept = held.within(group, end)
        gone = held.columns[group][len(kept) :]
        if gone:
            held.columns[group] = list(kept)
            table.books.release(group, tuple(reversed(gone)))
    held.room = min(held.room, end * table.page_size)


def part(table: PageTable, held: Holding) -> dict[int, int] | None:
    """Let a holding work on copies of its states; return the states from before.

    Returns:
        The state's page of each group that has one; None, and nothing has changed,
        where a copy has no room.
    """
    counts = _states(table)
    if not table.room.make(counts):
        return None
    before = {}
    for group, count in enumerate(counts):
        if count:
            before[group] = held.columns[group][0]
            held.columns[group] = table.books.fork(group, (before[group],), 0)
    return before


def join(table: PageTable, held: Holding, before: dict[int, int], is_kept: bool):
    """Keep the copies that `part` made, or the states from before; release the rest."""
    for group, state in before.items():
        copy = held.columns[group][0]
        held.columns[group] = [copy if is_kept else state]
        table.books.release(group, (state if is_kept else copy,))


def _states(table: PageTable) -> list[int]:
    return [int(life.kind == "state") for life in table.lives]


def _keeping(table: PageTable, hit: Hit) -> list[list[int]]:
    first = table.shelf.first
    units = [*hit.vpages, *([] if hit.copied is None else [hit.copied])]
    return [units if group == first else [] for group in range(len(table.lives))]
