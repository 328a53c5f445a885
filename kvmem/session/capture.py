"""Capture: an agent's history goes into its session, each message once.

    capture = Capture(me, session_resolver=lambda runtime: runtime.thread_id)
    capture.push(history, runtime)   # sends what the session does not have yet

The law: the log is the cursor. Every captured message says in its own line, as its
source, which message of which history it was; what was captured for (actor, session,
peer) is read from there, so that no restart, lost answer or crash can make the two
disagree. A history that grew sends its tail; one that was trimmed or edited sends what
is new in it; and a batch counts when it was acknowledged.

Actors: with a resolver its answer holds, None too, and it is asked with a frozen
runtime; without one the scope around the call does.
"""

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvmem import errors
from kvmem.session import marks, message

__all__ = ["Capture", "Pushed", "Transport", "append"]

ResolveFn = Callable[[Any], str | None]  # a frozen runtime -> an actor, or a session

_MAX_CURSORS = 1024  # known in this process; others are read from the log again
_MAX_BATCH_NBYTES = 900_000  # below what the service takes, with room for the frame
_MAX_TRIES = 3


class Pushed(NamedTuple):
    """What one push did."""

    session: str
    actor: str | None
    sent: int  # messages that were not there before
    total: int  # messages captured for this actor, session and peer


class Transport(Protocol):
    """What captures: a principal of this process, or a client of the service."""

    supports_request_actor_peer: bool

    @property
    def actor(self) -> str | None:
        """The actor of a call made now."""
        ...

    def acting_as(self, name: str | None) -> contextlib.AbstractContextManager:
        """Open a scope."""
        ...

    def captured(self, session: str, peer: str | None, since: int) -> Sequence[str]:
        """Return the marks of what was captured, from number `since` on."""
        ...

    def capture(
        self,
        session: str,
        messages: Sequence[Mapping],
        after: int,
        last: str | None,
        peer: str | None,
    ) -> int:
        """Append behind mark `after`, which is `last`, or raise Conflict."""
        ...


class Capture:
    """Pushes histories through one transport.

    Args:
        transport: a principal, or a client of the service.
        actor_resolver: asked for the actor of each push with the frozen runtime; None
            keeps the scope around the call.
        session_resolver: asked for the session's id likewise.
        peer: whom the messages are about, a part of the cursor's key.

    Raises:
        ValueError: there is a resolver, and the transport does not declare that a
            request carries its actor.
    """

    def __init__(
        self,
        transport: Transport,
        actor_resolver: ResolveFn | None = None,
        session_resolver: ResolveFn | None = None,
        peer: str | None = None,
    ):
        if getattr(transport, "is_async", False):
            asked, law = "a capture over an AsyncClient", "a push answers at once"
            cure = "Use a Client, and push in a thread (asyncio.to_thread)"
            raise ValueError(errors.say(asked, law, cure))
        if actor_resolver is not None:
            require_support(transport)
        self._transport, self._peer = transport, peer
        self._actor_resolver, self._session_resolver = actor_resolver, session_resolver
        self._cursors: OrderedDict[tuple, _Cursor] = OrderedDict()
        self._lock = threading.Lock()

    def push(
        self,
        messages: Sequence[Mapping],
        runtime: Any = None,
        session: str | None = None,
    ) -> Pushed:
        """Capture what of a history is not in its session yet.

        Args:
            messages: the whole history as it is now, each with "role" and "content",
                and "id" where it has one.
            runtime: given to the resolvers, as it is.
            session: the session's id, where no resolver says it.

        Raises:
            TypeError, ValueError: a resolver gave no name.
            Conflict: others captured this history at the same time, three times over.
        """
        if session is None:
            session = self._session_of(runtime)
        with self.scope(runtime):
            actor = self._transport.actor
            for last_try in (False,) * (_MAX_TRIES - 1) + (True,):
                try:
                    return self._push(messages, session, actor)
                except errors.Conflict:
                    with self._lock:
                        self._cursors.pop((session, actor, self._peer), None)
                    if last_try:
                        raise
        raise AssertionError("the last try returns or raises")

    @contextlib.contextmanager
    def scope(self, runtime: Any) -> Iterator[None]:
        """Open the scope of the actor that the resolver names, if there is one."""
        if self._actor_resolver is None:
            yield
            return
        with self._transport.acting_as(self._actor_resolver(runtime)):
            yield

    def _session_of(self, runtime: Any) -> str:
        if self._session_resolver is None:
            asked, law = "a push without a session", "a history belongs to one"
            raise errors.ConfigError(
                errors.say(asked, law, "Give session=, or a session_resolver")
            )
        return self._session_resolver(runtime)

    def _push(self, messages: Sequence, session: str, actor: str | None) -> Pushed:
        """Send what is unknown, batch by batch; the cursor follows the answers."""
        new = [marks.marked(each) for each in messages]
        cursor, sent = self._cursor(session, actor), 0
        with cursor.lock:
            missing = marks.unsent(cursor.seen, new, cursor.logged)
            for batch in _batches([messages[i] for i in missing]):
                last = cursor.logged[-1] if cursor.logged else None
                after = len(cursor.logged)
                self._transport.capture(session, batch, after, last, self._peer)
                cursor.logged += [new[i] for i in missing[sent : sent + len(batch)]]
                sent += len(batch)
            cursor.seen = new
            return Pushed(session, actor, sent, len(cursor.logged))

    def _cursor(self, session: str, actor: str | None) -> "_Cursor":
        """Return the cursor, read from the log where this process has none."""
        key = (session, actor, self._peer)
        with self._lock:
            if key in self._cursors:
                self._cursors.move_to_end(key)
                return self._cursors[key]
        logged = self._transport.captured(session, self._peer, since=0)
        with self._lock:
            cursor = self._cursors.setdefault(key, _Cursor(logged))
            if len(self._cursors) > _MAX_CURSORS:
                self._cursors.popitem(last=False)
        return cursor


class _Cursor:
    """What is known of one (actor, session, peer); one push at a time uses it."""

    def __init__(self, logged: Sequence[str]):
        self.logged = list(logged)  # marks in the log, in its order
        self.seen = list(logged)  # of the history as it was pushed last
        self.lock = threading.Lock()


def require_support(transport: Any) -> None:
    """Raise ValueError for a transport whose requests carry no actor."""
    if getattr(transport, "supports_request_actor_peer", False) is not True:
        raise ValueError(
            errors.say(
                f"an actor_resolver over {type(transport).__name__}",
                "it does not declare supports_request_actor_peer, so the actor that is "
                "resolved for a request could be lost",
                "Use a principal or kvmem.session.client, or leave the resolver out",
            )
        )


def append(
    session: Any,
    messages: Sequence[Mapping],
    after: int,
    last: str | None,
    actor: str | None,
    peer: str | None,
) -> int:
    """Append captured messages behind the marks that the caller knows of.

    Returns:
        How many messages are captured now for this actor, session and peer.

    Raises:
        Conflict: others were captured meanwhile, or the session is another one.
    """
    with session.place.locked("capture"):
        known = marks.in_log(session, actor, peer)
        if len(known) != after or (known and known[-1] != last):
            law = f"{len(known)} are captured, and another one is the last"
            asked = f"capture behind message {after} of session {session.id!r}"
            raise errors.Conflict(errors.say(asked, law, "Read the marks again"))
        sources = [marks.source(each, peer) for each in messages]
        session.append_captured(list(map(marks.plain, messages)), sources, peer, actor)
    return after + len(messages)


def _batches(messages: Sequence[Mapping]) -> Iterator[list[Mapping]]:
    """Yield messages in batches that the log and the service take."""
    batch, nbytes = [], 0
    for each in messages:
        size = len(json.dumps(each))
        if batch and (
            len(batch) == message.MAX_BATCH or nbytes + size > _MAX_BATCH_NBYTES
        ):
            yield batch
            batch, nbytes = [], 0
        batch.append(each)
        nbytes += size
    if batch:
        yield batch
