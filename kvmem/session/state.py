"""What a session is right now: its log, its ledger and its clock, read together.

The law: the log alone says what was acknowledged. A message that carries a recall says
so in its own line, so the ledger's file may lag behind such servings or be lost: they
are read from the lines again.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvmem.errors import FormatMismatch
from kvmem.session import files, ledger, ledger_file, log, meta
from kvmem.session.ledger import Ledger
from kvmem.session.lines import Clock, Line, Log
from kvmem.session.place import LEDGER, Place

BAD = ".recall_log.bad-"
_MAX_KNOWN_LEDGERS = 256
HEAD = ".recall_log.json:1"  # of what is known of the folder: the file's first line


class State(NamedTuple):
    """A session's log and ledger."""

    log: Log
    ledger: Ledger  # the file's, and what the log's lines carry
    clock: Clock  # by the rules of the store
    file: ledger_file.Found  # what the ledger's file itself says
    has_ledger: bool  # the file is there
    is_bad: bool  # and cannot be read

    def status(self, actor: str | None, place: Place) -> str:
        """Return what a recall of this actor says of the ledger it found."""
        if self.is_bad:
            return "reset" if place.rules.sets_bad_ledger_aside else "new"
        if not place.rules.ledger_by_actor:
            return "ok" if self.has_ledger else "new"
        return "ok" if self.ledger.of(actor) else "new"


def read(place: Place) -> State:
    """Read a session that is there; the lock makes it the last word.

    Raises:
        FileNotFoundError, CorruptPage, FormatMismatch: as `log.read`.
    """
    found = log.read(place)
    is_bad, has_ledger, file = False, True, ledger_file.NONE
    try:
        file = _read_file(place)
    except FileNotFoundError:
        has_ledger = False
    except FormatMismatch:
        is_bad = True
    clock = found.clock._replace(messages=meta.clock(place, found))
    kept = with_carried(file.ledger, found.carrying)
    return State(found, kept, clock, file, has_ledger, is_bad)


def _read_file(place: Place) -> ledger_file.Found:
    """Return what the ledger's file holds, parsed where it is longer than before."""
    path = place.file(LEDGER)
    known = place.ledgers.get(path)
    found = ledger_file.parse(place.io.read(path), place.identity, known)
    if len(place.ledgers) >= _MAX_KNOWN_LEDGERS:
        place.ledgers.clear()
    place.ledgers[path] = found
    return found


def with_carried(kept: Ledger, lines: Sequence[Line]) -> Ledger:
    """Return the ledger with the servings that lines of the log carry and it lacks."""
    for line in lines:
        for each in line.stored.get("carries", ()):
            mine = kept.of(each["actor"])
            newer = {
                uri: record
                for uri, fields in each["records"].items()
                if (record := ledger.record_from(fields)) is not None
                and (uri not in mine or mine[uri].turn < record.turn)
            }
            if newer:
                kept = ledger.recorded(kept, each["actor"], newer)
    return kept


def settle_ledger(place: Place, state: State) -> None:
    """Make sure that a ledger that was read is durable before something builds on it.

    Whoever wrote it may have died before its sync, or before its folder's.
    """
    place.settle()
    if not state.has_ledger:
        return
    if place.known.get(HEAD) != state.file.head:
        place.io.sync_dir(place.folder)
        place.known[HEAD] = state.file.head
    if place.known.get(LEDGER) != state.file.digest:
        place.io.sync(place.file(LEDGER))
        place.known[LEDGER] = state.file.digest


def write_ledger(place: Place, state: State, new: Ledger) -> None:
    """Make a ledger durable, under the lock: as one more line, or whole.

    A count of recalls alone is advice, and is left to the system: what a power cut
    takes of it holds a memory back for longer.
    """
    before = state.file.ledger
    if not state.file.is_right or state.file.is_long:
        rewrite_ledger(place, state, new)
    elif new == before:
        settle_ledger(place, state)
    else:
        counts = {"idle_turn": new.idle_turn, "idle_recalls": new.idle_recalls}
        is_advice = dataclasses.replace(before, **counts) == new
        _append(place, state, ledger_file.line(before, new), is_advice)


def _append(place: Place, state: State, line: bytes, is_advice: bool) -> None:
    path = place.file(LEDGER)
    if place.known.get(HEAD) != state.file.head and not is_advice:
        place.io.sync_dir(place.folder)
        place.known[HEAD] = state.file.head
    try:
        place.io.append(path, line)
        if not is_advice:
            place.io.sync(path)
    except OSError:
        with contextlib.suppress(OSError):  # else the next write makes it whole
            place.io.truncate(path, state.file.nbytes)
        raise


def rewrite_ledger(place: Place, state: State, new: Ledger) -> None:
    """Make a ledger durable as a file of one line, without what was there before.

    One that could not be read is kept aside first.
    """
    if state.is_bad and place.rules.sets_bad_ledger_aside:
        aside = place.file(log.next_name(place, BAD))
        place.io.replace(place.file(LEDGER), aside)
    data = ledger_file.dump(new, place.identity, state.file.wholes + 1)
    place.known.pop(HEAD, None)
    place.ledgers.pop(place.file(LEDGER), None)  # what was known may be forgotten now
    files.write(place.io, place.file(LEDGER), data)
    place.known[HEAD] = xxhash.xxh3_128_digest(data)
