"""The ledger's file: a whole ledger on its first line, behind it what changed since.

The law: a change is one line behind the others, so that recording a serving costs one
write and one sync, however much the ledger holds. Reading is forgiving line by line:
one that is not right is left out, and then the next write makes the file whole again,
as it does when the changes have grown longer than what they change. The first line
says how often that was, so that no two files of a session begin alike.

    {"version": 2, "wholes": 3, ...}
    {"records": [["planner", {uri: record}, [uris that went]]], ..., "crc": "…"}

    found = parse(data, identity)
    found.ledger, data + line(found.ledger, new)
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple

import xxhash

from kvmem.errors import FormatMismatch, say
from kvmem.session import lines
from kvmem.session.identity import VERSION, Identity
from kvmem.session.ledger import EMPTY, Ledger, Record, Request, is_count, record_from

__all__ = ["FORMAT", "NONE", "Found", "dump", "line", "parse"]

FORMAT = "kvmem.session.ledger"
_VERSION = 2  # 1 was the first line alone
_MOST_NBYTES = 8_192  # of changes, or as many as the first line has


class Found(NamedTuple):
    """What a ledger's file holds."""

    ledger: Ledger
    wholes: int = 0  # how often it was written whole
    nbytes: int = 0
    head_nbytes: int = 0  # of the first line
    is_right: bool = False  # all of it is read, so that a line may follow
    digest: bytes = b""  # of all its bytes
    head: bytes = b""  # the digest of its first line

    @property
    def has_changes(self) -> bool:
        """Say whether anything stands behind the first line."""
        return self.nbytes > self.head_nbytes

    @property
    def is_long(self) -> bool:
        """Say whether the next write should make it whole."""
        changes = self.nbytes - self.head_nbytes
        return changes > max(_MOST_NBYTES, self.head_nbytes)


NONE = Found(EMPTY)


def parse(data: bytes, identity: Identity, known: Found | None = None) -> Found:
    """Return what a ledger's bytes say, bad records and bad lines left out.

    Args:
        data: the file's.
        identity: whose it should be.
        known: what it was found to hold before: where it still begins so, only what
            stands behind is read.

    Raises:
        FormatMismatch: the first line is no ledger of this session.
    """
    if known is None or not known.is_right or known.digest != _digest(data, known):
        known = _begun(data, identity)
    *changes, rest = data[known.nbytes :].split(b"\n")
    ledger, is_right = known.ledger, known.is_right and not rest
    for each in changes:
        try:
            ledger = _changed(ledger, lines.unseal(each) or {})
        except (ValueError, KeyError, TypeError, AttributeError):
            is_right = False
    found = known._replace(ledger=ledger, nbytes=len(data), is_right=is_right)
    return found._replace(digest=_digest(data, found))


def _digest(data: bytes, found: Found) -> bytes:
    return xxhash.xxh3_128_digest(data[: found.nbytes])


def _begun(data: bytes, identity: Identity) -> Found:
    """Return what the first line says, as of a file that ends there."""
    try:
        text = data.decode()
        start = len(text) - len(text.lstrip())
        fields, end = json.JSONDecoder().raw_decode(text, start)
        _check(fields, identity)
        ledger, wholes = _whole(fields)
        behind, newline, _ = text[end:].partition("\n")
        if behind.strip():
            raise ValueError("more stands on its first line")
    except (ValueError, AttributeError, TypeError) as bad:
        if isinstance(bad, FormatMismatch):
            raise
        law = f"it cannot be read ({bad})"
        asked = f"the recall ledger of session {identity.session!r}"
        raise FormatMismatch(
            say(asked, law, "It is set aside, and begun anew")
        ) from bad
    nbytes = len((text[:end] + behind + newline).encode())
    head = xxhash.xxh3_128_digest(data[:nbytes])
    # What is cut off, or was put there by hand, has no end of its line.
    return Found(ledger, wholes, nbytes, nbytes, bool(newline), head, head)


def dump(ledger: Ledger, identity: Identity, wholes: int = 0) -> bytes:
    """Return the bytes of a whole file."""
    by_actor = {a: _plain(r) for a, r in ledger.actors.items() if r}
    fields = identity.head(FORMAT) | {
        "version": _VERSION,
        "wholes": wholes,
        "updated_turn": ledger.updated_turn,
        "entries": by_actor.pop(None, {}),
    }
    if by_actor:
        fields["actors"] = by_actor
    if ledger.requests:
        fields["requests"] = _answers(ledger.requests)
    if ledger.idle_recalls:
        fields["idle"] = {"turn": ledger.idle_turn, "recalls": ledger.idle_recalls}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def line(before: Ledger, after: Ledger) -> bytes:
    """Return the line that makes one ledger of another."""
    records = []
    for actor in dict.fromkeys((*before.actors, *after.actors)):
        old, new = before.of(actor), after.of(actor)
        fresh = {uri: each for uri, each in new.items() if old.get(uri) != each}
        gone = [uri for uri in old if uri not in new]
        if fresh or gone:
            records.append([actor, _plain(fresh), gone])
    answers = {
        name: each
        for name, each in after.requests.items()
        if before.requests.get(name) != each
    }
    forgotten = [name for name in before.requests if name not in after.requests]
    fields = {
        "records": records,
        "requests": _answers(answers),
        "gone": forgotten,
        "counts": [after.updated_turn, after.idle_turn, after.idle_recalls],
    }
    return lines.seal({name: each for name, each in fields.items() if each})


def _changed(ledger: Ledger, change: Mapping) -> Ledger:
    """Return a ledger after the change of one line, which is right."""
    actors, requests = dict(ledger.actors), dict(ledger.requests)
    for actor, fresh, gone in change.get("records", ()):
        mine = {
            uri: each
            for uri, each in ledger.of(actor).items()
            if uri not in fresh and uri not in gone
        }
        actors[actor] = mine | _records(fresh)
    answers = change.get("requests", {})
    for name in (*answers, *change.get("gone", ())):
        requests.pop(name, None)
    updated, idle_turn, idle = change["counts"]
    return Ledger(actors, requests | _requests(answers), updated, idle_turn, idle)


def _check(fields: Mapping, identity: Identity) -> None:
    """Raise FormatMismatch where the first line is another session's or version's."""
    version = fields.get("version")
    known = VERSION if version in (1, _VERSION) else None
    identity.check({**fields, "version": known}, FORMAT, strict=False)


def _whole(fields: Mapping) -> tuple[Ledger, int]:
    """Return what the first line says."""
    entries, actors = fields.get("entries", {}), fields.get("actors", {})
    by_actor = {None: entries} | actors
    records = {a: _records(each) for a, each in by_actor.items() if each}
    requests = _requests(fields.get("requests", {}))
    idle = fields.get("idle", {})
    counts = [fields.get("updated_turn", 0), *map(idle.get, ("turn", "recalls"))]
    wholes = fields.get("wholes", 0)
    counts = [each if is_count(each) else 0 for each in (*counts, wholes)]
    return Ledger(records, requests, *counts[:3]), counts[3]


def _plain(records: Mapping[str, Record]) -> dict[str, dict]:
    return {uri: record.to_json() for uri, record in records.items()}


def _answers(requests: Mapping[str, Request]) -> dict[str, dict]:
    return {name: dataclasses.asdict(each) for name, each in requests.items()}


def _records(fields: Mapping) -> dict[str, Record]:
    found = {uri: record_from(each) for uri, each in fields.items()}
    return {uri: record for uri, record in found.items() if record is not None}


def _requests(fields: Mapping) -> dict[str, Request]:
    found = {}
    for name, each in fields.items():
        try:
            request = Request(**each)
            entries = tuple(e for e in request.entries if isinstance(e["uri"], str))
            found[name] = dataclasses.replace(request, entries=entries)
        except (TypeError, KeyError):
            continue
    return found
