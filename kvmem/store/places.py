"""Where the records of each held key are: a segment and a row.

The law: a key costs two entries of a dict and no object of its own. 50,000 small tuples
are what Python's collector walks over again and again while a root is opened, which
takes a third of that time and grows faster than the root does; an int is nothing to it.
A `Place` is made when one is asked for.

    places = Places()
    places.add(segment)              # its rows replace earlier places of their keys
    places[key].row
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvmem.store.segment import Segment
from kvmem.store.sidecar import Key

_ROW_BITS = 32


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

    @property
    def parent(self) -> Key | None:
        """The key that the chunk continues, None if unknown."""
        return self.segment.parents[self.row]


class Places(Mapping[Key, Place]):
    """Places by key; mutable."""

    def __init__(self):
        """Hold nothing."""
        self.codes: dict[Key, int] = {}  # a segment's number here, and a row
        self._segments: dict[int, Segment] = {}
        self._numbers: dict[Segment, int] = {}
        self._given = 0

    def __getitem__(self, key: Key) -> Place:
        code = self.codes[key]
        row = code & ((1 << _ROW_BITS) - 1)
        return Place(self._segments[code >> _ROW_BITS], row)

    def __setitem__(self, key: Key, place: Place) -> None:
        self.codes[key] = self._first(place.segment) + place.row

    def __delitem__(self, key: Key) -> None:
        del self.codes[key]

    def __contains__(self, key: object) -> bool:
        return key in self.codes

    def __iter__(self) -> Iterator[Key]:
        return iter(self.codes)

    def __len__(self) -> int:
        return len(self.codes)

    def add(self, segment: Segment) -> None:
        """Take in all rows of a segment."""
        first = self._first(segment)
        rows = range(first, first + len(segment.keys))
        self.codes.update(zip(segment.keys, rows, strict=True))

    def forget(self, segment: Segment) -> None:
        """Let go of a segment that no key is in any more."""
        if segment in self._numbers:
            del self._segments[self._numbers.pop(segment)]

    def _first(self, segment: Segment) -> int:
        """Return the code of a segment's first row."""
        number = self._numbers.get(segment)
        if number is None:
            self._given += 1
            number = self._numbers[segment] = self._given
            self._segments[number] = segment
        return number << _ROW_BITS
