"""How a session comes to be: built aside, and renamed into place as one folder.

The law: a session's folder is absent, or has a log. Whoever is first makes it; everyone
else adopts it. A stray empty folder is replaced; one with files but no log (made by
another tool) is adopted and keeps them, unless its history says that a log was lost.

All verbs are called under the session's lock.
"""

from kvmem.errors import CorruptPage, say
from kvmem.session import files, lines, meta
from kvmem.session.log import read
from kvmem.session.place import HISTORY, ITSELF, LOG, META, Place

NEW, GONE = ".new-", ".gone-"


def ensure(place: Place) -> bool:
    """Make the session unless it is there; say whether this call made it."""
    if place.io.is_file(place.file(LOG)):
        place.settle()
        return False
    place.unsettle()
    names = place.io.names(place.folder)
    if any(place.io.names(place.file(HISTORY))):
        asked = f"session {place.identity.session!r}"
        law = "it has a history and no messages.jsonl, so its log was lost"
        raise CorruptPage(say(asked, law, "Put the log back from a copy"))
    if names:
        files.write(place.io, place.file(LOG), _empty_log(place))
        place.settle()
    else:
        build(place)
    meta.update(place, read(place))
    return True


def build(place: Place) -> bool:
    """Make a new folder with a log and a meta file, and rename it into place.

    Returns:
        False if a folder with files has that name by now: it is adopted.
    """
    io, new = place.io, place.parent / (NEW + place.folder.name)
    if place.parent not in place.durable:
        files.make_folder(io, place.parent, place.root)
        place.durable[place.parent] = {}
    io.remove_tree(new)
    io.mkdir(new)
    first = lines.scan(_empty_log(place), place.identity)
    for name, data in (
        (LOG, _empty_log(place)),
        (META, meta.encoded(place, first, {})),
    ):
        io.write(new / name, data)
        io.sync(new / name)
    io.sync_dir(new)
    try:
        io.rename_dir(new, place.folder)
    except OSError:
        if not place.io.names(place.folder):
            raise
        io.remove_tree(new)
        return False
    io.sync_dir(place.parent)
    place.known[ITSELF] = b""
    return True


def remove(place: Place) -> None:
    """Take the session's folder away: renamed first, so that no half of it is seen."""
    io, gone = place.io, place.parent / (GONE + place.folder.name)
    io.remove_tree(gone)
    place.unsettle()
    if io.is_dir(place.folder):
        io.rename_dir(place.folder, gone)
        io.sync_dir(place.parent)
        io.remove_tree(gone)


def _empty_log(place: Place) -> bytes:
    return lines.header(place.identity, lines.Clock())
