"""Forgetting: what sessions hold of one memory is gone from their files.

The law: afterwards no ledger, no kept answer, no line of a log or an archive and no
file that was set aside says the memory's words. The messages stay, with a mark where
the memory stood: what was said around it was said. A forgetting that was cut off is
completed by the next.

    forget.in_session(place, Memory("memories/tea"))
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvmem.errors import CorruptPage, Denied, KVMemError, say
from kvmem.session import archive, chains, files, ledger, lines, log, state, views
from kvmem.session.files import TEMPORARY
from kvmem.session.io import OsIO
from kvmem.session.lines import Line
from kvmem.session.locks import Locks
from kvmem.session.log import TORN
from kvmem.session.materialise import GONE
from kvmem.session.place import CHAINS, HISTORY, LEDGER, LOCKS, LOG, Place
from kvmem.session.state import BAD
from kvmem.session.traces import digest


class Memory(NamedTuple):
    """What is forgotten: a uri with all below it, and what its items were before.

    By former words and uris an item is known that was told before it was changed or
    moved, unless they are another item's too.
    """

    uri: str
    digests: frozenset[str] = frozenset()  # of the words, now and before
    uris: frozenset[str] = frozenset()  # digests of where they stood before
    taken: frozenset[str] = frozenset()  # of where another item stands or stood
    others: frozenset[tuple[str, str]] = frozenset()  # and of its words there
    actor: str | None = None  # whose view it is forgotten under

    def is_at(self, uri: object) -> bool:
        """Say whether a uri is this memory's."""
        below = self.uri + "/"
        if not isinstance(uri, str):
            return False
        return not self.uri or uri == self.uri or uri.startswith(below)

    def was_at(self, uri: object) -> bool:
        """Say whether a uri is this memory's, or was."""
        if self.is_at(uri) or not self.uris:
            return self.is_at(uri)
        return isinstance(uri, str) and digest(uri) in self.uris - self.taken

    def is_in(self, fields: Mapping) -> bool:
        """Say whether a part of a message, or a kept answer's entry, is of it."""
        uri, text = fields.get("uri"), fields.get("text")
        if self.was_at(uri):
            return True
        if not (self.digests and isinstance(uri, str) and isinstance(text, str)):
            return False
        words = digest(text)
        is_known = words in self.digests and views.sees(uri, self.actor)
        return is_known and (digest(uri), words) not in self.others


class Faults:
    """What went wrong in a forgetting that goes on all the same; raised at its end.

    Damage of one session is no reason to leave a memory in the others.
    """

    def __init__(self):
        """Nothing went wrong yet."""
        self._faults: list[Exception] = []

    def kept[**P, T](
        self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Do a step; what a disk or another writer does to it is raised later."""
        try:
            return step(*args, **kwargs)
        except Denied:
            raise
        except (KVMemError, OSError) as fault:
            self._faults.append(fault)
            return None

    def __enter__(self) -> "Faults":
        """Return what collects them."""
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        """Raise the first, the others its notes, unless something else is raised."""
        if kind is None and self._faults:
            first, *others = self._faults
            for other in others:
                first.add_note(f"and {other}")
            raise first


def in_session(place: Place, memory: Memory, has_keeper: bool = True) -> int:
    """Take a memory out of one session; return the messages that held it.

    Args:
        place: the session's.
        memory: what is forgotten.
        has_keeper: somebody cuts the session's chains after this. Without one they go
            whole, as this room does not read them: KV is a cache.

    Raises:
        CorruptPage, FormatMismatch: the session is damaged and may hold it still.
        Busy: another writer held it for too long.
    """
    with place.locked():
        _drop_leftovers(place)
        if has_keeper:
            chains.drop_damaged(place)
        else:
            chains.drop_all(place)
        if not place.io.is_file(place.file(LOG)):
            return 0
        live, _ = log.mended(place, log.read(place))
        archives = archive.listed(place)
        live = archive.finish(place, live, archives)
        count = 0
        kept, changed = _without(live.lines, memory)
        if changed:
            log.rewrite(place, live.start, kept)
            count += changed
        for each in archives:
            kept, changed = _without(archive.read(place, each).lines, memory)
            if changed:
                archive.rewrite(place, each, kept)
                count += changed
        _drop_servings(place, memory)
        for name in list(_set_aside(place)):
            place.io.unlink(place.file(name))
        place.io.sync_dir(place.folder)
    return count


def in_nameless(folder: str) -> None:
    """Say of a folder whose log is lost that a memory cannot be taken out of it.

    Raises:
        CorruptPage: always.
    """
    law = "its log does not say which session it is, and it may hold a memory"
    cure = "Put messages.jsonl back from a copy, or take the folder away; forget again"
    raise CorruptPage(say(f"forgetting in the folder {folder!r}", law, cure))


def servings(place: Place, memory: Memory) -> None:
    """Take a memory out of a session's ledger and kept answers; messages stay."""
    with place.locked():
        if place.io.is_file(place.file(LOG)):
            _drop_servings(place, memory)


def leftovers(parent: Path, io: OsIO, locks: Locks) -> None:
    """Take away what deletions that were cut off have left of a user's sessions.

    Each under its session's lock: a deletion that still goes on has it.
    """
    for name in io.names(parent):
        if name.startswith(GONE):
            folder = name.removeprefix(GONE)
            files.make_folder(io, parent / LOCKS, parent)
            with locks.hold(parent / LOCKS / folder, f"the folder {folder!r}"):
                io.remove_tree(parent / name)


def _drop_servings(place: Place, memory: Memory) -> None:
    found = state.read(place)
    new = ledger.without(found.ledger, memory.was_at, memory.is_in)
    # What a change took back stands in the file until it is written whole.
    if new != found.ledger or found.file.has_changes:
        state.rewrite_ledger(place, found, new)
    elif found.is_bad:
        place.io.unlink(place.file(LEDGER))


def _set_aside(place: Place) -> Iterator[str]:
    """Yield the files that nobody can read for the memory's name."""
    for name in place.io.names(place.folder):
        if name.startswith((TORN, BAD)):
            yield name


def _drop_leftovers(place: Place) -> None:
    """Take away what writes and commits that were cut off have left."""
    history = place.file(HISTORY)
    place.io.remove_tree(history / archive.NEW)
    archives = [history / name for name in place.io.names(history)]
    for folder in (place.folder, place.file(CHAINS), *archives):
        for name in place.io.names(folder):
            if name.endswith(TEMPORARY):
                place.io.unlink(folder / name)


def _without(held: Sequence[Line], memory: Memory) -> tuple[tuple[Line, ...], int]:
    """Return lines that say nothing of a memory, and how many said something."""
    kept, changed = [], 0
    for line in held:
        stored = redacted(line.stored, memory)
        if stored != line.stored:
            fields = lines.unseal(line.raw[:-1]) | {"message": stored}
            line = line._replace(stored=stored, raw=lines.seal(fields))
            changed += 1
        kept.append(line)
    return tuple(kept), changed


def redacted(stored: Mapping, memory: Memory) -> dict:
    """Return a stored message whose parts and carried records do not hold a memory."""
    parts = [
        {"type": "context", "forgotten": True} if memory.is_in(part) else part
        for part in stored["parts"]
    ]
    new = {**stored, "parts": parts}
    if "carries" in stored:
        new["carries"] = [
            {**each, "records": _others(each["records"], memory)}
            for each in stored["carries"]
        ]
    return new


def _others(records: Mapping, memory: Memory) -> dict:
    return {uri: each for uri, each in records.items() if not memory.was_at(uri)}
