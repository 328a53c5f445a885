"""The index: which segment and row hold a key, kept in memory and rebuilt from disk.

The law: the index is derived. It has no file of its own; opening a store reads the
manifest and sidecar of every segment, never an array, and what they say is all there
is. Where two segments hold one key, the later one counts. A chunk found damaged is
masked, so that it can be written afresh, while its bytes stay on disk for whoever
repairs them.

    index = rebuild(folder, facts)
    index.prefix(keys)          # how many leading keys are held
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvmem.store import segment
from kvmem.store.page_key import PageKey
from kvmem.store.segment import Facts, Segment, Unusable

_NAME = re.compile(r"(\d{8,})-[0-9a-f]{8}")


class Place(NamedTuple):
    """Where a chunk's records are."""

    segment: Segment
    row: int

    @property
    def tokens(self) -> bytes:
        """The chunk's tokens, i32 bytes."""
        return self.segment.tokens[self.row].tobytes()

    @property
    def checksum(self) -> bytes:
        """The checksum of the chunk's records."""
        return self.segment.checksums[self.row]


@dataclasses.dataclass
class Index:
    """Places by key; mutable, one a store."""

    segments: dict[str, Segment] = dataclasses.field(default_factory=dict)
    unusable: dict[str, Unusable] = dataclasses.field(default_factory=dict)
    places: dict[PageKey, Place] = dataclasses.field(default_factory=dict)
    masked: dict[PageKey, str] = dataclasses.field(default_factory=dict)  # reason

    def prefix(self, keys: Iterable[PageKey]) -> int:
        """Return how many leading keys are held."""
        count = 0
        for key in keys:
            if key not in self.places:
                break
            count += 1
        return count

    def add(self, new: Segment) -> None:
        """Take in a segment; its chunks replace earlier places of the same keys."""
        self.segments[new.name] = new
        for row, key in enumerate(new.keys):
            self.places[key] = Place(new, row)
            self.masked.pop(key, None)

    def mask(self, key: PageKey, reason: str) -> None:
        """Stop serving a chunk that failed, and remember why."""
        if self.places.pop(key, None):
            self.masked[key] = reason


def rebuild(folder: Path, facts: Facts) -> Index:
    """Return the index of all sealed segments in `folder`, oldest first."""
    index = Index()
    extend(index, folder, facts)
    return index


def extend(index: Index, folder: Path, facts: Facts) -> int:
    """Take in segments that were sealed since; return how many."""
    added = 0
    for name in names(folder):
        if name in index.segments:
            continue
        match segment.load(folder / name, facts):
            case Segment() as found:
                index.add(found)
                index.unusable.pop(name, None)
                added += 1
            case Unusable() as refused:
                index.unusable[name] = refused
    return added


def names(folder: Path) -> Sequence[str]:
    """Return the names in a store folder in the order in which they were given."""
    if not folder.is_dir():
        return ()
    return sorted(
        (path.name for path in folder.iterdir()), key=lambda n: (number(n), n)
    )


def number(name: str) -> int:
    """Return a segment name's number, 0 for a name the store did not give."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0
