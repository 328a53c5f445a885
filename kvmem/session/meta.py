"""`.meta.json`: counters for people and tools; advice, never an authority.

The law: nothing acknowledged depends on it. It is written after the log and may lag
behind it or be missing; what cannot be read counts as missing and is written anew.
Under OpenViking's rules alone its total is the session's clock.
"""

import datetime
import json
import logging
from collections.abc import Mapping

from kvmem.session import files
from kvmem.session.lines import Log
from kvmem.session.place import META, Place

FORMAT = "kvmem.session.meta"
_logger = logging.getLogger("kvmem.session")


def timestamp() -> str:
    """Return now in UTC, to the microsecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def read(place: Place) -> dict:
    """Return the fields of the file, none if it is missing or unreadable."""
    try:
        fields = json.loads(place.io.read(place.file(META)))
        place.identity.check(fields, FORMAT, strict=False)
    except (OSError, ValueError, AttributeError):
        return {}
    return fields


def count(fields: Mapping, name: str) -> int:
    """Return a counter of the file's fields, 0 where it is missing or no number."""
    found = fields.get(name)
    return found if isinstance(found, int) else 0


def encoded(place: Place, log: Log, before: Mapping, **more) -> bytes:
    """Return the file's bytes after a change that left `log`."""
    now = timestamp()
    fields = place.identity.head(FORMAT) | {
        "created_at": before.get("created_at", now),
        "updated_at": now,
        "message_count": len(log.lines),
        "total_message_count": count(before, "total_message_count"),
        "commit_count": before.get("commit_count", 0),
        "last_commit_at": before.get("last_commit_at"),
        "pending_tokens": log.clock.tokens - log.start.tokens,
    }
    return json.dumps(fields | more, indent=1).encode()


def update(place: Place, log: Log, added: int = 0, **more) -> None:
    """Write the file after the log; what goes wrong is logged, not raised."""
    before = read(place)
    total = log.clock.messages
    if not place.rules.clock_from_log:
        total = count(before, "total_message_count") + added
    data = encoded(place, log, before | {"total_message_count": total}, **more)
    try:
        files.write(place.io, place.file(META), data, durable=False)
    except OSError as error:
        _logger.warning("session %r: no meta file: %s", place.identity.session, error)


def clock(place: Place, log: Log) -> int:
    """Return the session's clock in messages, by the rules of its store."""
    if place.rules.clock_from_log:
        return log.clock.messages
    return max(count(read(place), "total_message_count"), len(log.lines))
