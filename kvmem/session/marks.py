"""Marks: which messages of an agent's history a session's log holds.

A mark is the digest of what a message says, and its id if it has one. The law: the log
is the cursor. A captured message says in its own line, as its first source, whom it was
captured about and its mark, which no other append can write, so that what was captured
is read from there and nowhere else; what a process knows already is kept in memory, and
begun anew when the session is another one.

    marked({"id": "m1", "role": "user", "content": "hello"})  # "9c4e…:m1"
    in_log(session, actor="planner", peer=None)               # ["9c4e…:m1", ...]
"""

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvmem.session import common, message
from kvmem.session.message import Message

__all__ = ["in_log", "marked", "plain", "source", "unsent"]

_MAX_SESSIONS = 256  # whose marks a store keeps in memory


def unsent(seen: Sequence[str], new: Sequence[str], logged: Sequence[str]) -> list[int]:
    """Return which messages of a history are not captured yet, by their places.

    A message with an id is known by id and content, wherever it stands; one without is
    known by content and its place among its neighbours, so that a word that is said
    again counts again.

    Args:
        seen: marks of the history as it was last.
        new: marks of the history as it is now.
        logged: marks of everything that was captured.
    """
    pairs = zip(seen, new, strict=False)
    start = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if start is None:  # one begins with the other
        start = min(len(seen), len(new))
    named = {mark for mark in logged if not mark.endswith(":")}
    matched = {start + at for at in common.matched(seen[start:], new[start:])}
    return [i for i in range(start, len(new)) if not (i in matched or new[i] in named)]


def marked(one: Mapping) -> str:
    """Return the mark of a message: the digest of what it says, and its id."""
    parsed = message.parse([plain(one)])[0]
    said = json.dumps([parsed["role"], parsed["parts"]], sort_keys=True)
    id_ = one.get("id") or ""
    return f"{hashlib.sha256(said.encode()).hexdigest()[:32]}:{id_}"


def source(one: Mapping, peer: str | None) -> str:
    """Return what a captured message says in its line: about whom, and its mark."""
    return f"{message.CAPTURED}{peer or ''}:{marked(one)}"


def plain(one: Mapping) -> dict:
    """Return a message as it is appended: its id is not kept but in its mark."""
    return {name: value for name, value in one.items() if name != "id"}


def in_log(session: Any, actor: str | None, peer: str | None) -> tuple[str, ...]:
    """Return the marks of what a session's log holds of one actor and peer."""
    store, name = session.principal.store, session.place.identity
    with _LOCK:
        known = _KNOWN.setdefault(store, OrderedDict())
        before = known.get(name, _Read())
    read = _read_on(session, before)
    with _LOCK:  # whoever read the same beside this one read the same
        known[name] = read
        known.move_to_end(name)
        if len(known) > _MAX_SESSIONS:
            known.popitem(last=False)
    return read.marks.get((actor, peer), ())


class _Read(NamedTuple):
    """What was read of a session's log."""

    stop: int = 0
    last_id: str = ""  # of message stop - 1: another one means another session
    marks: Mapping[tuple, tuple[str, ...]] = {}


_LOCK = threading.Lock()
_KNOWN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # store -> sessions


def _read_on(session: Any, read: _Read) -> _Read:
    """Return what is read when the log's new messages are, too."""
    found = session.messages(max(0, read.stop - 1))
    if read.stop:
        if not found or found[0].id != read.last_id:
            return _read_on(session, _Read())
        found = found[1:]
    new: dict[tuple, list[str]] = {}
    for one in found:
        if (peer_and_mark := _of(one)) is not None:
            peer, mark = peer_and_mark
            new.setdefault((one.actor, peer), []).append(mark)
    more = {key: (*read.marks.get(key, ()), *marks) for key, marks in new.items()}
    if not found:
        return read
    return _Read(found[-1].seq + 1, found[-1].id, {**read.marks, **more})


def _of(one: Message) -> tuple[str | None, str] | None:
    """Return whom a message was captured about and its mark, None if it was not."""
    first = one.sources[0] if one.sources else ""
    rest = first.removeprefix(message.CAPTURED)
    if rest == first or rest.count(":") < 2:
        return None
    peer, _, mark = rest.partition(":")
    return peer or None, mark
