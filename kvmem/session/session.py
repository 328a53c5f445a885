"""A session's handle: one user's conversation, by its id.

A handle is lazy: making one touches no disk. The law: whose session it is was said when
its principal was made, and no verb changes it; an actor filters what is recalled and
owns nothing.

    session = principal.session("s1")
    session.append([{"role": "user", "content": "hello"}], key="turn-1")
    session.clock, session.messages()
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvmem.errors import CorruptPage
from kvmem.session import (
    append,
    archive,
    commit,
    lines,
    log,
    materialise,
    message,
    meta,
    recall,
    state,
    tombstone,
    unnamed,
)
from kvmem.session import chains as chain_files
from kvmem.session.append import Appended, CheckedBatch
from kvmem.session.asking import Ask, Recall, SearchFn
from kvmem.session.commit import Committed, ExtractFn
from kvmem.session.ledger import Record
from kvmem.session.message import Message
from kvmem.session.place import HISTORY, LOG, Place


class Session:
    """One session of one principal."""

    def __init__(self, principal, place: Place):
        """Be the handle of a session; `Principal.session` makes it."""
        self.principal, self.place = principal, place  # place: its files and locks
        self._generation: int | None = None  # which life of the session this is of

    def __repr__(self) -> str:
        account, user, session = self.place.identity
        return f"Session({account}/{user}/{session})"

    @property
    def id(self) -> str:
        """Return the session's id."""
        return self.place.identity.session

    @property
    def exists(self) -> bool:
        """Say whether the session is there: made, and not deleted since."""
        is_dead = self.place.rules.keeps_tombstones and (
            tombstone.read(self.place).is_deleted
        )
        return not is_dead and self.place.io.is_file(self.place.file(LOG))

    @property
    def clock(self) -> int:
        """Return the number of messages ever appended, 0 before the first."""
        found = self._log()
        return 0 if found is None else meta.clock(self.place, found)

    @property
    def chains(self) -> chain_files.Chains:
        """Return the session's KV chains, one an actor."""
        return chain_files.Chains(self.place, self._bound())

    def create(self) -> bool:
        """Make the session, also one that was deleted, anew and empty.

        Returns:
            Whether this call made it.
        """
        place = self.place
        with place.locked():
            life = tombstone.read(place)
            if life.is_deleted:
                materialise.remove(place)
            made = materialise.ensure(place)
            if life.is_deleted:
                life = tombstone.Life(life.generation + 1)
                tombstone.write(place, life)
            self._generation = life.generation
        return made

    def append(
        self,
        messages: Sequence[Mapping],
        key: str | None = None,
        peer: str | None = None,
        actor: str | None = None,
        carries: Iterable[Recall | str] = (),
    ) -> Appended:
        """Append 1 to 100 messages, all or none; durable when this returns.

        Args:
            messages: mappings with "role" and "content" (a string or parts); see
                `message.parse`.
            key: of this batch: sent again under it, the batch is stored once.
            peer: whom messages are about that name none.
            actor: under which actor it is appended; None: the scope's.
            carries: recalls whose memories these messages hold, or their ids.

        Raises:
            Conflict: the key was used for another content.
            CorruptPage: the log is damaged; nothing is appended to it.
            Deleted: the session was deleted.
            Busy: another writer held it for 5 seconds.
            OSError: the disk is full or failing; the log is as long as before.
        """
        actor = self.principal.actor_of(actor)
        carries = [self._known(each) for each in append.listed(carries)]
        batch = append.checked(messages, key, peer, actor, carries)
        return self._append(batch)

    def append_captured(
        self,
        messages: Sequence[Mapping],
        sources: Sequence[str],
        peer: str | None,
        actor: str | None,
    ) -> Appended:
        """Append messages with what each was captured from; `capture` calls this."""
        return self._append(append.checked(messages, None, peer, actor, (), sources))

    def messages(self, since: int = 0) -> tuple[Message, ...]:
        """Return the messages from number `since` on, archived ones too."""
        found = self._log()
        if found is None:
            return ()
        with self._while_it_lives():
            held = list(archive.messages(self.place, found, since))
        return tuple(message.from_line(each.seq, each.stored) for each in held)

    def live(self) -> tuple[Message, ...]:
        """Return the messages that no commit has archived."""
        found = self._log()
        kept = found.lines if found else ()
        return tuple(message.from_line(each.seq, each.stored) for each in kept)

    def ledger(self, actor: str | None = None) -> dict[str, Record]:
        """Return what was served to an actor, and when."""
        if self._log() is None:
            return {}
        with self._while_it_lives():
            return dict(state.read(self.place).ledger.of(actor))

    def meta(self) -> dict:
        """Return the counters of `.meta.json`, which are advice."""
        self._bound()
        return meta.read(self.place)

    def commit(self, keep: int = 0, extract: ExtractFn | None = None) -> Committed:
        """Archive all but the newest `keep` messages, and extract what to remember.

        A batch is archived whole or stays. With `extract`, every archive that was not
        extracted yet is handed to it, without what came from recall, and what it
        returns is remembered.
        """
        remember = None
        if extract is not None:

            def remember(text: str, peer: str | None, key: str):
                return self.principal.remember(text, peer=peer, key=key)

        return commit.run(self.place, self._bound(), keep, extract, remember)

    def delete(self) -> None:
        """Delete the session: what is in flight gets Deleted, and it stays deleted."""
        place = self.place
        with place.locked():
            mine = self._generation
            if place.rules.keeps_tombstones:
                life = tombstone.read(place)
                if mine in (None, life.generation):
                    tombstone.write(place, life._replace(is_deleted=True))
                else:
                    tombstone.check(place, mine)
            named = chain_files.manifests(place)
            hooks = self.principal.store.on_delete
            for hook in hooks:
                hook(self, named)
            is_left = bool(named) and not hooks  # pages, with nobody to free them
            with unnamed.noted(place.root, place.io, is_left):
                materialise.remove(place)

    def recalled(self, asked: Ask, search: SearchFn) -> Recall:
        """Answer a recall that was checked; `Principal.recall` asks."""
        return recall.run(asked, self.place, self._generation, search)

    def _append(self, batch: CheckedBatch) -> Appended:
        late = self.principal.store.late.revised(self.principal, batch.carries)
        return append.run(self.place, self._bound(), batch, late)

    def _known(self, carried: Recall | str) -> Recall | str:
        """Return the recall of an id, where this process knows it."""
        if not isinstance(carried, str):
            return carried
        recent, owner = self.principal.store.recent, self.principal.owner
        return recent.get(owner, self.id, carried) or carried

    def _log(self) -> lines.Log | None:
        """Return the log as it stands, None before the session was made."""
        self._bound()
        with self._while_it_lives():
            try:
                return log.read(self.place)
            except FileNotFoundError:
                if any(self.place.io.names(self.place.file(HISTORY))):
                    materialise.ensure(self.place)  # says what was lost
        return None

    @contextlib.contextmanager
    def _while_it_lives(self) -> Iterator[None]:
        """Read files that a deletion may take away meanwhile: Deleted, not damage."""
        try:
            yield
        except (CorruptPage, FileNotFoundError):
            self._bound()
            raise
        self._bound()  # and not another life's

    def _bound(self) -> int:
        """Bind this handle to the life of the session it first met."""
        self._generation = tombstone.check(self.place, self._generation)
        return self._generation
