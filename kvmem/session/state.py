"""What a session is right now: its log, its ledger and its clock, read together.

The law: the log alone says what was acknowledged. A message that carries a recall says
so in its own line, so the ledger's file may lag behind such servings or be lost: they
are read from the lines again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvmem.errors import FormatMismatch
from kvmem.session import files, ledger, log, meta
from kvmem.session.ledger import Ledger
from kvmem.session.lines import Clock, Line, Log
from kvmem.session.place import LEDGER, Place

BAD = ".recall_log.bad-"


class State(NamedTuple):
    """A session's log and ledger."""

    log: Log
    ledger: Ledger  # the file's, and what the log's lines carry
    clock: Clock  # by the rules of the store
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
    is_bad, has_ledger, kept = False, True, ledger.EMPTY
    try:
        kept = ledger.parse(place.io.read(place.file(LEDGER)), place.identity)
    except FileNotFoundError:
        has_ledger = False
    except FormatMismatch:
        is_bad = True
    clock = found.clock._replace(messages=meta.clock(place, found))
    return State(found, with_carried(kept, found.carrying), clock, has_ledger, is_bad)


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


def write_ledger(place: Place, state: State, new: Ledger) -> None:
    """Make a ledger durable; one that could not be read is kept aside first."""
    if state.is_bad and place.rules.sets_bad_ledger_aside:
        aside = place.file(log.next_name(place, BAD))
        place.io.replace(place.file(LEDGER), aside)
    files.write(place.io, place.file(LEDGER), ledger.dump(new, place.identity))
