"""What a recall asks and what it answers: the types, and the check of arguments.

The law: what cannot be asked is refused before anything is read. What is asked is
frozen, so that the two looks at a ledger, before and after the search, ask the same.

    ask("which tea?", None, "actor", messages(3), limit=8)
"""

import dataclasses
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from kvmem.errors import ConfigError, say
from kvmem.session import ids, views
from kvmem.session.cooldown import Cooldown
from kvmem.session.search import Hit

Status = Literal["off", "new", "ok", "reset", "write_failed", "unavailable", "replayed"]
Mark = Literal["return", "append"]
# Which tier of a hit is given: "uri", "abstract", "overview", "full"; None: it is not.
RenderFn = Callable[[Hit], str | None]
SearchFn = Callable[[int], Sequence[Hit]]  # how many are wanted -> hits, best first


@dataclasses.dataclass(frozen=True)
class Entry:
    """One memory that is given."""

    uri: str
    tier: str
    text: str
    score: float
    peer: str | None = None


def text_of(entries: Sequence[Entry]) -> str:
    """Return the texts of entries, a blank line between two."""
    return "\n\n".join(entry.text for entry in entries)


@dataclasses.dataclass(frozen=True)
class Recall:
    """What a recall answers; `append(carries=[...])` takes it if a message holds it."""

    id: str
    entries: tuple[Entry, ...]
    status: Status
    cooled: int = 0  # memories the ledger holds back, found or not
    excluded: int = 0  # found, and held back
    retrieval_errors: int = 0
    turn: int | None = None  # the clock in messages; None without a session
    reason: str | None = None  # of a status or an error that is not as it should be
    rendered: str = ""  # the texts; empty if `served` says that nothing is relevant
    actor: str | None = None
    records: Mapping[str, Mapping] = dataclasses.field(default_factory=dict)
    is_recorded: bool = False  # it counts as served already, before a message holds it


@dataclasses.dataclass(frozen=True)
class Ask:
    """One recall, checked."""

    query: str
    actor: str | None
    peer_scope: str
    policy: Cooldown
    limit: int
    id: str
    is_named: bool  # the caller chose the id, so a retry is answered the same
    mark: Mark
    render: RenderFn
    served: Callable[[Sequence[Entry]], bool]

    @property
    def query_digest(self) -> str:
        """Return what tells this query from another under the same id."""
        return hashlib.sha256(self.query.encode("utf-8", "replace")).hexdigest()[:32]


def ask(
    query: str,
    actor: str | None,
    peer_scope: str,
    policy: Cooldown,
    limit: int = 8,
    request_id: str | None = None,
    mark: Mark = "return",
    render: RenderFn | None = None,
    served: Callable[[Sequence[Entry]], bool] | None = None,
) -> Ask:
    """Return a recall's arguments, checked, or raise ConfigError or InvalidId."""
    if not isinstance(query, str):
        law = "a query is a string"
        raise ConfigError(say(f"recall of {query!r}", law, "Pass the words"))
    if not isinstance(policy, Cooldown):
        law = "a cooldown is messages(n), turns(n), tokens(n) or resident(f)"
        raise ConfigError(say(f"cooldown={policy!r}", law, "Pass one of them"))
    peer_scope = views.checked_scope(peer_scope)
    if mark not in ("return", "append"):
        law = 'a recall counts as served at its "return" or at an "append"'
        raise ConfigError(say(f"mark={mark!r}", law, "Pass one of them"))
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        law = "a recall gives at least 1 memory"
        raise ConfigError(say(f"limit={limit!r}", law, "Pass 1 or more"))
    name = uuid.uuid4().hex if request_id is None else request_id
    return Ask(
        query,
        actor,
        peer_scope,
        policy,
        limit,
        ids.check_key(name, "request id"),
        request_id is not None,
        mark,
        render or (lambda hit: "full"),
        served or bool,
    )
