"""A principal: the one way to anything in a store, for one user of one account.

The law: account and user are fixed when it is made, and every handle comes from it;
there is no read path without one. An actor is a view of its user's memory, given a call
or by an open scope, and a principal that requires an actor refuses calls without one.

    me = store.principal("lab", "ann")
    me.session("s1").append([...])
    me.recall("what tea does she like?", session=me.session("s1"))
"""

import contextlib
import dataclasses
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvmem.errors import ConfigError, Denied, KVMemError, say
from kvmem.session import (
    actors,
    capture,
    forget,
    forgetting,
    ids,
    late,
    marks,
    place,
    recall,
    traces,
    unnamed,
    views,
)
from kvmem.session.asking import Entry, Mark, Recall, RenderFn, ask, text_of
from kvmem.session.cooldown import Cooldown, messages
from kvmem.session.identity import Identity
from kvmem.session.items import Item, Items
from kvmem.session.session import Session


@dataclasses.dataclass(frozen=True, eq=False)
class Principal:
    """One user of one account in one open store."""

    store: object = dataclasses.field(repr=False)
    account: str
    user: str
    require_actor: bool = False

    supports_request_actor_peer = True  # captures may resolve an actor for each call

    def __post_init__(self):
        object.__setattr__(self, "account", ids.check_account(self.account))
        object.__setattr__(self, "user", ids.check_user(self.user))

    @property
    def owner(self) -> tuple[str, str]:
        """Return (account, user)."""
        return self.account, self.user

    @property
    def folder(self) -> Path:
        """Return the folder of all that this user owns; it may not be there yet."""
        return place.user_folder(self.store.root, *self.owner)

    def session(self, id: str) -> Session:
        """Return the handle of a session, made or not; its id is checked here."""
        identity = Identity(*self.owner, ids.check_session(id))
        return Session(self, self.store.place(identity))

    def sessions(self) -> tuple[str, ...]:
        """Return the ids of this user's sessions."""
        return self.store.session_ids(*self.owner)

    @property
    def items(self) -> Items:
        """Return the user's items, each verb under its actor's view."""
        return Items(self.store.book(*self.owner), self.actor_of)

    def remember(
        self,
        text: str,
        uri: str | None = None,
        peer: str | None = None,
        key: str | None = None,
        actor: str | None = None,
    ) -> Item:
        """Keep a text as an item; see `Items.remember`."""
        return self.items.remember(text, uri, peer, key, actor)

    def forget(self, uri: str, actor: str | None = None) -> tuple[str, ...]:
        """Erase an item, or all below a folder, wherever it is known; return the uris.

        Its item goes first, so that no recall finds it any more; then what sessions
        hold of it (ledgers, kept answers, the parts of messages it stood in), or of
        what it was before it was changed, moved or deleted; and then whoever asked to
        be told with `store.on_forget` does its part. When this returns, the bytes are
        gone. Forgetting again completes what was cut off. What is damaged or busy
        stops nothing: all the rest is forgotten first.

        Pages of KV are freed by `kvmem.conversation.Conversations` on this store. In a
        store without, as that of the HTTP service, the user's chains are taken away,
        so that nothing names their pages; their bytes go when Conversations of this
        root begin, take their next turn, or `collect`; see `unnamed`.

        Raises:
            Denied: it is another peer's, or a folder that may hold some.
            Busy, CorruptPage, FormatMismatch, OSError: of what could not be cleaned,
                the first; the others are its notes. Mend it and forget it again.
        """
        actor = self.actor_of(actor)
        views.checked(uri, actor, "forget", whole=True)
        memory = forget.Memory(uri, *self._traces(uri), actor)
        memory = forgetting.begun(self.store, self.owner, memory)
        is_alone = not self.store.on_forget  # nobody here frees pages
        noted = unnamed.noted(self.store.root, self.store.io, is_alone)
        with forget.Faults() as faults, noted:
            found = faults.kept(self.items.forget, uri, actor=actor)
            self.store.late.note(self.owner, found or (), memory.digests)
            for id in self.sessions():
                held = self.session(id).place
                faults.kept(forget.in_session, held, memory, not is_alone)
            for name in self.store.nameless(*self.owner):
                faults.kept(forget.in_nameless, name)
            self.store.recent.forget(self.owner)
            folder = place.sessions_folder(self.store.root, *self.owner)
            faults.kept(forget.leftovers, folder, self.store.io, self.store.locks)
            for hook in self.store.on_forget:
                faults.kept(hook, self, uri)
        forgetting.done(self.store, self.owner, memory)
        return found

    def captured(
        self,
        session: str,
        peer: str | None = None,
        since: int = 0,
        actor: str | None = None,
    ) -> list[str]:
        """Return the marks of what was captured; see `capture`."""
        found = marks.in_log(self.session(session), self.actor_of(actor), peer)
        return list(found[since:])

    def capture(
        self,
        session: str,
        messages: Sequence[Mapping],
        after: int,
        last: str | None = None,
        peer: str | None = None,
        actor: str | None = None,
    ) -> int:
        """Append captured messages behind those that are known; see `capture`."""
        actor = self.actor_of(actor)
        handle = self.session(session)
        return capture.append(handle, messages, after, last, actor, peer)

    @property
    def actor(self) -> str | None:
        """Return the actor of a call made now; see `actor_of`."""
        return self.actor_of()

    def acting_as(self, name: str | None) -> contextlib.AbstractContextManager:
        """Open a scope in which this user's calls are made for an actor."""
        return actors.acting_as(name, self.owner)

    def actor_of(self, actor: str | None = None) -> str | None:
        """Return the actor of a call: the given one, else the open scope's.

        Raises:
            ActorRequired: there is none, and this principal requires one.
        """
        return actors.resolve(self.owner, actor, required=self.require_actor)

    def salt(self, actor: str | None = None) -> bytes:
        """Return the 32 bytes that keep this user's pages apart from all others'."""
        names = [*self.owner, *([] if actor is None else [ids.check_actor(actor)])]
        text = "".join(f"{len(name)}:{name}" for name in names)
        return hmac.digest(self.store.secret, text.encode(), hashlib.sha256)

    def recall(
        self,
        query: str,
        session: Session | None = None,
        cooldown: Cooldown = messages(3),  # noqa: B008 -- frozen
        actor: str | None = None,
        peer_scope: str | None = None,
        request_id: str | None = None,
        mark: Mark = "return",
        limit: int = 8,
        render: RenderFn | None = None,
        served=None,
    ) -> Recall:
        """Return memories for a query, without those served a moment ago.

        Args:
            query: what to look for.
            session: whose ledger says what was served; None: nothing is held back.
            cooldown: for how long a served memory is held back.
            actor: whose view and ledger; None: the open scope's.
            peer_scope: "actor" is the user's own and the actor's; "all" adds other
                peers, ranked lower. None: as the store's rules have it.
            request_id: a retry under the same id is answered the same.
            mark: a memory counts as served when this "return"s, or when an "append"
                names the recall in `carries`.
            limit: of memories that are given.
            render: called with a hit, returns the tier it is given in ("uri",
                "abstract", "overview", "full"), or None to leave it out.
            served: called with the entries; False if nothing of them is shown, so
                that nothing is recorded.

        Raises:
            Conflict: the request id was used for another query.
            Denied: the session is another user's, or another store's.
        """
        rules = self.store.rules
        asked = ask(
            query,
            self.actor_of(actor),
            rules.peer_scope if peer_scope is None else peer_scope,
            cooldown,
            limit,
            request_id,
            mark,
            render,
            served,
        )
        search = recall.searcher(self.store.retriever, self, asked)
        if session is not None:
            self._check_own(session)
        found = (
            recall.run(asked, None, None, search)
            if session is None
            else session.recalled(asked, search)
        )
        found = self._remembered(found, session)
        name = None if session is None else session.id
        self.store.recent.note(self.owner, name, found)
        return found

    def _traces(self, uri: str) -> traces.Traces:
        """Return by what the items at a uri and below it are known in sessions."""
        with self.store.book(*self.owner).read() as cursor:
            return traces.of(cursor, uri) if cursor else traces.Traces()

    def _check_own(self, session: Session) -> None:
        if not isinstance(session, Session):
            asked, law = f"recall for session {session!r}", "it takes a handle"
            raise ConfigError(say(asked, law, "Pass principal.session(id)"))
        if session.principal.owner != self.owner:
            law = "a session's ledger is its own user's"
            raise Denied(say("recall for another user's session", law, "Use your own"))
        if session.principal.store.root != self.store.root:
            law = "a session's ledger tells memories of its own store"
            cure = "Use a session of this store"
            raise Denied(say("recall for a session of another store", law, cure))

    def _remembered(self, found: Recall, session: Session | None) -> Recall:
        """Drop what was forgotten while the recall ran, and what it recorded of it.

        An item is gone before sessions are cleaned. So either this sees it gone, or
        the cleaning comes after what was recorded here. Messages stay as they are: a
        recall writes none, and an item may have been moved. What cannot be cleaned now
        is noted, for the next forgetting of that uri.
        """
        entries = {entry.uri: entry for entry in found.entries}
        try:
            gone = late.gone(self, entries)
        except Exception as error:  # whatever a retriever may raise: nobody knows
            gone, reason = entries, f"what was forgotten cannot be asked: {error!r}"
            found = dataclasses.replace(found, status="unavailable", reason=reason)
        gone = entries.keys() & gone
        if not gone:
            return found
        faults = [self._cleaned(session, entries[uri]) for uri in gone]
        if (reason := next(filter(None, faults), None)) is not None:
            found = dataclasses.replace(found, status="unavailable", reason=reason)
        kept = tuple(e for e in found.entries if e.uri not in gone)
        return dataclasses.replace(
            found,
            entries=kept,
            records={u: r for u, r in found.records.items() if u not in gone},
            rendered=text_of(kept) if found.rendered else "",
        )

    def _cleaned(self, session: Session | None, entry: Entry) -> str | None:
        """Take a memory out of what a recall recorded; return why it cannot be."""
        memory = forget.Memory(entry.uri)
        try:
            if session is not None and session.exists:
                forget.servings(session.place, memory)
        except (KVMemError, OSError) as error:
            words = frozenset({traces.digest(entry.text)})
            with contextlib.suppress(OSError):
                note = memory._replace(digests=words)
                forgetting.begun(self.store, self.owner, note)
            return f"{error} (and forget {entry.uri!r} again)"
        return None
