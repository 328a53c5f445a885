"""Archives: messages that a commit moved out of the live log, in order, for good.

The law: archives and live log together are messages 0 to clock - 1, none twice. The
live log's own first line says where it begins: what an archive holds from there on is
an intent of a commit that was cut off, and is finished by the next writer. So a kill at
any step of a commit loses nothing and doubles nothing.

    history/archive_000/{messages.jsonl, .meta.json}
"""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvmem.errors import CorruptPage, say
from kvmem.session import files, lines, log
from kvmem.session.identity import Identity
from kvmem.session.lines import Batch, Line, Log
from kvmem.session.place import HISTORY, LOG, META, Place

FORMAT = "kvmem.session.archive"
NEW = ".new-archive"
_PREFIX = "archive_"


class Archive(NamedTuple):
    """One archive's facts."""

    name: str
    first: int
    stop: int
    is_extracted: bool
    keys: dict[str, Batch]


_FIELDS = {"format", "version", *Identity._fields, *Archive._fields}


def listed(place: Place) -> list[Archive]:
    """Return the archives in order, an unfinished one included."""
    found = (facts(place, name) for name in _names(place))
    return sorted(found, key=lambda each: each.first)


def facts(place: Place, name: str) -> Archive:
    """Return what an archive's meta file says, or raise CorruptPage."""
    path = place.file(HISTORY) / name / META
    try:
        data = place.io.read(path)
        fields = json.loads(data)
        place.identity.check(fields, FORMAT)
        if not lines.is_right(data, fields, _FIELDS):
            raise ValueError("its crc is not that of its bytes")
        keys = {key: Batch(*each) for key, each in fields["keys"].items()}
        return Archive(
            name, fields["first"], fields["stop"], fields["is_extracted"], keys
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as bad:
        raise _damaged(place, name, f"its meta file cannot be read ({bad})") from bad


def read(place: Place, archive: Archive) -> Log:
    """Return an archive's messages, or raise CorruptPage."""
    try:
        data = place.io.read(place.file(HISTORY) / archive.name / LOG)
    except FileNotFoundError as bad:
        raise _damaged(place, archive.name, "its messages are missing") from bad
    found = lines.scan(data, place.identity)
    if found.torn or (found.start.messages, found.clock.messages) != archive[1:3]:
        raise _damaged(place, archive.name, f"it does not hold {archive[1:3]}")
    return found


def messages(place: Place, live: Log, since: int) -> Iterator[Line]:
    """Yield every line from message `since` on, archived ones first."""
    if since < live.start.messages:
        archives = listed(place)
        _check_gaps(place, live, archives, since)
        for each in archives:
            if each.first < live.start.messages and each.stop > since:
                yield from (li for li in read(place, each).lines if li.seq >= since)
    yield from (line for line in live.lines if line.seq >= since)


def batch_of(archives: Sequence[Archive], live: Log, key: str) -> Batch | None:
    """Return where the batch of a key stands, in the live log or an archive."""
    if key in live.keys:
        return live.keys[key]
    return next((each.keys[key] for each in archives if key in each.keys), None)


def write(place: Place, part: Log) -> str:
    """Make an archive of lines, durable whole or not there; return its name."""
    io, folder = place.io, place.file(HISTORY)
    files.make_folder(io, folder, place.folder)
    new, name = folder / NEW, _next_name(place)
    io.remove_tree(new)
    io.mkdir(new)
    data = lines.header(place.identity, part.start)
    fields = (part.start.messages, part.clock.messages, False, dict(part.keys))
    for file, content in (
        (LOG, data + b"".join(line.raw for line in part.lines)),
        (META, _encoded(place, Archive(name, *fields))),
    ):
        io.write(new / file, content)
        io.sync(new / file)
    io.sync_dir(new)
    io.rename_dir(new, folder / name)
    io.sync_dir(folder)
    return name


def mark_extracted(place: Place, name: str) -> None:
    """Note that an archive was handed to an extractor and what it found was kept."""
    done = facts(place, name)._replace(is_extracted=True)
    files.write(place.io, place.file(HISTORY) / name / META, _encoded(place, done))


def settle(place: Place, archive: Archive) -> None:
    """Make an archive's names durable, once a process."""
    known, name = place.known, f"{HISTORY}/{archive.name}"
    if name not in known:
        place.io.sync_dir(place.file(name))
        known[name] = b""


def finish(place: Place, live: Log, archives: Sequence[Archive]) -> Log:
    """Finish a commit that was cut off behind its archive; under the lock.

    Args:
        place: the session's.
        live: its log, mended.
        archives: as they are `listed`.

    Raises:
        CorruptPage: the archive is not what the live log begins with, or one is lost.
    """
    _check_gaps(place, live, archives)
    pending = [a for a in archives if a.first >= live.start.messages]
    if not pending:
        return live
    held = [li.raw for each in pending for li in read(place, each).lines]
    if held != [line.raw for line in live.lines[: len(held)]]:
        law = "the live log does not begin with its messages"
        raise _damaged(place, pending[0].name, law)
    place.io.sync_dir(place.file(HISTORY))  # who made it may have died before that
    return cut(place, live, len(held))


def cut(place: Place, live: Log, count: int) -> Log:
    """Take the first lines out of the live log; an archive holds them by now."""
    head = [line.stored for line in live.lines[:count]]
    log.rewrite(place, lines.advance(live.start, head), live.lines[count:])
    return log.read(place)


def rewrite(place: Place, archive: Archive, kept: Sequence[Line]) -> None:
    """Replace an archive's lines, one for one."""
    path = place.file(HISTORY) / archive.name / LOG
    start = read(place, archive).start
    data = lines.header(place.identity, start) + b"".join(line.raw for line in kept)
    files.write(place.io, path, data)


def _check_gaps(
    place: Place, live: Log, archives: Sequence[Archive], since: int = 0
) -> None:
    """Raise CorruptPage where no archive has messages that the live log has not."""
    stops = [*(each.first for each in archives), live.start.messages]
    starts = [0, *(each.stop for each in archives)]
    for start, stop in zip(starts, stops, strict=True):
        if max(start, since) < min(stop, live.start.messages):
            asked = f"the history of session {place.identity.session!r}"
            law = f"no archive holds messages {start} to {stop - 1}"
            cure = "Put the archive back from a copy; nothing was changed"
            raise CorruptPage(say(asked, law, cure))


def _names(place: Place) -> list[str]:
    names = place.io.names(place.file(HISTORY))
    return [name for name in names if name.startswith(_PREFIX)]


def _next_name(place: Place) -> str:
    numbers = [name.removeprefix(_PREFIX) for name in _names(place)]
    last = max((int(each) for each in numbers if each.isdecimal()), default=-1)
    return f"{_PREFIX}{last + 1:03d}"


def _encoded(place: Place, archive: Archive) -> bytes:
    fields = archive._asdict()
    return lines.seal(place.identity.head(FORMAT) | fields)


def _damaged(place: Place, name: str, law: str) -> CorruptPage:
    asked = f"{name} of session {place.identity.session!r}"
    return CorruptPage(say(asked, law, "Put it back from a copy; nothing was changed"))
