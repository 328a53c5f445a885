"""The rows of a book: reading, writing and erasing items within one transaction.

The law: an item and its words in the index change together, in the caller's
transaction; whoever calls has asked the view already.
"""

import dataclasses
import hashlib
import secrets
import time
from typing import NamedTuple

from kvmem import errors
from kvmem.session import search, views

__all__ = [
    "at",
    "COLUMNS",
    "Item",
    "Nothing",
    "Row",
    "below",
    "digest",
    "erase",
    "found",
    "keep",
]
__all__ += ["missing", "of_key", "row_of", "the", "write"]

COLUMNS = "uri, text, created, updated"


@dataclasses.dataclass(frozen=True)
class Item:
    """One text that is remembered."""

    uri: str
    text: str
    created: float  # seconds since the epoch
    updated: float

    @property
    def peer(self) -> str | None:
        """Whose part of the tree it lies in, None for the user's self."""
        return views.peer_of(self.uri)


class Row(NamedTuple):
    """One row of the items' table, without what can be derived."""

    id: int
    uri: str
    text: str
    created: float
    updated: float


class Nothing:
    """A cursor on no file."""

    def execute(self, *_) -> "Nothing":
        """Find nothing."""
        return self

    def fetchone(self) -> None:
        """Return no row."""
        return None

    def __iter__(self):
        return iter(())


def found(cursor, match: str, limit: int, under: str, kind: tuple) -> list[search.Hit]:
    """Return the hits of one kind of peers, best first."""
    where, values = below(under)
    ranks = cursor.execute(
        "SELECT item.id, words.rank FROM words JOIN item ON item.id = words.rowid "
        f"WHERE words MATCH ? AND {kind[0]} AND {where} "
        "ORDER BY words.rank, item.id LIMIT ?",
        (match, kind[1], *values, limit),
    )
    hits = []
    for id_, rank in list(ranks):
        row = cursor.execute("SELECT uri, text FROM item WHERE id=?", (id_,)).fetchone()
        score = search.score_of(rank)
        if row:
            hits.append(search.Hit(*row, score, views.peer_of(row[0])))
    return hits


def keep(cursor, text: str, uri: str | None, folder: str) -> Item:
    """Store a text at its uri, or at a new one in its folder unless it is known."""
    peer = views.peer_of(folder) or ""
    if uri is None:
        known = cursor.execute(
            "SELECT uri FROM item WHERE peer=? AND digest=? ORDER BY id",
            (peer, digest(text)),
        ).fetchone()
        if known:
            return the(cursor, known[0])
        uri = f"{folder}/{secrets.token_hex(8)}"
    old = row_of(cursor, uri)
    if old and old.text != text:
        asked, law = f"remember at {uri!r}", "another text stands there"
        cure = "Use items.put to replace it, or another uri"
        raise errors.Conflict(errors.say(asked, law, cure))
    if old is None:
        write(cursor, uri, text, None)
    return the(cursor, uri)


def of_key(cursor, key: str, content: bytes) -> str | None:
    """Return the uri that a key was used for, None if it is new."""
    row = cursor.execute("SELECT digest, uri FROM named WHERE key=?", (key,)).fetchone()
    if row is None:
        return None
    asked = f"remember with key {key!r}"
    if row[1] is None:
        law, cure = "the item of this key was deleted", "Use a new key to keep it again"
        raise errors.Deleted(errors.say(asked, law, cure))
    if row[0] != content:
        law, cure = "the key was used for other content", "Use one key for one content"
        raise errors.Conflict(errors.say(asked, law, cure))
    return row[1]


def write(cursor, uri: str, text: str, old: Row | None) -> None:
    """Store a text at a uri in place of what was there, the index with it."""
    now, mark = time.time(), digest(text)
    if old is None:
        cursor.execute(
            "INSERT INTO item(uri, peer, created, updated, digest, text) "
            "VALUES(?, ?, ?, ?, ?, ?)",
            (uri, views.peer_of(uri) or "", now, now, mark, text),
        )
        id_ = cursor.lastrowid
    else:
        id_ = old.id
        _unindex(cursor, old)
        cursor.execute(
            "UPDATE item SET text=?, digest=?, updated=? WHERE id=?",
            (text, mark, now, id_),
        )
    row = (id_, search.indexed(text))
    cursor.execute("INSERT INTO words(rowid, body) VALUES(?, ?)", row)


def erase(cursor, row: Row) -> None:
    """Take an item and its words away; its keys stay used, without its content."""
    _unindex(cursor, row)
    cursor.execute("DELETE FROM item WHERE id=?", (row.id,))
    gone = "UPDATE named SET digest=NULL, uri=NULL WHERE uri=?"
    cursor.execute(gone, (row.uri,))


def _unindex(cursor, row: Row) -> None:
    cursor.execute(
        "INSERT INTO words(words, rowid, body) VALUES('delete', ?, ?)",
        (row.id, search.indexed(row.text)),
    )


def row_of(cursor, uri: str) -> Row | None:
    """Return the row at a uri, None where none is."""
    found = cursor.execute(f"SELECT id, {COLUMNS} FROM item WHERE uri=?", (uri,))
    row = found.fetchone()
    return row and Row(*row)


def the(cursor, uri: str) -> Item:
    """Return the item at a uri, or raise NotFound."""
    row = row_of(cursor, uri)
    if row is None:
        raise missing(uri)
    return Item(*row[1:])


def missing(uri: str) -> errors.NotFound:
    """Return the error of a uri where nothing stands."""
    return errors.NotFound(
        errors.say(f"item {uri!r}", "there is none", "List what is there")
    )


def at(uri: str) -> tuple[str, tuple[str, ...]]:
    """Return the condition that an item stands at a uri or below it."""
    where, values = below(uri)
    return (f"({where} OR item.uri = ?)", (*values, uri)) if uri else (where, values)


def below(folder: str) -> tuple[str, tuple[str, ...]]:
    """Return the condition that a uri lies below a folder, by the index on uris."""
    if not folder:
        return "1", ()
    return "(item.uri >= ? AND item.uri < ?)", (f"{folder}/", f"{folder}0")


def digest(*parts: str) -> bytes:
    """Return one digest of several strings, apart from any other way to cut them."""
    whole = hashlib.sha256()
    for part in parts:
        piece = part.encode()
        whole.update(len(piece).to_bytes(8, "big") + piece)
    return whole.digest()
