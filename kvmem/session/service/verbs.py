"""The service's verbs: one row each, run on the principal of the request's key.

The law: a row reads its user from the principal and from nothing else, and the actor is
given to rows that say so: append, recall and capture. Sessions are owned by user alone.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvmem import errors
from kvmem.session import bodies, cooldown
from kvmem.session.message import Message

__all__ = ["ALL", "Call", "Verb"]

_PAGE = 1000  # messages or marks of one answer
_MAX_MEMORIES = 100  # of one recall
_COOLDOWN = re.compile(r"(messages|turns|tokens)\(([0-9]{1,9})\)")


class Call(NamedTuple):
    """What a verb is run with."""

    principal: Any
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Any
    actor: str | None

    @property
    def session(self) -> Any:
        """The handle of the session in the path."""
        return self.principal.session(self.path["session"])

    def count(self, name: str, default: int = 0) -> int:
        """Return a number of the query."""
        said = self.query.get(name, "")
        if said and not (said.isascii() and said.isdigit() and len(said) < 16):
            asked, law = f"{name}={said[:20]!r}", "it is a number of 0 or more"
            raise errors.ConfigError(errors.say(asked, law, "Send digits"))
        return int(said) if said else default


class Verb(NamedTuple):
    """One row: where it is, what it reads, what runs."""

    name: str
    method: str
    path: str
    summary: str
    run: Callable[[Call], dict]
    body: type | None = None
    query: tuple[str, ...] = ()
    for_actor: bool = False
    status: int = 200


def _append(call: Call) -> dict:
    body = call.body
    placed = call.session.append(
        body.messages,
        key=body.key,
        peer=body.peer,
        actor=call.actor,
        carries=body.carries,
    )
    return {
        "first": placed.first,
        "stop": placed.stop,
        "is_repeat": placed.is_repeat,
    }


def _get(call: Call) -> dict:
    """Return messages from `since` on, at most a page of them."""
    since = call.count("since")
    limit = min(call.count("limit", _PAGE), _PAGE)
    session = call.session
    clock = session.clock  # Deleted, if it was
    if not session.exists:
        asked, law = f"session {session.id!r}", "this user has none of that id"
        raise errors.NotFound(errors.say(asked, law, "Append to it to make it"))
    found = session.messages(since) if limit else ()
    page = found[:limit]
    more = len(found) > len(page)
    return {
        "session": session.id,
        "clock": clock,
        "messages": [_plain(each) for each in page],
        "next": page[-1].seq + 1 if more and page else None,
    }


def _plain(one: Message) -> dict:
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}


def _commit(call: Call) -> dict:
    return call.session.commit(keep=call.body.keep)._asdict()


def _create(call: Call) -> dict:
    return {"created": call.session.create()}


def _delete(call: Call) -> dict:
    call.session.delete()
    return {"deleted": call.path["session"]}


def _remember(call: Call) -> dict:
    item = call.principal.remember(**dataclasses.asdict(call.body))
    return dataclasses.asdict(item)


def _forget(call: Call) -> dict:
    return {"forgotten": list(call.principal.forget(call.body.uri))}


def _recall(call: Call) -> dict:
    body = call.body
    given = {
        name: value
        for name in ("peer_scope", "request_id", "limit")
        if (value := getattr(body, name)) is not None
    }
    if not 1 <= (1 if body.limit is None else body.limit) <= _MAX_MEMORIES:
        asked, law = f"limit={body.limit}", f"a recall gives 1 to {_MAX_MEMORIES}"
        raise errors.ConfigError(errors.say(asked, law, "Ask for less"))
    session = None
    if body.session is not None:
        session = call.principal.session(body.session)
    found = call.principal.recall(
        body.query,
        session=session,
        cooldown=_policy(body.cooldown),
        actor=call.actor,
        mark=body.mark,
        **given,
    )
    stats = ("status", "cooled", "excluded", "retrieval_errors", "turn")
    return {
        "id": found.id,
        "entries": [dataclasses.asdict(entry) for entry in found.entries],
        "rendered": found.rendered,
        "actor": found.actor,
        "stats": {name: getattr(found, name) for name in stats},
    }


def _policy(words: str) -> cooldown.Cooldown:
    """Return the policy of `messages(3)`, `turns(2)` or `tokens(500)`."""
    found = _COOLDOWN.fullmatch(words)
    if not found:
        law = "a cooldown over HTTP is messages(N), turns(N) or tokens(N)"
        raise errors.ConfigError(
            errors.say(f"cooldown {words[:40]!r}", law, "Send messages(3)")
        )
    return getattr(cooldown, found[1])(int(found[2]))


def _captured(call: Call) -> dict:
    since, peer = call.count("since"), call.query.get("peer")
    found = call.principal.captured(call.path["session"], peer, since, actor=call.actor)
    page = found[:_PAGE]
    more = len(found) > len(page)
    return {"marks": list(page), "next": since + len(page) if more else None}


def _capture(call: Call) -> dict:
    body = call.body
    total = call.principal.capture(
        call.path["session"],
        body.messages,
        body.after,
        body.last,
        body.peer,
        actor=call.actor,
    )
    return {"captured": total}


_SESSION = "/v1/sessions/{session}"
ALL = (
    Verb(
        "append",
        "POST",
        f"{_SESSION}/messages",
        "Append a batch of messages, all or none, once a key.",
        _append,
        bodies.Append,
        for_actor=True,
        status=201,
    ),
    Verb(
        "create",
        "POST",
        _SESSION,
        "Make the session, also one that was deleted, anew and empty.",
        _create,
        status=201,
    ),
    Verb(
        "get",
        "GET",
        f"{_SESSION}/messages",
        "Return messages from number `since` on.",
        _get,
        query=("since", "limit"),
    ),
    Verb(
        "commit",
        "POST",
        f"{_SESSION}/commit",
        "Archive all but the last messages.",
        _commit,
        bodies.Commit,
    ),
    Verb("delete", "DELETE", _SESSION, "Delete the session.", _delete),
    Verb(
        "captured",
        "GET",
        f"{_SESSION}/capture",
        "Return the marks of what was captured for this actor and peer.",
        _captured,
        query=("since", "peer"),
        for_actor=True,
    ),
    Verb(
        "capture",
        "POST",
        f"{_SESSION}/capture",
        "Append messages of an agent's history behind those captured.",
        _capture,
        bodies.Captured,
        for_actor=True,
        status=201,
    ),
    Verb(
        "recall",
        "POST",
        "/v1/recall",
        "Return memories for a query, but for those served a moment ago.",
        _recall,
        bodies.Recall,
        for_actor=True,
    ),
    Verb(
        "remember",
        "POST",
        "/v1/items",
        "Keep a text; one that is known is not kept twice.",
        _remember,
        bodies.Remember,
        status=201,
    ),
    Verb(
        "forget",
        "POST",
        "/v1/forget",
        "Take a memory away: the item, its records, and what names its KV, whose pages "
        "go when the engine that has them takes its next turn.",
        _forget,
        bodies.Forget,
    ),
)
