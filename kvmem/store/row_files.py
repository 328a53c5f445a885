"""How the rows of a segment are cut into arrays and files, on disk and in a bucket.

    records    u8[files * file bytes]    full files, one after another
    rest       u8[rest bytes]            the rows that fill no file, if there are any

The law: no byte is padding and no row is copied: an array is a view of the rows that
were put, and every row lies whole in one file. Arrays have one axis, so that a writer
can hand a file's bytes on as they lie in memory; a file holds as many rows as make
about FILE_NBYTES (each file costs a millisecond or two to make durable), and one where
a row alone is as large.

    per_file = rows_per_file(num_rows, row_nbytes)
    for part in cut(num_rows, per_file): rows[part.start : part.stop]
"""

from collections.abc import Iterator
from typing import NamedTuple

FILE_NBYTES = 4 << 20


class Part(NamedTuple):
    """One array: rows `start` up to `stop`, in files of `rows_per_file` each."""

    name: str
    start: int
    stop: int
    rows_per_file: int

    @property
    def num_files(self) -> int:
        """Files of the array."""
        return (self.stop - self.start) // self.rows_per_file

    def span(self, row: int, num_rows: int, row_nbytes: int) -> slice:
        """Return where in the array rows of it lie, as bytes."""
        at = (row - self.start) * row_nbytes
        return slice(at, at + num_rows * row_nbytes)

    def files(self) -> Iterator[tuple[str, int, int]]:
        """Yield each file's name below the segment's arrays, and its rows' bounds."""
        for i in range(self.num_files):
            first = self.start + i * self.rows_per_file
            yield f"{self.name}/c/{i}", first, first + self.rows_per_file


def rows_per_file(num_rows: int, row_nbytes: int) -> int:
    """Return how many rows make a file of about FILE_NBYTES, shared out evenly."""
    most = max(1, FILE_NBYTES // row_nbytes)
    num_files = -(-num_rows // most)
    return -(-num_rows // num_files)


def cut(num_rows: int, per_file: int) -> tuple[Part, ...]:
    """Return the arrays of so many rows, one or two, in the order of the rows."""
    rest = num_rows % per_file
    whole = num_rows - rest
    parts = Part("records", 0, whole, per_file), Part("rest", whole, num_rows, rest)
    return tuple(part for part in parts if part.start < part.stop)
