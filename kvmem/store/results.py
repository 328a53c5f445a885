"""What the stores answer: results of put, get, verify and gc, and their counters.

Chunks are counted everywhere; bytes say which bytes they are.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class PutResult:
    """What a put did; chunks are counted."""

    written: int
    already_present: int
    nbytes: int  # of records written
    segment: str | None  # name of the last new segment, None if none was needed
    refused: int = 0  # for which no room could be made; they are at the chain's end
    evicted: int = 0  # that made room


@dataclasses.dataclass(frozen=True, eq=False)
class GetResult:
    """The usable prefix and why it ends.

    Reasons: None (all there); "not_found"; "tokens" (the key is held for other tokens);
    "checksum" (the bytes differ from those written); "damaged" (they cannot be read);
    "deadline" (the disk did not answer in time); "unreachable" (it could not be asked
    now: both are asked for again after a minute, or after `refresh`); "evicted" (it was
    here); "format" and "model" (what is here was written in another
    format, or for another model).
    """

    records: np.ndarray  # u8[num_hit * chunk_tokens, record_nbytes]
    num_hit: int  # leading chunks found, verified and returned
    reason: str | None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class SegmentReport:
    """A row of `verify`: status "ok" or as in `segment.Unusable`."""

    segment: str
    status: str
    num_chunks: int
    nbytes: int
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GcReport:
    """What a `gc` did; names of segments."""

    swept: tuple[str, ...]  # leftovers of a dead writer
    dropped: tuple[str, ...]  # no live chunk was in them
    rewritten: tuple[str, ...]  # less than half live
    written: tuple[str, ...]  # where the live chunks are now
    kept: tuple[str, ...]  # to be rewritten, but a chunk could not be read
    freed_nbytes: int  # of files
    unread_nbytes: int = 0  # of files that cannot be read: they stay, and count


@dataclasses.dataclass(frozen=True)
class Erased:
    """What `retain` took away for good; chunks are counted."""

    num_chunks: int  # that were not named
    num_lost: int = 0  # named, and their bytes could not be carried over
    unread_nbytes: int = 0  # of files that cannot be read, and may hold anything


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Counters since opening, and what is held now; chunks are counted."""

    num_segments: int
    num_chunks: int
    nbytes: int
    num_masked: int
    num_unusable_segments: int
    written: int
    already_present: int
    hits: int
    misses: dict[str, int]  # calls of get that fell short, by reason
    file_nbytes: int = 0  # of all files of segments; the budget counts these and
    unread_nbytes: int = 0  # those of segments that cannot be read
    num_pinned: int = 0
    evicted: int = 0
    refused: int = 0
    in_flight: int = 0  # puts that are waiting or being written
