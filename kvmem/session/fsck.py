"""fsck: every law of a session, read from its files and judged without changing them.

    I1  the folder is absent, or has a log and a meta file
    I2  seq is dense from 0, every crc is right, message ids are unique
    I3  no ledger record is ahead of the clock
    I4  a recall that messages carry has its records in the ledger, and the other way
    I5  every actor and uri of the ledger is a valid one
    I6  a capture cursor is not ahead of the log
    I7  archives and live log together are 0 to clock - 1, and do not overlap
    I8  a KV chain covers no message behind the clock, and its tokens are its text's
    I9  every page of a chain is there, under one format
    I10 no chain names a page of another salt

I8 to I10 are asked of whoever writes the chains, through `hooks`. What a cut-off write
left for the next writer to mend (a torn end, an archive that is not cut from the live
log yet) is no violation: nothing acknowledged is missing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvmem.errors import CorruptPage, FormatMismatch, InvalidId
from kvmem.session import (
    archive,
    chains,
    ids,
    ledger,
    ledger_file,
    log,
    meta,
    state,
    tombstone,
)
from kvmem.session.lines import Line, Log
from kvmem.session.place import LEDGER, LOG, META, Place


class Violation(NamedTuple):
    """One law that a session breaks."""

    law: str  # "I1" to "I10"
    detail: str


class Checked(NamedTuple):
    """What a hook is given of a session to judge its chains."""

    session: str
    clock: int
    manifests: Mapping[str | None, bytes]
    owner: tuple[str, str]  # account and user


HookFn = Callable[[Checked], Iterable[Violation]]


def run(place: Place, hooks: Iterable[HookFn] = ()) -> tuple[Violation, ...]:
    """Return every violation of a session, () when it is sound."""
    with place.locked():
        return tuple(_judge(place, tuple(hooks)))


def _judge(place: Place, hooks: tuple[HookFn, ...]) -> Iterator[Violation]:
    if place.rules.keeps_tombstones and tombstone.read(place).is_deleted:
        return
    if not place.io.is_dir(place.folder):
        return
    missing = [n for n in (LOG, META) if not place.io.is_file(place.file(n))]
    for name in missing:
        yield Violation("I1", f"{name} is missing")
    if LOG in missing:
        return
    place.logs.pop(place.file(LOG), None)  # every line is read again
    try:
        live = log.read(place)
    except (CorruptPage, FormatMismatch) as bad:
        yield Violation("I2", str(bad))
        return
    try:
        held = list(_history(place, live))
    except (CorruptPage, FormatMismatch) as bad:
        yield Violation("I7", str(bad))
        return
    yield from _order(place, live, held)
    yield from _servings(place, live, [*held, *live.lines])
    yield from _cursors(live, [*held, *live.lines])
    checked = Checked(
        place.identity.session,
        live.clock.messages,
        chains.manifests(place),
        place.identity[:2],
    )
    for hook in hooks:
        yield from hook(checked)


def _history(place: Place, live: Log) -> Iterator[Line]:
    """Yield what archives hold before the live log begins."""
    for each in archive.listed(place):
        found = archive.read(place, each)
        if each.first < live.start.messages:
            yield from found.lines
        else:
            held = [line.raw for line in found.lines]
            if held != [line.raw for line in live.lines[: len(held)]]:
                law = f"{each.name} is no beginning of the live log"
                raise CorruptPage(law)


def _order(place: Place, live: Log, held: list[Line]) -> Iterator[Violation]:
    numbers = [line.seq for line in held]
    if numbers != list(range(live.start.messages)):
        detail = f"the live log begins at {live.start.messages}, archives end elsewhere"
        yield Violation("I7", detail)
    names = [line.stored.get("id") for line in [*held, *live.lines]]
    if len(set(names)) != len(names):
        yield Violation("I2", "two messages have one id")
    counted = meta.count(meta.read(place), "total_message_count")
    if place.rules.clock_from_log and counted > live.clock.messages:
        detail = f"{counted} messages were counted, the log holds {live.clock[0]}"
        yield Violation("I2", detail)


def _servings(place: Place, live: Log, held: list[Line]) -> Iterator[Violation]:
    try:
        data = place.io.read(place.file(LEDGER))
        kept = ledger_file.parse(data, place.identity).ledger
    except FileNotFoundError:
        kept = ledger.EMPTY
    except FormatMismatch as bad:
        yield Violation("I5", str(bad))
        return
    clock = max(live.clock.messages, meta.clock(place, live))
    whole = state.with_carried(kept, live.carrying)
    for actor, records in whole.actors.items():
        if actor is not None and not _is_valid(actor):
            yield Violation("I5", f"actor {actor!r} is no actor's name")
        for uri, record in records.items():
            if not uri or not uri.isprintable():
                yield Violation("I5", f"uri {uri!r} is none")
            if record.turn > clock:
                detail = f"{uri} was served at {record.turn}, the clock is {clock}"
                yield Violation("I3", detail)
    yield from _carried(kept, live, held)


def _carried(kept: ledger.Ledger, live: Log, held: list[Line]) -> Iterator[Violation]:
    """Compare what messages carry with what the ledger says was served."""
    carried = set()
    for line in held:
        for each in line.stored.get("carries", ()):
            carried.add(each["id"])
            for uri, fields in each["records"].items():
                record = ledger.record_from(fields)
                if record is None or record.turn > line.seq:
                    yield Violation(
                        "I4", f"message {line.seq} carries no record of {uri}"
                    )
    for name, request in kept.requests.items():
        served = kept.of(request.actor)
        if not request.pending or name in carried:
            continue
        for uri, fields in request.records.items():
            mine = served.get(uri)
            if mine is not None and mine.to_json() == dict(fields):
                detail = f"{uri} counts as served, and no message carries {name}"
                yield Violation("I4", detail)


def _cursors(live: Log, held: list[Line]) -> Iterator[Violation]:
    """The log is the capture cursor: what a message was made from comes before it."""
    places = {line.stored.get("id"): line.seq for line in held}
    for line in held:
        for source in line.stored.get("sources", ()):
            if places.get(source, -1) >= line.seq:
                yield Violation("I6", f"message {line.seq} was made from a later one")


def _is_valid(actor: str) -> bool:
    try:
        return ids.check_actor(actor) == actor
    except (InvalidId, ValueError):
        return False
