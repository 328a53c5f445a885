"""Tombstones: a session that was deleted stays deleted until somebody creates it.

The law: the note is durable before a byte of the session is taken away, and it outlives
the folder. What is in flight meanwhile gets `Deleted`; nothing it does brings the
session back. `Session.create` begins another generation, and handles of the one before
go on getting `Deleted`.
"""

import json
from typing import NamedTuple

from kvmem.errors import CorruptPage, Deleted, say
from kvmem.session import files
from kvmem.session.place import Place

FORMAT = "kvmem.session.generation"


class Life(NamedTuple):
    """Which generation of a session lives, or lived last."""

    generation: int = 1
    is_deleted: bool = False


def read(place: Place) -> Life:
    """Return the session's life as the note says; without a note, its first.

    Raises:
        CorruptPage: the note is damaged, so that nobody may go on.
    """
    try:
        data = place.io.read(place.tombstone)
    except FileNotFoundError:
        return Life()
    try:
        fields = json.loads(data)
        place.identity.check(fields, FORMAT)
        return Life(int(fields["generation"]), bool(fields["deleted"]))
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        asked = f"the note of session {place.identity.session!r}'s deletion"
        law = f"it is damaged ({bad})"
        raise CorruptPage(say(asked, law, "Put it back, or take it away")) from bad


def write(place: Place, life: Life) -> None:
    """Make a note of the session's life durable."""
    files.make_folder(place.io, place.tombstone.parent, place.root)
    fields = place.identity.head(FORMAT) | {
        "generation": life.generation,
        "deleted": life.is_deleted,
    }
    files.write(place.io, place.tombstone, json.dumps(fields).encode())


def check(place: Place, mine: int | None) -> int:
    """Return the generation that lives, or raise Deleted.

    Args:
        place: the session's.
        mine: the generation of the handle that asks, None if it has none yet.
    """
    if not place.rules.keeps_tombstones:
        return 1
    life = read(place)
    if life.is_deleted or mine not in (None, life.generation):
        law = "it was deleted" + ("" if life.is_deleted else ", and begun anew since")
        cure = "Call create() on a new handle to begin it anew"
        raise Deleted(say(f"session {place.identity.session!r}", law, cure))
    return life.generation
