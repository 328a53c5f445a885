"""A user's items: what is remembered, under which uri, and who of its actors sees it.

    item = me.remember("Ann takes her tea green.", peer="wang", key="turn-12")
    me.items.search("tea", actor="wang")     # finds it
    me.items.get(item.uri, actor="zhang")    # Denied

The laws: a key is used once, and used again for the same content it changes nothing; a
text that the same part of the tree already holds is not stored twice, however many
threads or processes offer it at once; every verb looks through the actor's view
(`views`); and there is no way to an item but from a principal's.
"""

import contextlib
import sqlite3
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvmem import errors
from kvmem.session import ids, item_rows, search, traces, views
from kvmem.session.book import Book
from kvmem.session.item_rows import Item

__all__ = ["Entry", "Item", "Items"]

ResolveFn = Callable[[str | None], str | None]  # a call's actor -> the one that holds


class Entry(NamedTuple):
    """What stands at a uri: an item, or a folder of some."""

    uri: str
    kind: str  # "item" or "folder"
    num_items: int | None  # below a folder; None where hidden peers may be there


class Items:
    """The items of one user, each verb under the view of the call's actor.

    `actor=None` in a verb means the scope's (`acting_as`), else the principal's.
    """

    def __init__(self, book: Book, resolve: ResolveFn):
        self._book, self._resolve = book, resolve

    def remember(
        self,
        text: str,
        uri: str | None = None,
        peer: str | None = None,
        key: str | None = None,
        actor: str | None = None,
    ) -> Item:
        """Keep a text and return its item, the one already there if it is known.

        Args:
            text: what to keep, in NFC and without blanks around it.
            uri: where; without one, a text that its part of the tree holds anywhere
                is not kept again.
            peer: the part it belongs to; None for the user's self.
            key: makes a retry safe: the same key keeps one item.
            actor: whose view must allow the place.

        Raises:
            Conflict: the key was used for other content, or the uri holds other text.
            Deleted: the key's item was deleted since.
            Denied: the place is not this actor's, or the key's item is not any more.
            InvalidId: the place is none.
        """
        text = _checked_text(text).strip()
        key = None if key is None else _checked_key(key)
        place = views.owned_by("memories" if uri is None else uri, peer)
        actor = self._resolve(actor)
        views.checked(place, actor, "remember", whole=uri is None)
        content = item_rows.digest(text, uri or "", peer or "")
        with self._book.change() as cursor:
            known = key is not None and item_rows.of_key(cursor, key, content)
            if known:
                _refuse_unseen(known, actor, key)
                return item_rows.the(cursor, known)
            item = item_rows.keep(cursor, text, uri and place, place)
            if key is not None:
                row = (key, content, item.uri)
                cursor.execute("INSERT INTO named VALUES(?, ?, ?)", row)
        return item

    def list(
        self, under: str = "", actor: str | None = None, limit: int | None = None
    ) -> tuple[Item, ...]:
        """Return the items at a uri or below it, in the order of their uris."""
        under, actor = self._folder(under, actor, "list")
        where, values = item_rows.at(under)
        view, more = _seen(actor)
        with self._reading() as cursor:
            rows = cursor.execute(
                f"SELECT {item_rows.COLUMNS} FROM item WHERE {where} AND {view} "
                "ORDER BY uri LIMIT ?",
                (*values, *more, -1 if limit is None else limit),
            )
            return tuple(Item(*row) for row in rows)

    def names(self, under: str = "", actor: str | None = None) -> tuple[str, ...]:
        """Return the names that stand directly in a folder, sorted."""
        uris = [item.uri for item in self.list(under, actor) if item.uri != under]
        start = len(under) + 1 if under else 0
        return tuple(sorted({uri[start:].split("/")[0] for uri in uris}))

    def stat(self, uri: str, actor: str | None = None) -> Entry:
        """Say what stands at a uri; NotFound where nothing does.

        Under a view the roots that may hold hidden peers have no count.
        """
        uri, actor = self._folder(uri, actor, "stat")
        with self._reading() as cursor:
            if item_rows.row_of(cursor, uri):
                return Entry(uri, "item", None)
        below = self.list(uri, actor)
        if not below and uri not in ("", "peers"):
            raise item_rows.missing(uri)
        hidden = actor is not None and uri in ("", "peers")
        return Entry(uri, "folder", None if hidden else len(below))

    def get(self, uri: str, actor: str | None = None) -> Item:
        """Return the item at a uri; NotFound where none is."""
        views.checked(uri, self._resolve(actor), "get")
        with self._reading() as cursor:
            return item_rows.the(cursor, uri)

    def put(self, uri: str, text: str, actor: str | None = None) -> Item:
        """Make the item at a uri hold a text, whether or not one is there."""
        text = _checked_text(text).strip()
        views.checked(uri, self._resolve(actor), "put")
        with self._book.change() as cursor:
            old = item_rows.row_of(cursor, uri)
            if old and old.text == text:
                return Item(*old[1:])
            if old:
                traces.changed(cursor, old)
            item_rows.write(cursor, uri, text, old)
            return item_rows.the(cursor, uri)

    def move(self, uri: str, to: str, actor: str | None = None) -> Item:
        """Give an item another uri.

        Raises:
            NotFound: nothing stands at `uri`.
            Conflict: something stands at `to`.
        """
        actor = self._resolve(actor)
        views.checked(uri, actor, "move")
        views.checked(to, actor, "move")
        with self._book.change() as cursor:
            old = item_rows.row_of(cursor, uri)
            if old is None:
                raise item_rows.missing(uri)
            if uri != to and item_rows.row_of(cursor, to):
                asked, law = f"move {uri!r} to {to!r}", "an item stands there"
                raise errors.Conflict(
                    errors.say(asked, law, "Delete it, or name another place")
                )
            if uri != to:
                traces.moved(cursor, old)
            cursor.execute(
                "UPDATE item SET uri=?, peer=?, updated=? WHERE id=?",
                (to, views.peer_of(to) or "", time.time(), old.id),
            )
            cursor.execute("UPDATE named SET uri=? WHERE uri=?", (to, uri))
            return item_rows.the(cursor, to)

    def delete(self, uri: str, actor: str | None = None) -> tuple[str, ...]:
        """Erase an item, or all below a folder; return what was there.

        Its bytes are gone from the book's files when this returns; what sessions were
        told of it stays, and digests of what it was for who forgets it (`traces`).
        Keys that named it stay used, so that a late retry does not bring it back.
        """
        return self._erased(uri, actor, "delete")

    def forget(self, uri: str, actor: str | None = None) -> tuple[str, ...]:
        """Erase as `delete` does, with all that is known of what it was before.

        `Principal.forget` calls this, and takes it out of sessions as well.
        """
        return self._erased(uri, actor, "forget")

    def _erased(self, uri: str, actor: str | None, verb: str) -> tuple[str, ...]:
        views.checked(uri, self._resolve(actor), verb, whole=True)
        if not self._book.exists:
            return ()
        where, values = item_rows.at(uri)
        with self._book.change() as cursor:
            found = cursor.execute(
                f"SELECT id, {item_rows.COLUMNS} FROM item WHERE {where}", values
            )
            rows = [item_rows.Row(*row) for row in found]
            for row in rows:
                item_rows.erase(cursor, row)
                if verb == "delete":
                    traces.deleted(cursor, row)
            if verb == "forget":
                traces.forget(cursor, uri, rows)
        self._book.scrub()  # also what a delete that was cut off has left
        return tuple(row.uri for row in rows)

    def search(
        self,
        query: str,
        limit: int = 8,
        under: str = "",
        actor: str | None = None,
        peer_scope: str = "actor",
    ) -> tuple[search.Hit, ...]:
        """Return what the query's words find, best first.

        Args:
            query: words in any script; nothing in it is syntax.
            limit: the most hits.
            under: a folder to search in.
            actor: whose view.
            peer_scope: "actor": the self and this actor's part; "all": other peers
                too, ranked lower.
        """
        if not isinstance(query, str):
            asked, law = f"search for {query!r}", "a query is a string"
            raise errors.ConfigError(errors.say(asked, law, "Pass the words"))
        under, actor = self._folder(under, actor, "search")
        scope = views.checked_scope(peer_scope)
        match = search.match_of(query)
        if not match or limit <= 0:
            return ()
        kinds = [("item.peer IN ('', ?)", actor or "")]
        if scope == "all":
            kinds += [("item.peer NOT IN ('', ?)", actor or "")]
        elif peer := views.peer_of(under):  # named by its owner: no view, or its own
            kinds = [("item.peer = ?", peer)]
        with self._reading() as cursor:
            hits = [
                hit
                for kind in kinds
                for hit in item_rows.found(cursor, match, limit, under, kind)
            ]
        return views.ranked(hits, actor or views.peer_of(under), scope)[:limit]

    def _folder(self, uri: str, actor: str | None, verb: str) -> tuple[str, str | None]:
        actor = self._resolve(actor)
        return views.checked(uri, actor, verb, whole=True), actor

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Cursor]:
        """Lend a cursor on the book, or on an empty one where there is no file."""
        with self._book.read() as cursor:
            yield cursor if cursor is not None else item_rows.Nothing()


class Retriever:
    """The default retriever: bm25 over the principal's own items."""

    def search(
        self, principal, query: str, limit: int, actor: str | None, peer_scope: str
    ) -> list[search.Hit]:
        """Return the hits of `principal.items`; see `search.Retriever`."""
        hits = principal.items.search(query, limit, actor=actor, peer_scope=peer_scope)
        return list(hits)

    def gone(self, principal, uris: Sequence[str]) -> frozenset[str]:
        """Return those of some uris that were found and that no item has any more."""
        with principal.store.book(*principal.owner).read() as cursor:
            if cursor is None:
                return frozenset(uris)
            marks = ", ".join("?" * len(uris))
            rows = cursor.execute(f"SELECT uri FROM item WHERE uri IN ({marks})", uris)
            return frozenset(uris) - {uri for (uri,) in rows}


def _seen(actor: str | None) -> tuple[str, tuple[str, ...]]:
    return ("1", ()) if actor is None else ("item.peer IN ('', ?)", (actor,))


def _refuse_unseen(uri: str, actor: str | None, key: str) -> None:
    """Raise Denied for a key's item that was moved out of an actor's sight since."""
    if not views.sees(uri, actor):
        asked = f"remember with key {key!r} as actor {actor!r}"
        law = "its item lies in another peer's part by now"
        raise errors.Denied(errors.say(asked, law, "Use a new key to keep it again"))


def _checked_key(key: str) -> str:
    """Return a key that can be kept, or raise InvalidId."""
    try:
        ids.check_key(key).encode()
    except UnicodeEncodeError as error:
        asked, law = f"key {ascii(key[:40])}", "it is not Unicode"
        cure = "Give whole characters"
        raise errors.InvalidId(errors.say(asked, law, cure)) from error
    return key


def _checked_text(text: str) -> str:
    """Return a text in NFC, or raise for what cannot be kept."""
    if not isinstance(text, str):
        asked, law = f"a text that is {ascii(text)[:40]}", "an item's text is a string"
        raise TypeError(errors.say(asked, law, "Pass the words"))
    if not text.strip():
        asked, law = "an empty text", "there is nothing to remember in it"
        raise errors.ConfigError(errors.say(asked, law, "Give words"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        asked, law = f"text {ascii(text[:40])}", f"it is not Unicode: {error.reason}"
        raise errors.ConfigError(errors.say(asked, law, "Give whole characters")) from (
            error
        )
    return unicodedata.normalize("NFC", text)
