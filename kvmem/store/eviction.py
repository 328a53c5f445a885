"""What must go so that a segment fits: least recently used first, suffixes first.

The law: a chunk goes only after everything held that continues it, so what is left of
a conversation is always a prefix; a pinned chunk stays, and with it all that it
continues. Eviction alone frees nothing: a segment leaves the disk when none of its rows
is live, and one less than half live is rewritten. The plan counts both, and never lets
the disk hold more than the budget, not even while a segment is being rewritten.

    plan = make(index, need_nbytes, max_nbytes)     # plan.evict, plan.room_nbytes
"""

import collections
import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvmem.store.index import Index
from kvmem.store.page_key import PageKey
from kvmem.store.segment import Segment, estimate


class Plan(NamedTuple):
    """What to evict, in order, and the room that there is then."""

    evict: tuple[PageKey, ...]
    room_nbytes: int


def is_sparse(index: Index, segment: Segment) -> bool:
    """Say whether a segment is less than half live, and not dead."""
    return _is_sparse(segment, index.live[segment.name])


def ancestors(index: Index, keys: Iterable[PageKey]) -> set[PageKey]:
    """Return `keys` and all that they continue, as far as it is known."""
    found: set[PageKey] = set()
    for key in keys:
        while key is not None and key not in found:
            found.add(key)
            place = index.on_disk(key)
            key = place.parent if place else None
    return found


def make(
    index: Index,
    need_nbytes: int,
    max_nbytes: int,
    protect: Iterable[PageKey] = (),
) -> Plan:
    """Plan until `need_nbytes` fit; the plan says how much room it could make.

    Args:
        index: what is held; it is not changed.
        need_nbytes: of the files that are to be written.
        max_nbytes: the budget.
        protect: chunks to treat as pinned.
    """
    space = _Space(index, max_nbytes)
    evict: list[PageKey] = []
    room = space.room()
    protected = ancestors(index, [*index.pins, *protect])
    for key in _oldest_leaves(index, protected):
        if room >= need_nbytes:
            break
        evict.append(key)
        if space.let_go(index.on_disk(key).segment):
            room = space.room()
    return Plan(tuple(evict), room)


def _oldest_leaves(index: Index, protected: set[PageKey]) -> Iterator[PageKey]:
    """Yield chunks in the order of eviction, each after all that continue it.

    Chunks that go in circles have no such order, and come last.
    """
    children = collections.Counter(index.children)
    waiting = [key for key in [*index.places, *index.masked] if key not in protected]
    leaves = [(index.used_ns[key], key) for key in waiting if not children[key]]
    heapq.heapify(leaves)
    done = set()
    while leaves:
        _, key = heapq.heappop(leaves)
        done.add(key)
        yield key
        parent = index.on_disk(key).parent
        if parent is None:
            continue
        children[parent] -= 1
        if not children[parent] and parent in index.used_ns:
            if parent not in protected and parent not in done:
                heapq.heappush(leaves, (index.used_ns[parent], parent))
    circles = [(index.used_ns[key], key) for key in waiting if key not in done]
    yield from (key for _, key in sorted(circles))


class _Space:
    """The disk's bytes while a plan is made: who is live, what rewriting would free."""

    def __init__(self, index: Index, max_nbytes: int):
        self._max_nbytes = max_nbytes
        self._segments = index.segments
        self._live = dict(index.live)
        self._faulty = {mask.place.segment.name for mask in index.masked.values()}
        self._nbytes = sum(
            each.file_nbytes
            for name, each in index.segments.items()
            if self._live.get(name)
        )

    def let_go(self, segment: Segment) -> bool:
        """Count one row as dead; say whether that could have made room."""
        self._live[segment.name] -= 1
        live = self._live[segment.name]
        if not live:
            self._nbytes -= segment.file_nbytes
        return not live or _is_sparse(segment, live)

    def room(self) -> int:
        """Return the most room there is after rewriting sparse segments one by one."""
        room = self._max_nbytes - self._nbytes
        copies = sorted(
            (estimate(each.facts, self._live[name]), each.file_nbytes)
            for name, each in self._segments.items()
            if name not in self._faulty and _is_sparse(each, self._live.get(name, 0))
        )
        for copy_nbytes, file_nbytes in copies:
            if copy_nbytes <= room and copy_nbytes < file_nbytes:
                room += file_nbytes - copy_nbytes
        return room


def _is_sparse(segment: Segment, num_live: int) -> bool:
    return 0 < 2 * num_live < len(segment.keys)
