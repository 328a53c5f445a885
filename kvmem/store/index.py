"""The index: which segment and row hold a key, kept in memory and rebuilt from disk.

The law: the index is derived. It has no file of its own; opening a store reads the
manifest and sidecar of every segment, never an array, and what they say is all there
is. Where two segments hold one key, the later one counts. A chunk found damaged is
masked, so that it can be written afresh, while its bytes stay where they are for
whoever repairs them; one that failed of what passes is masked for a while.

    index = Index()
    shelf.extend(index, FolderShelf(folder, facts))
    index.prefix(keys)          # how many leading keys are held

`lock` is held by whoever changes an index or walks over it, and never while the disk is
waited for.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from kvmem.store.places import Place, Places
from kvmem.store.segment import Segment, Unusable
from kvmem.store.sidecar import Key

_EVICTED_KEYS = 65_536  # remembered, so that a miss can say so
RETRY_S = 60.0  # a chunk whose failure passes is asked for again after this
_PASSING = ("deadline", "unreachable")


class Mask(NamedTuple):
    """Why a chunk on disk is not served, and until when (`time.monotonic`)."""

    reason: str
    place: Place
    until: float


@dataclasses.dataclass
class Index:
    """Places by key; mutable, one a store."""

    segments: dict[str, Segment] = dataclasses.field(default_factory=dict)
    unusable: dict[str, Unusable] = dataclasses.field(default_factory=dict)
    places: Places = dataclasses.field(default_factory=Places)
    masked: dict[Key, Mask] = dataclasses.field(default_factory=dict)
    evicted: dict[Key, None] = dataclasses.field(default_factory=dict)  # in order
    used_ns: dict[Key, int] = dataclasses.field(default_factory=dict)
    pins: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    children: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )  # held chunks that continue a key
    live: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )  # rows of a segment, by name, that a key still names
    touched_ns: dict[str, int] = dataclasses.field(default_factory=dict)  # by segment
    leaving: dict[str, None] = dataclasses.field(
        default_factory=dict
    )  # segments that this process drops or dropped, in order: none comes back
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    _now_ns: int = 0

    def prefix(self, keys: Iterable[Key]) -> int:
        """Return how many leading keys are held."""
        count, held = 0, self.places.codes
        for key in keys:
            if key not in held:
                if key not in self.masked or not self._unmask(key):
                    break
            count += 1
        return count

    def find(self, key: Key) -> Place | None:
        """Return the place of a key that is served."""
        place = self.places.get(key)
        if place is None and key in self.masked and self._unmask(key):
            return self.places.get(key)
        return place

    def on_disk(self, key: Key) -> Place | None:
        """Return the place of a key, served or masked."""
        if place := self.places.get(key):
            return place
        return self.masked[key].place if key in self.masked else None

    def why_not(self, key: Key) -> str | None:
        """Return why a key that was here once is not served; None if it never was."""
        if mask := self.masked.get(key):
            return mask.reason
        return "evicted" if key in self.evicted else None

    @property
    def file_nbytes(self) -> int:
        """Bytes of the files of all segments that are held."""
        return sum(each.file_nbytes for each in self.segments.values())

    @property
    def unread_nbytes(self) -> int:
        """Bytes of what is no segment of this store, and is never taken away."""
        return sum(each.file_nbytes for each in list(self.unusable.values()))

    def add(self, new: Segment, is_fresh: bool = False) -> None:
        """Take in a segment; its chunks replace earlier places of the same keys.

        A fresh one, written just now, is used last, whatever the clock says meanwhile.
        """
        above = dict(zip(new.keys, new.parents, strict=True))
        with self.lock:
            for key in above:
                if key in self.places.codes or key in self.masked:
                    self._let_go(key)
            at = new.used_ns
            if is_fresh and at <= self._now_ns:  # the clock has gone back
                at = self.touched_ns[new.name] = self._tick()
            self._now_ns = max(self._now_ns, at)
            self.segments[new.name] = new
            self.live[new.name] += len(above)
            self.places.add(new)
            for key in above.keys() & self.evicted.keys():
                del self.evicted[key]
            self.children.update(key for key in above.values() if key is not None)
            used_ns = dict.fromkeys(above, at)
            for key in above.keys() & self.used_ns.keys():
                used_ns[key] = self.used_ns[key]
            self.used_ns.update(used_ns)

    def mask(self, key: Key, reason: str, place: Place) -> None:
        """Stop serving a chunk that failed at `place`, and remember why."""
        with self.lock:
            if self.places.get(key) != place:
                return
            wait = RETRY_S if reason in _PASSING else float("inf")
            self.masked[key] = Mask(reason, place, time.monotonic() + wait)
            del self.places[key]

    def retry(self) -> None:
        """Serve again what is masked for a while only."""
        with self.lock:
            for key, mask in list(self.masked.items()):
                if mask.reason in _PASSING:
                    self.masked[key] = mask._replace(until=0.0)
                    self._unmask(key)

    def evict(self, key: Key) -> None:
        """Forget a chunk; its row is dead."""
        with self.lock:
            self._let_go(key)
            self.used_ns.pop(key, None)
            self.evicted[key] = None
            while len(self.evicted) > _EVICTED_KEYS:
                del self.evicted[next(iter(self.evicted))]

    def remove(self, name: str) -> None:
        """Forget a segment that is no longer on the disk, and what only it held."""
        with self.lock:
            gone = self.segments.pop(name)
            for row, key in enumerate(gone.keys):
                if self.on_disk(key) == Place(gone, row):
                    self.evict(key)
            self.places.forget(gone)
            self.live.pop(name, None)
            self.touched_ns.pop(name, None)

    def leave(self, name: str) -> None:
        """Forget a segment that is about to be dropped, so that no look finds it."""
        with self.lock:
            self.leaving[name] = None
            while len(self.leaving) > _EVICTED_KEYS:
                del self.leaving[next(iter(self.leaving))]
            self.remove(name)

    def touch(self, keys: Iterable[Key]) -> None:
        """Note that chunks were asked for, the first of them last."""
        with self.lock:
            for key in reversed(list(keys)):
                if place := self.on_disk(key):
                    self.used_ns[key] = self._tick()
                    self.touched_ns[place.segment.name] = self._now_ns

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep chunks, and all that they continue, from eviction; pins are counted."""
        with self.lock:
            self.pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Take one pin off each key, all of which have one."""
        with self.lock:
            self.pins.subtract(keys)
            for key in [key for key, count in self.pins.items() if not count]:
                del self.pins[key]

    def _let_go(self, key: Key) -> None:
        """Take a key off its place."""
        place = self.on_disk(key)
        if place is None:
            return
        self.places.codes.pop(key, None)
        self.masked.pop(key, None)
        self.live[place.segment.name] -= 1
        if place.parent is not None:
            self.children[place.parent] -= 1
            if not self.children[place.parent]:
                del self.children[place.parent]

    def _unmask(self, key: Key) -> bool:
        """Serve a chunk again whose mask has run out."""
        with self.lock:
            mask = self.masked.get(key)
            if mask is None or time.monotonic() < mask.until:
                return False
            self.places[key] = mask.place
            del self.masked[key]
            return True

    def _tick(self) -> int:
        self._now_ns = max(self._now_ns + 1, time.time_ns())
        return self._now_ns
