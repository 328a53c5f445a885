"""The log's file: read whole, appended durably, its torn end repaired.

The law: `append` returns when the batch is on the disk, and a log it could not append
to is as long as before. What a cut-off write left is kept in `messages.torn-<n>` before
it is cut from the log. All but `read` is done under the session's lock.

    log = read(place)
    log, repair = mended(place, log)
    log = append(place, log, lines.batch(...))
"""

import contextlib
import logging
from typing import NamedTuple

import xxhash

from kvmem.session import files, lines
from kvmem.session.lines import Log
from kvmem.session.place import LOG, Place

TORN = "messages.torn-"
_MAX_KNOWN_LOGS = 256
_logger = logging.getLogger("kvmem.session")


class Repair(NamedTuple):
    """What was cut from a log's end, and where it is kept."""

    kept: str  # a file in the session's folder
    nbytes: int


def read(place: Place) -> Log:
    """Return what the log holds now.

    A log that was read before is parsed only where it is longer; every byte is
    compared by digest all the same, so that no damage stays unseen.

    Raises:
        FileNotFoundError: there is no log.
        CorruptPage: it is damaged, not only torn at its end.
        FormatMismatch: it is not this session's, or of another version.
    """
    path = place.file(LOG)
    data = place.io.read(path)
    known = place.logs.get(path)
    if (
        known is not None
        and xxhash.xxh3_128_digest(data[: known.nbytes]) == known.digest
    ):
        if len(data) == known.nbytes:
            return known
        log = lines.extend(known._replace(torn=b""), data, place.identity)
    else:
        log = lines.scan(data, place.identity)
    _know(place, log)
    return log


def mended(place: Place, log: Log) -> tuple[Log, Repair | None]:
    """Cut what is torn from the log's end and keep it aside."""
    if not log.torn:
        return log, None
    kept = next_name(place, TORN)
    files.write(place.io, place.file(kept), log.torn)
    _cut(place, log)
    _logger.warning(
        "session %r: %d bytes of a write that was cut off are kept in %s",
        place.identity.session,
        len(log.torn),
        kept,
    )
    return log._replace(torn=b""), Repair(kept, len(log.torn))


def append(place: Place, log: Log, data: bytes) -> Log:
    """Write lines behind a mended log and return it when they are durable."""
    path = place.file(LOG)
    try:
        place.io.append(path, data)
        place.io.sync(path)
    except OSError:
        with contextlib.suppress(OSError):  # else the next append mends it
            _cut(place, log)
        raise
    new = read(place)
    place.known[LOG] = new.digest
    return new


def rewrite(place: Place, start: lines.Clock, kept: tuple[lines.Line, ...]) -> None:
    """Replace the log by one that begins at `start` with the lines that are kept."""
    data = lines.header(place.identity, start) + b"".join(line.raw for line in kept)
    place.logs.pop(place.file(LOG), None)  # what was known may be forgotten now
    files.write(place.io, place.file(LOG), data)


def next_name(place: Place, prefix: str) -> str:
    """Return a name in the session's folder that no file has, numbered from 0."""
    numbers = [
        int(name.removeprefix(prefix))
        for name in place.io.names(place.folder)
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    ]
    return f"{prefix}{max(numbers, default=-1) + 1}"


def _cut(place: Place, log: Log) -> None:
    """Cut the file behind what is right, durably: bytes of two writes never mix."""
    place.io.truncate(place.file(LOG), log.nbytes)
    place.io.sync(place.file(LOG))


def _know(place: Place, log: Log) -> None:
    if len(place.logs) >= _MAX_KNOWN_LOGS:
        place.logs.clear()
    place.logs[place.file(LOG)] = log._replace(torn=b"") if log.torn else log
