"""The recall ledger: what was served to whom, and when; the last file to be durable.

The law: losing the ledger costs a repeat, having it too early costs a memory, so it is
written after everything else and read with forgiveness: a bad record is ignored, a bad
file is set aside and said to be. A key is (actor, uri): actors do not cool each other.

    {"version": 2, ..., "updated_turn": 4, "entries": {uri: record of no actor},
     "actors": {actor: {uri: record}}, "requests": {id: what it was answered}}

Behind that line there may be others, each a change of it (`ledger_file`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

DETAILS = ("uri", "abstract", "overview", "full")
MAX_RECORDS = 500  # of one actor
MAX_REQUESTS = 100


@dataclasses.dataclass(frozen=True)
class Record:
    """One serving of one memory."""

    turn: int  # the clock in messages when it was served
    detail: str = "full"  # how much of it: a bare uri never cools
    unit: str | None = None  # of the cooldown it was served under
    n: int | None = None
    turns: int | None = None  # the other clocks at that time
    tokens: int | None = None
    idle: int = 0  # recalls that came before it at the same clock

    def to_json(self) -> dict:
        """Return the fields that say something."""
        fields = dataclasses.asdict(self)
        return {k: v for k, v in fields.items() if v is not None and (v or k != "idle")}


@dataclasses.dataclass(frozen=True)
class Request:
    """What one recall was answered, to answer its retry, or to be carried later."""

    actor: str | None
    query: str  # its digest
    turn: int
    entries: tuple[Mapping, ...]  # {"uri", "tier", "text", "score", "peer"}
    records: Mapping[str, Mapping]  # uri -> the record, for a message that carries it
    pending: bool = False  # mark="append", and no message has carried it yet


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All that the file of a session says."""

    actors: Mapping[str | None, Mapping[str, Record]]
    requests: Mapping[str, Request] = dataclasses.field(default_factory=dict)
    updated_turn: int = 0
    idle_turn: int = 0  # recalls since the clock came here
    idle_recalls: int = 0

    def of(self, actor: str | None) -> Mapping[str, Record]:
        """Return an actor's records."""
        return self.actors.get(actor, {})

    def idle(self, turn: int) -> int:
        """Return the recalls that were counted while the clock stood at `turn`."""
        return self.idle_recalls if self.idle_turn == turn else 0


EMPTY = Ledger({})


def recorded(
    ledger: Ledger, actor: str | None, records: Mapping[str, Record]
) -> Ledger:
    """Return the ledger with these records of an actor, as its last."""
    mine = {u: r for u, r in ledger.of(actor).items() if u not in records}
    mine.update(records)
    turn = max([ledger.updated_turn, *(r.turn for r in records.values())])
    actors = {**ledger.actors, actor: mine}
    return dataclasses.replace(ledger, actors=actors, updated_turn=turn)


def capped(ledger: Ledger, actor: str | None, kept: Iterable[str]) -> Ledger:
    """Return the ledger with an actor's `kept` records only, the newest 500 of them."""
    kept = set(kept)
    mine = [(u, r) for u, r in ledger.of(actor).items() if u in kept]
    mine.sort(key=lambda pair: pair[1].turn)  # stable: of one turn the later ones stay
    actors = {**ledger.actors, actor: dict(mine[-MAX_RECORDS:])}
    return dataclasses.replace(ledger, actors=actors)


def requested(ledger: Ledger, name: str, request: Request) -> Ledger:
    """Return the ledger with a request's answer, the newest 100 of them."""
    others = {k: v for k, v in ledger.requests.items() if k != name}
    requests = dict([*others.items(), (name, request)][-MAX_REQUESTS:])
    return dataclasses.replace(ledger, requests=requests)


def without(
    ledger: Ledger,
    is_at: Callable[[str], bool],
    is_in: Callable[[Mapping], bool],
) -> Ledger:
    """Return the ledger without a memory, in records and in kept answers.

    Args:
        ledger: of a session.
        is_at: says of a record's uri that it is the memory's.
        is_in: says it of a kept answer's entry.
    """
    actors = {
        actor: {uri: each for uri, each in records.items() if not is_at(uri)}
        for actor, records in ledger.actors.items()
    }
    requests = {
        name: dataclasses.replace(
            each,
            entries=tuple(entry for entry in each.entries if not is_in(entry)),
            records={u: r for u, r in each.records.items() if not is_at(u)},
        )
        for name, each in ledger.requests.items()
    }
    return dataclasses.replace(ledger, actors=actors, requests=requests)


def record_from(fields) -> Record | None:
    """Return the record that JSON fields say, None if they say none."""
    if not isinstance(fields, Mapping) or not is_count(fields.get("turn")):
        return None
    detail, unit = fields.get("detail", "full"), fields.get("unit")
    if detail not in DETAILS or not isinstance(unit, str | None):
        return None
    counts = {k: fields.get(k) for k in ("n", "turns", "tokens")}
    if not all(v is None or is_count(v) for v in counts.values()):
        return None
    idle = fields.get("idle", 0)
    return Record(
        fields["turn"],
        detail,
        unit,
        **counts,
        idle=idle if is_count(idle) else 0,
    )


def is_count(value) -> bool:
    """Say whether a value is a whole number that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
