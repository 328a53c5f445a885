"""Append: messages become the session's, all of a batch or none.

The law: what was acknowledged is on the disk. A batch with a key is stored once,
however often it is sent: sent again it answers where it stands, and with another
content it is a Conflict. Whatever is wrong is raised, and the log is as it was.
"""

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvmem.errors import ConfigError, Conflict, InvalidId, say
from kvmem.session import (
    archive,
    ids,
    lines,
    log,
    materialise,
    message,
    meta,
    state,
    tombstone,
)
from kvmem.session.asking import Recall
from kvmem.session.late import ReviseFn
from kvmem.session.lines import Batch, Log
from kvmem.session.log import Repair
from kvmem.session.place import Place


class Appended(NamedTuple):
    """Where a batch stands: messages first to stop - 1."""

    first: int
    stop: int
    is_repeat: bool = False  # it was there already
    repair: Repair | None = None  # what a cut-off write before it had left


@dataclasses.dataclass(frozen=True)
class CheckedBatch:
    """One batch, checked."""

    parsed: tuple[dict, ...]
    key: str | None
    actor: str | None
    carries: tuple[Recall | str, ...]

    @property
    def digest(self) -> str:
        """Return what tells this content from another's under the same key."""
        return message.digest(self.parsed, self.actor)


def checked(
    messages: Sequence[Mapping],
    key: str | None,
    peer: str | None,
    actor: str | None,
    carries: Iterable[Recall | str] = (),
    captured: Sequence[str] = (),
) -> CheckedBatch:
    """Return a batch whose form is right, or raise ConfigError or InvalidId.

    `captured` says of each message what it was captured from, as its first source.
    """
    parsed = message.parse(messages, None if peer is None else ids.check_peer(peer))
    if captured:
        parsed = tuple(
            each | {"sources": [source, *each.get("sources", ())]}
            for each, source in zip(parsed, captured, strict=True)
        )
    key = None if key is None else ids.check_key(key)
    return CheckedBatch(parsed, key, actor, listed(carries))


def listed(carries: Iterable[Recall | str]) -> tuple[Recall | str, ...]:
    """Return what a batch is to carry, or raise ConfigError where it is no recalls."""
    is_many = isinstance(carries, Iterable) and not isinstance(carries, str)
    found = tuple(carries) if is_many else None
    if found is None or not all(isinstance(each, Recall | str) for each in found):
        law = "a batch carries a list of recalls, or of their ids"
        raise ConfigError(say(f"carries={carries!r}", law, "Pass [recall]"))
    return found


def run(
    place: Place, generation: int | None, batch: CheckedBatch, revise: ReviseFn
) -> Appended:
    """Append a batch; see the file's head.

    Args:
        place: the session's.
        generation: of the session's handle.
        batch: what is appended.
        revise: takes out, under the lock, what was forgotten meanwhile.
    """
    with place.locked():
        tombstone.check(place, generation)
        materialise.ensure(place)
        live, repair = log.mended(place, log.read(place))
        archives = archive.listed(place)
        live = archive.finish(place, live, archives)
        if batch.key is not None:
            found = archive.batch_of(archives, live, batch.key)
            if found is not None:
                return _repeated(place, live, batch, found, repair)
        stored = revise(_stored(place, live, batch))
        data = lines.batch(live.clock.messages, stored, batch.key, batch.digest)
        new = log.append(place, live, data)
        meta.update(place, new, added=len(stored))
    return Appended(live.clock.messages, new.clock.messages, False, repair)


def _repeated(
    place: Place, live: Log, batch: CheckedBatch, found: Batch, repair: Repair | None
) -> Appended:
    if found.digest != batch.digest:
        law = f"it was appended with another content, messages {found.first} on"
        raise Conflict(say(f"append with key {batch.key!r}", law, "Use a key a batch"))
    place.settle(live)
    return Appended(found.first, found.stop, True, repair)


def _stored(place: Place, live: Log, batch: CheckedBatch) -> list[dict]:
    """Return the messages as the log keeps them: with ids, time and actor."""
    now = meta.timestamp()
    common = {"created_at": now} | ({"actor": batch.actor} if batch.actor else {})
    stored = [
        {"id": f"msg_{uuid.uuid4().hex}"} | each | common for each in batch.parsed
    ]
    if batch.carries:
        stored[0]["carries"] = _carried(place, live, batch.carries)
    return stored


def _carried(place: Place, live: Log, carries: Sequence[Recall | str]) -> list[dict]:
    """Return what the first line says of the recalls whose memories it holds.

    A recall with mark="append" counts as served now, at this message.
    """
    requests = state.read(place).ledger.requests
    turn = meta.clock(place, live)
    now = {"turn": turn, "turns": live.clock.turns, "tokens": live.clock.tokens}
    carried = []
    for each in carries:
        if isinstance(each, Recall):
            name, is_recorded, kept = each.id, each.is_recorded, each
        elif each in requests:
            name, is_recorded, kept = each, not requests[each].pending, requests[each]
        else:
            law = "no recall of this session with that id is kept"
            raise InvalidId(say(f"carries {each!r}", law, "Pass the Recall itself"))
        records = dict(kept.records)
        if not is_recorded:
            records = {u: {**record, **now, "idle": 0} for u, record in records.items()}
        actor = kept.actor if place.rules.ledger_by_actor else None
        carried.append({"id": name, "actor": actor, "records": records})
    return carried
