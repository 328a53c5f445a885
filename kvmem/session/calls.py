"""What a client asks of the service, and what it makes of the answers.

A verb is a generator: it yields requests and is sent their answers, so that a client
that answers now and one that is awaited share every line of it. The law: nothing here
touches the network.

    verb = messages("/v1/sessions/s1", since=0)
    call = next(verb)          # GET /v1/sessions/s1/messages?since=0
    told(verb, 200, {...})     # the next request, or StopIteration with the messages
"""

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from kvmem.errors import ConfigError, NotFound, say
from kvmem.session import ids, problems
from kvmem.session.append import Appended
from kvmem.session.asking import Entry, Recall
from kvmem.session.commit import Committed
from kvmem.session.cooldown import Cooldown
from kvmem.session.item_rows import Item
from kvmem.session.message import Message


class Call(NamedTuple):
    """One request to be sent."""

    method: str
    path: str
    body: Mapping | None = None
    query: Mapping | None = None
    actor: str | None = None


type Verb[T] = Generator[Call, Any, T]  # yields requests, is sent their answers


def told(verb: Verb, status: int, body: object) -> Call:
    """Give a verb its answer, or the error of it; return what it asks next."""
    if 200 <= status < 300:
        return verb.send(body)
    return verb.throw(problems.error_of(status, body))


def given(**members: object) -> dict[str, object]:
    """Return the members that say something."""
    return {name: value for name, value in members.items() if value is not None}


def words(policy: Cooldown) -> str:
    """Return a cooldown as the service reads it."""
    if policy.live is not None:
        law = "the chain that it asks is not on the client's side"
        cure = "Use messages(n), turns(n) or tokens(n)"
        raise ConfigError(say("a resident cooldown over HTTP", law, cure))
    return f"{policy.unit}({policy.n})"


def path_of(session: str) -> str:
    """Return the path of a session on the service."""
    return f"/v1/sessions/{quote(ids.check_session(session), safe='')}"


def created(path: str) -> Verb[bool]:
    """Make a session; return whether this call made it."""
    return (yield Call("POST", path))["created"]


def deleted(path: str) -> Verb[None]:
    """Delete a session."""
    yield Call("DELETE", path)


def remembered(body: Mapping) -> Verb[Item]:
    """Keep a text and return its item."""
    return Item(**(yield Call("POST", "/v1/items", body)))


def forgotten(body: Mapping) -> Verb[tuple[str, ...]]:
    """Take a memory away and return the uris that were there."""
    answer = yield Call("POST", "/v1/forget", body)
    return tuple(answer["forgotten"])


def recalled(body: Mapping, actor: str | None) -> Verb[Recall]:
    """Ask for memories."""
    answer = yield Call("POST", "/v1/recall", body, actor=actor)
    return Recall(
        answer["id"],
        tuple(Entry(**each) for each in answer["entries"]),
        rendered=answer["rendered"],
        actor=answer["actor"],
        **answer["stats"],
    )


def appended(path: str, body: Mapping, actor: str | None) -> Verb[Appended]:
    """Append a batch and return where it stands."""
    answer = yield Call("POST", f"{path}/messages", body, actor=actor)
    return Appended(answer["first"], answer["stop"], answer["is_repeat"])


def committed(path: str, keep: int) -> Verb[Committed]:
    """Archive all but the last messages."""
    return Committed(**(yield Call("POST", f"{path}/commit", {"keep": keep})))


def messages(path: str, since: int) -> Verb[tuple[Message, ...]]:
    """Return the messages from a number on, page by page."""
    found: list[Message] = []
    at: int | None = since
    while at is not None:
        try:
            answer = yield Call("GET", f"{path}/messages", query={"since": at})
        except NotFound:  # not made yet
            return ()
        found += map(_message, answer["messages"])
        at = answer["next"]
    return tuple(found)


def _message(fields: Mapping) -> Message:
    tuples = {name: tuple(fields[name]) for name in ("parts", "sources", "carries")}
    return Message(**(dict(fields) | tuples))


def clock(path: str) -> Verb[int]:
    """Return how many messages a session ever had."""
    query = {"limit": 0}
    try:
        return (yield Call("GET", f"{path}/messages", query=query))["clock"]
    except NotFound:  # not made yet
        return 0


def marks(path: str, peer: str | None, since: int, actor: str | None) -> Verb[list]:
    """Return the marks of what was captured, page by page."""
    found: list[str] = []
    at: int | None = since
    while at is not None:
        query = given(peer=peer, since=at)
        answer = yield Call("GET", path, query=query, actor=actor)
        found += answer["marks"]
        at = answer["next"]
    return found


def captured(path: str, body: Mapping, actor: str | None) -> Verb[int]:
    """Send one capture and return how many are captured now."""
    return (yield Call("POST", path, body, actor=actor))["captured"]
