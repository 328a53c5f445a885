"""Conversations: sessions whose KV one engine computes and one page store keeps.

The room where sessions and pages meet. The law: a page is kept while a chain names it,
so the engine's page store is the conversations' own, and what no chain of any session
names is collected. Forgetting a memory cuts every chain at the first chunk that its
text touches and returns when the bytes of all that followed are gone from the disk;
deleting a session frees what no other one names.

    conversations = Conversations(engine, sessions)
    talk = conversations.open(me.session("s1"), actor="planner")
    me.forget("memories/tea")            # its pages too

Pages are kept under a salt made of the store's secret and their owner, which nobody
can choose: equal texts of two users share nothing, those of one user's sessions do.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from kvmem.conversation import chain as chains
from kvmem.conversation.chain import Chain, Facts, Span
from kvmem.conversation.conversation import Conversation, Options
from kvmem.conversation.transcript import turns_of
from kvmem.conversation.turn import Forgotten
from kvmem.errors import (
    ConfigError,
    Conflict,
    CorruptPage,
    FormatMismatch,
    StoreLocked,
    say,
)
from kvmem.serve import Engine, Identity
from kvmem.session import (
    Cooldown,
    Principal,
    Session,
    SessionStore,
    named,
    resident,
    unnamed,
)
from kvmem.session.fsck import Checked, Violation
from kvmem.store import Erased, PageKey

__all__ = ["Conversations"]

_ATTEMPTS = 8  # at a manifest that others replace meanwhile


class Conversations:
    """All conversations of one session store on one engine."""

    def __init__(self, engine: Engine, sessions: SessionStore):
        """Take over what deleting and forgetting mean for pages.

        Args:
            engine: with a store of its own; one that only reads never frees anything.
            sessions: whose messages these are.

        Raises:
            ConfigError: the engine keeps no records, or its model has no chat template.
        """
        if engine.recall is None:
            law = "a chain's pages outlive the process in a page store"
            cure = "Give the engine's config a table [store] with a root of its own"
            raise ConfigError(say("conversations without a store", law, cure))
        if engine.tokenizer.template is None:
            law = "what stands around messages is the checkpoint's chat template"
            cure = "Use an instruct checkpoint"
            raise ConfigError(say("conversations of a model without one", law, cure))
        self.engine, self.sessions = engine, sessions
        self.pages = engine.recall.store
        self._forgotten = Forgotten(self._clear_up, self._catch_up)
        self._caught_up = b""  # with what stores without conversations took away
        self._catch_up()
        sessions.on_forget.append(self._forget)
        sessions.on_delete.append(self._delete)
        sessions.fsck_hooks.append(self._judge)

    def open(
        self,
        session: Session,
        actor: str | None = None,
        options: Options = Options(),  # noqa: B008 -- frozen
    ) -> Conversation:
        """Return an actor's side of a session, made or not; None: the scope's actor."""
        me = session.principal
        actor = me.actor_of(actor)
        salt = me.salt()
        facts = self._facts(salt)
        return Conversation(
            self.engine,
            session,
            actor,
            facts,
            Identity(salt=salt),
            options,
            self._forgotten,
        )

    def resident(self, principal: Principal) -> Cooldown:
        """Return the cooldown under which a memory is held back while it is in sight.

        That is while it stands in a message that an actor's next turn is fed: one that
        no commit archived, whether its rows are still there or must be computed again.
        A system message is made anew each turn, so what stood in it is out of sight.
        """

        def live(session: str, actor: str | None) -> frozenset[str]:
            turns = turns_of(principal.session(session).live(), actor)
            return frozenset(part["uri"] for each in turns for part in each.memories)

        return resident(live)

    def collect(self) -> Erased:
        """Free every page that no chain names; return what went."""
        last = unnamed.last(self.sessions.root, self.sessions.io)
        erased = self._retain(self._named())
        self._caught_up = last
        return erased

    def drop(self, session: Session, actor: str | None = None) -> Erased:
        """Take one actor's chain away, and the pages that only it named."""
        _, generation = session.chains.get(actor)
        session.chains.drop(actor, generation)
        return self.collect()

    def close(self) -> None:
        """Close the engine's page store and the sessions' files; no turn follows.

        The sessions' store may be used on, by other Conversations too.
        """
        self._forgotten.is_closed = True
        for hooks, mine in (
            (self.sessions.on_forget, self._forget),
            (self.sessions.on_delete, self._delete),
            (self.sessions.fsck_hooks, self._judge),
        ):
            with contextlib.suppress(ValueError):  # it was closed before
                hooks.remove(mine)
        self.engine.close()
        self.sessions.close()

    def __enter__(self) -> "Conversations":
        """Return the conversations."""
        return self

    def __exit__(self, *_) -> None:
        """Close them."""
        self.close()

    def _facts(self, salt: bytes) -> Facts:
        facts = self.pages.facts
        tag = chains.salt_tag(salt)
        return Facts(facts.model_id, facts.format_id, facts.chunk_tokens, tag)

    def _named(self, but: Session | None = None) -> Iterator[PageKey]:
        """Yield every key that a chain of any session names, that of `but` excepted."""
        sessions, gone = self.sessions, None if but is None else but.place.identity
        for identity, _, blob in named.chains(sessions.root, sessions.io):
            held = chains.read(blob)
            if identity == gone or held is None:
                continue
            owner = sessions.principal(identity.account, identity.user)
            if held.facts == self._facts(owner.salt()):
                yield from held.keys(Identity(salt=owner.salt()))

    def _retain(self, keys: Iterable[PageKey]) -> Erased:
        if not self.pages.writable:
            law = "only the holder of the page store's lock frees pages"
            cure = "Do it where the engine's store is open for writing"
            raise StoreLocked(say("freeing pages of conversations", law, cure))
        erased = self.pages.retain(frozenset(keys))
        epoch = self.engine.stats().weights_epoch
        self.engine.reset(weights_epoch=epoch)  # pages of this process name no chain
        return erased

    def _clear_up(self) -> None:
        """Free what a turn left behind that keeps no chain."""
        if self.pages.writable:
            self.collect()

    def _catch_up(self) -> None:
        """Free what stores without conversations took the last name of."""
        last = unnamed.last(self.sessions.root, self.sessions.io)
        if last != self._caught_up and self.pages.writable:
            self._forgotten.count += 1  # turns that run keep no KV
            self.engine.disown()
            self.collect()

    def _delete(self, session: Session, manifests: dict) -> None:
        """Free what only a session that is being deleted named."""
        if manifests:
            self._retain(self._named(but=session))

    def _forget(self, principal: Principal, uri: str) -> None:
        """Cut every chain of a user before a memory, and free what followed it.

        The logs do not tell it any more, wherever the item had been moved since it was
        told; so every memory goes that stands in a chain and not in its log.

        Raises:
            FormatMismatch: pages of another model or format may hold it still.
        """
        self._forgotten.count += 1  # turns that have begun keep no KV
        elsewhere = set()
        for session in self._chained(principal):
            for actor in session.chains.actors():
                namespace = self._cut(session, actor, uri)
                if namespace not in (None, self._facts(b"").namespace):
                    elsewhere.add(namespace)
        self.engine.disown()  # what runs may have been fed it
        self._retain(self._named())
        if elsewhere:
            asked = f"forgetting in the pages of {', '.join(sorted(elsewhere))}"
            law = "this engine's store is that of another model or format"
            cure = "Forget it again with an engine of that model and format"
            raise FormatMismatch(say(asked, law, cure))

    def _chained(self, principal: Principal) -> tuple[Session, ...]:
        """Return a user's sessions that have chains, those of damaged logs included."""
        every = named.chains(self.sessions.root, self.sessions.io)
        ids = {who.session for who, _, _ in every if who[:2] == principal.owner}
        return tuple(map(principal.session, sorted(ids)))

    def _cut(self, session: Session, actor: str | None, uri: str) -> str | None:
        """Cut one chain; return under which names its pages are, if it was cut.

        One whose log is damaged goes whole: nothing can be put into such a session.
        """
        for _ in range(_ATTEMPTS):
            blob, generation = session.chains.get(actor)
            if blob is None:
                return None
            held = chains.read(blob)
            try:
                is_gone = self._gone(session, uri)
            except (CorruptPage, FormatMismatch):
                session.chains.drop(actor, generation)
                return held and held.facts.namespace
            left = None if held is None else held.without(is_gone)
            if left == held and held is not None:
                return None
            try:
                if left is None:
                    session.chains.drop(actor, generation)
                    return None
                left = self._at_hand(session.principal, left)
                session.chains.put(actor, left.encode(), generation)
                return held.facts.namespace
            except Conflict:
                continue
        asked = f"forgetting {uri!r} in session {session.id!r}"
        law = f"its chain was replaced {_ATTEMPTS} times meanwhile"
        raise Conflict(say(asked, law, "Forget it again"))

    def _at_hand(self, owner: Principal, held: Chain) -> Chain:
        """Cut a chain to what can be resumed: states are not kept at every chunk."""
        salt = owner.salt()
        if held.facts != self._facts(salt):
            return held
        there = self.pages.contains(held.keys(Identity(salt=salt)))
        return held.cut(there * held.facts.chunk_tokens)

    def _gone(self, session: Session, uri: str) -> Callable[[Span], bool]:
        """Return what says of a memory in a chain that it is not told any more."""
        told = {
            (message.seq, part.get("uri"))
            for message in session.messages()
            for part in message.parts
        }
        is_gone = getattr(self.sessions.retriever, "gone", lambda me, uris: ())

        def gone(span: Span) -> bool:
            if span.is_at(uri):
                return True
            if span.seq >= 0:
                return (span.seq, span.uri) not in told
            return span.uri in is_gone(session.principal, [span.uri])

        return gone

    def _judge(self, checked: Checked) -> Iterator[Violation]:
        """Judge a session's chains for fsck: I8 to I10."""
        owner = self.sessions.principal(*checked.owner)
        mine = self._facts(owner.salt())
        for actor, blob in checked.manifests.items():
            who = f"the chain of {actor or 'the user'}"
            held = chains.read(blob)
            if held is None:
                yield Violation("I8", f"{who} cannot be read")
                continue
            if held.covers > checked.clock - 1:
                yield Violation(
                    "I8", f"{who} covers {held.covers} of {checked.clock} messages"
                )
            if held.facts.salt != mine.salt:
                yield Violation("I10", f"{who} names pages of another owner")
            elif held.facts == mine:
                keys = held.keys(Identity(salt=owner.salt()))
                there = self.pages.contains(keys)
                if there < len(keys):
                    yield Violation("I9", f"{who}: {there} of {len(keys)} chunks")
