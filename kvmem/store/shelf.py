"""Where segments stand: what a store asks of a folder or of a bucket.

`FolderShelf` is a folder of segments on a disk, `BucketShelf` one of an object store.
The law: a shelf knows how a segment is written, read, taken away and found again, and
nothing of budgets, keys or what was asked for; so all that is true of a store is said
once, for both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvmem.store.index import Index
from kvmem.store.results import SegmentReport
from kvmem.store.rows import Fault
from kvmem.store.segment import Facts, Segment, Unusable
from kvmem.store.sidecar import Key


class Shelf(Protocol):
    """Segments of one model id and format id."""

    facts: Facts

    def look(self, held: Index) -> "Seen":
        """Return what stands there that `held` does not know, and what is gone."""

    def write(
        self,
        keys: Sequence[Key],
        tokens: np.ndarray,
        rows: np.ndarray,
        parents: Sequence[Key | None],
        checksums: Callable[[], Sequence[bytes]] | None,
        confirm: Callable[[], None],
        publish: Callable[[Segment], None],
    ) -> Segment:
        """Write a new segment, publish it once it is durable; else leave nothing.

        `confirm` is asked before anybody can find it; `look` sees it after `publish`.
        """

    def drop(self, segment: Segment) -> None:
        """Take a segment away; a crash leaves a whole one or a leftover."""

    def read(
        self, segment: Segment, rows: Sequence[int], out: np.ndarray, deadline: float
    ) -> list[Fault | None]:
        """Read rows into u8[n, row_nbytes] and verify them, as `rows.read` does."""

    def sweep(self, held: Index) -> tuple[str, ...]:
        """Take away what a dead writer left, and return its names."""

    def note_used(self, used_ns: Mapping[str, int]) -> None:
        """Let the next process know when segments were last asked for, if it can."""

    def explain(self, held: Index) -> tuple[str, str]:
        """Return a miss's reason and words about what is there instead."""

    def verify(self) -> tuple[SegmentReport, ...]:
        """Read everything and report every segment."""


class Seen(NamedTuple):
    """What a shelf found: segments that are new, and names that are gone."""

    new: Sequence[Segment | Unusable]
    gone: set[str]


def extend(held: Index, shelf: Shelf) -> int:
    """Take in segments sealed since, let go those that are gone; return how many new.

    New ones come first: a chunk that was moved into another segment is never missing.
    """
    seen = shelf.look(held)
    with held.lock:
        added = 0
        for found in seen.new:
            if isinstance(found, Unusable):
                held.unusable[found.name] = found
            elif found.name not in held.segments.keys() | held.leaving.keys():
                held.add(found)
                held.unusable.pop(found.name, None)
                added += 1
        for name in held.segments.keys() & seen.gone:
            held.remove(name)
        for name in held.unusable.keys() & seen.gone:
            del held.unusable[name]
    return added
