"""Traces: what stays known of an item that was changed, moved or deleted.

A forgetting has to find an item's words and uris wherever they were told, those of
before too. The law: a trace is a digest and never words; it is written in the
transaction that makes it needed, and goes when its item is forgotten.

    put("memories/a", ...)     # "text": the words of before
    move("memories/a", ...)    # "uri": where it stood
    delete("memories/b")       # "text", and "under": what it may be forgotten by
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvmem.session import item_rows
from kvmem.session.item_rows import Row

TABLE = """
CREATE TABLE trace(
    item INTEGER NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY(item, kind, digest)) WITHOUT ROWID;
CREATE INDEX trace_digest ON trace(kind, digest);
"""


class Traces(NamedTuple):
    """By what the items at a uri and below it are known, those deleted there too."""

    texts: frozenset[str] = frozenset()  # digests of their words, now and before
    uris: frozenset[str] = frozenset()  # of where they stood before
    taken: frozenset[str] = frozenset()  # of where another item stands or stood
    others: frozenset[tuple[str, str]] = frozenset()  # and what it says or said there


def digest(text: str) -> str:
    """Return what tells a text or a uri from others."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def changed(cursor, row: Row) -> None:
    """Note the words of an item that gets others."""
    _note(cursor, row.id, "text", [row.text])


def moved(cursor, row: Row) -> None:
    """Note the uri of an item that gets another."""
    _note(cursor, row.id, "uri", [row.uri])


def deleted(cursor, row: Row) -> None:
    """Note what an item is known by that goes, and is not forgotten yet."""
    changed(cursor, row)
    _note(cursor, row.id, "under", _folders(row.uri))


def forget(cursor, uri: str, rows: Iterable[Row]) -> None:
    """Drop the traces of items that are erased now, and of those deleted before."""
    for id_ in [*(row.id for row in rows), *_deleted_under(cursor, uri)]:
        cursor.execute("DELETE FROM trace WHERE item=?", (id_,))


def of(cursor, uri: str) -> Traces:
    """Return by what the items at a uri and below it are known."""
    where, values = item_rows.at(uri)
    found = cursor.execute(f"SELECT id, text FROM item WHERE {where}", values)
    here = dict(found)
    ids = {*here, *_deleted_under(cursor, uri)}
    texts = {*map(digest, here.values()), *_noted(cursor, ids, "text")}
    uris = _noted(cursor, ids, "uri")
    others = {
        (place, word)
        for places, words in _other_items(cursor, ids)
        for place in places
        for word in words
    }
    taken = frozenset(place for place, _ in others)
    return Traces(frozenset(texts), frozenset(uris), taken, frozenset(others))


def _other_items(cursor, ids: set[int]) -> Iterator[tuple[set[str], set[str]]]:
    """Yield of every other item where it stood, and what it said, up to now."""
    before: dict[int, dict[str, set[str]]] = {}
    for id_, kind, mark in cursor.execute("SELECT item, kind, digest FROM trace"):
        before.setdefault(id_, {}).setdefault(kind, set()).add(mark)
    for id_, uri, text in cursor.execute("SELECT id, uri, text FROM item"):
        if id_ not in ids:
            known = before.get(id_, {})
            places = {digest(uri)} | known.get("uri", set())
            yield places, {digest(text)} | known.get("text", set())


def _deleted_under(cursor, uri: str) -> list[int]:
    query = "SELECT item FROM trace WHERE kind='under' AND digest=?"
    return [id_ for (id_,) in cursor.execute(query, (digest(uri),))]


def _noted(cursor, ids: Iterable[int], kind: str) -> Iterator[str]:
    for id_ in ids:
        query = "SELECT digest FROM trace WHERE item=? AND kind=?"
        yield from (mark for (mark,) in cursor.execute(query, (id_, kind)))


def _note(cursor, id_: int, kind: str, texts: Iterable[str]) -> None:
    cursor.executemany(
        "INSERT OR IGNORE INTO trace VALUES(?, ?, ?)",
        [(id_, kind, digest(text)) for text in texts],
    )


def _folders(uri: str) -> list[str]:
    """Return the uris by which an item can be named: its own, and its folders'."""
    names = uri.split("/")
    return ["/".join(names[:depth]) for depth in range(len(names) + 1)]
