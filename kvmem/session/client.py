"""Clients of the service: the verbs of a principal over HTTP, now or awaited.

    with Client("http://127.0.0.1:8350", key) as me:
        sess = me.session("s1")
        found = me.recall("tea?", session=sess)
        sess.append([{"role": "user", "content": "hello"}], key="turn-1")

    async with AsyncClient(url, key) as me:
        found = await me.recall("tea?", session=me.session("s1"))

The law: the same verbs, answers and errors as in process. An actor of a call wins over
the scope around it (`acting_as`), which wins over the client's own; it travels with
append, recall and capture, and its view is asked before anything is kept or forgotten.
A verb is sent once: whether to send it again is the caller's to say, and a key makes
that safe.

Needs the extra `server` (httpx).
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from kvmem.errors import ConfigError, Denied, say
from kvmem.session import actors, calls, ids, views
from kvmem.session.append import Appended
from kvmem.session.asking import Recall
from kvmem.session.calls import Call, Verb
from kvmem.session.commit import Committed
from kvmem.session.cooldown import Cooldown, messages
from kvmem.session.item_rows import Item
from kvmem.session.message import Message

try:
    import httpx
except ImportError as missing:
    raise ImportError(
        say(
            "kvmem.session.client",
            "httpx is not installed",
            'Install the extra: pip install "kvmem[server]"',
        )
    ) from missing

__all__ = ["AsyncClient", "Client", "RemoteSession"]

_ACTOR = "X-Kvmem-Actor"


class _Verbs:
    """The verbs, as requests and what their answers mean; `_run` sends them."""

    supports_request_actor_peer = True

    def __init__(self, key: str, actor: str | None):
        self._headers = {"Authorization": f"Bearer {key}"}
        self._default = None if actor is None else ids.check_actor(actor)

    @property
    def actor(self) -> str | None:
        """The actor of a call made now: the scope's, else the client's own."""
        return actors.resolve(self, None, self._default)

    def acting_as(self, name: str | None) -> contextlib.AbstractContextManager:
        """Open a scope whose calls are made for an actor; see `actors.acting_as`."""
        return actors.acting_as(name, self)

    def session(self, id_: str) -> "RemoteSession":
        """Return a handle of a session; nothing is sent."""
        return RemoteSession(self, ids.check_session(id_))

    def remember(
        self,
        text: str,
        uri: str | None = None,
        peer: str | None = None,
        key: str | None = None,
        actor: str | None = None,
    ) -> Item:
        """Keep a text and return its item; as `Principal.remember`.

        A request says no actor here: whether its view has the place is asked before
        anything is sent.
        """
        place = views.owned_by(uri or "memories", peer)
        views.checked(place, self._resolved(actor), "remember", whole=uri is None)
        body = calls.given(text=text, uri=uri, peer=peer, key=key)
        return self._run(calls.remembered(body))

    def forget(self, uri: str, actor: str | None = None) -> tuple[str, ...]:
        """Take a memory away everywhere and return the uris that were there.

        The actor's view is asked as by `remember`. Pages of its KV go as
        `Principal.forget` says of a store without conversations.
        """
        views.checked(uri, self._resolved(actor), "forget", whole=True)
        return self._run(calls.forgotten({"uri": uri}))

    def recall(
        self,
        query: str,
        session: "RemoteSession | str | None" = None,
        cooldown: Cooldown = messages(3),  # noqa: B008 -- frozen
        actor: str | None = None,
        peer_scope: str | None = None,
        request_id: str | None = None,
        mark: str = "return",
        limit: int | None = None,
    ) -> Recall:
        """Return memories for a query; as `Principal.recall`.

        Args:
            cooldown: `messages(n)`, `turns(n)` or `tokens(n)`; what is resident is
                known where the chain is.
            peer_scope: None for the rules' own.
        """
        name = session._of(self) if isinstance(session, RemoteSession) else session
        if session is not None and request_id is None:
            request_id = uuid.uuid4().hex  # kept, so that `carries` can name it
        body = calls.given(
            query=query,
            session=name,
            cooldown=calls.words(cooldown),
            peer_scope=peer_scope,
            request_id=request_id,
            mark=mark,
            limit=limit,
        )
        return self._run(calls.recalled(body, self._resolved(actor)))

    def captured(
        self,
        session: str,
        peer: str | None = None,
        since: int = 0,
        actor: str | None = None,
    ) -> list[str]:
        """Return the marks of what was captured; see `kvmem.session.capture`."""
        path = f"{calls.path_of(session)}/capture"
        return self._run(calls.marks(path, peer, since, self._resolved(actor)))

    def capture(
        self,
        session: str,
        messages: Sequence[Mapping],
        after: int,
        last: str | None = None,
        peer: str | None = None,
        actor: str | None = None,
    ) -> int:
        """Append captured messages; see `kvmem.session.capture`."""
        body = calls.given(messages=list(messages), after=after, last=last, peer=peer)
        path = f"{calls.path_of(session)}/capture"
        return self._run(calls.captured(path, body, self._resolved(actor)))

    def _resolved(self, actor: str | None) -> str | None:
        return actors.resolve(self, actor, self._default)

    def _run(self, verb: Verb) -> Any:
        raise NotImplementedError


class Client(_Verbs):
    """A client that answers now.

    Args:
        url: where the service is, as http://127.0.0.1:8350.
        key: the user's key.
        actor: of calls that neither name one nor are in a scope.
        timeout_s: for one request.
        http: an `httpx.Client` to send with, in place of one of its own.
    """

    def __init__(
        self,
        url: str,
        key: str,
        actor: str | None = None,
        timeout_s: float = 30.0,
        http: httpx.Client | None = None,
    ):
        super().__init__(key, actor)
        self._http = http or httpx.Client(base_url=url, timeout=timeout_s)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def _run(self, verb: Verb) -> Any:
        try:
            call = next(verb)
            while True:
                request = _request(self._http, self._headers, call)
                call = _told(verb, self._http.send(request))
        except StopIteration as end:
            return end.value


class AsyncClient(_Verbs):
    """A client whose verbs are awaited; its arguments are those of `Client`."""

    is_async = True

    def __init__(
        self,
        url: str,
        key: str,
        actor: str | None = None,
        timeout_s: float = 30.0,
        http: httpx.AsyncClient | None = None,
    ):
        super().__init__(key, actor)
        self._http = http or httpx.AsyncClient(base_url=url, timeout=timeout_s)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def _run(self, verb: Verb) -> Any:
        try:
            call = next(verb)
            while True:
                request = _request(self._http, self._headers, call)
                call = _told(verb, await self._http.send(request))
        except StopIteration as end:
            return end.value


class RemoteSession:
    """A session of the service; its verbs answer as those of its client do."""

    def __init__(self, client: _Verbs, id_: str):
        self._client, self.id = client, id_

    @property
    def clock(self) -> int:
        """How many messages the session ever had."""
        return self._client._run(calls.clock(calls.path_of(self.id)))

    def append(
        self,
        messages: Sequence[Mapping],
        key: str | None = None,
        peer: str | None = None,
        actor: str | None = None,
        carries: Sequence[Recall | str] = (),
    ) -> Appended:
        """Append a batch, all or nothing, once a key; as `Session.append`."""
        body = calls.given(messages=list(messages), key=key, peer=peer)
        names = [each.id if isinstance(each, Recall) else each for each in carries]
        body |= {"carries": names} if names else {}
        actor = self._client._resolved(actor)
        return self._client._run(calls.appended(calls.path_of(self.id), body, actor))

    def messages(self, since: int = 0) -> tuple[Message, ...]:
        """Return the messages from number `since` on, archived ones too."""
        return self._client._run(calls.messages(calls.path_of(self.id), since))

    def commit(self, keep: int = 0) -> Committed:
        """Archive all but the last `keep` messages."""
        return self._client._run(calls.committed(calls.path_of(self.id), keep))

    def create(self) -> bool:
        """Make the session, also one that was deleted, anew; say whether this did."""
        return self._client._run(calls.created(calls.path_of(self.id)))

    def delete(self) -> None:
        """Delete the session: it stays deleted until `create` makes it anew."""
        return self._client._run(calls.deleted(calls.path_of(self.id)))

    def _of(self, client: _Verbs) -> str:
        """Return its id if it is of this client's user, else raise Denied."""
        if self._client._headers != client._headers:
            law = "a session's ledger is its own user's"
            cure = "Use a session of the client that asks"
            raise Denied(say("recall for a session of another key", law, cure))
        return self.id


def _request(http: Any, headers: Mapping, call: Call) -> httpx.Request:
    actor = {} if call.actor is None else {_ACTOR: call.actor}
    try:
        return http.build_request(
            call.method,
            call.path,
            json=call.body,
            params=call.query,
            headers={**headers, **actor},
        )
    except (ValueError, TypeError, RecursionError) as bad:  # no JSON can say it
        asked = f"{call.method} {call.path}"
        law = f"what is sent is JSON in UTF-8, and {ascii(str(bad))[:80]}"
        cure = "Send finite numbers, whole characters and plain values"
        raise ConfigError(say(asked, law, cure)) from bad


def _told(verb: Verb, response: httpx.Response) -> Call:
    """Give a verb its answer; return what it asks next."""
    try:
        body = response.json()
    except ValueError:
        body = None
    return calls.told(verb, response.status_code, body)
