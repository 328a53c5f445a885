"""The SQLite file of one user's items: its tables, its connections, its transactions.

The law: a change is one transaction that is on disk when it returns, or nothing; and
what was erased is in no file any more when `scrub` has returned. The file says which
version it has and whose it is, and is refused where either is not as expected.

    book = Book(folder / "items.sqlite3", ("lab", "ann"))
    with book.change() as cursor:
        cursor.execute("INSERT ...")

A book that nothing was put into is no file: reading it finds nothing.
"""

import contextlib
import errno
import os
import pathlib
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator

from kvmem import errors
from kvmem.session import files, traces
from kvmem.session.io import OsIO

__all__ = ["VERSION", "Book"]

VERSION = 2  # PRAGMA user_version; a book of version 1 gets its traces' table
_MAX_AT_REST = 8  # connections
_WAIT_S = 5.0  # for another writer's transaction

_CODES = {
    "SQLITE_FULL": errno.ENOSPC,
    "SQLITE_IOERR": errno.EIO,
    "SQLITE_CANTOPEN": errno.ENOENT,
    "SQLITE_READONLY": errno.EROFS,
}
_ABANDONED: list[list[sqlite3.Connection]] = []

_TABLES = """
CREATE TABLE owner(account TEXT NOT NULL, user TEXT NOT NULL);
CREATE TABLE item(
    id INTEGER PRIMARY KEY AUTOINCREMENT, uri TEXT NOT NULL UNIQUE, peer TEXT NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL, digest BLOB NOT NULL,
    text TEXT NOT NULL);
CREATE INDEX item_digest ON item(peer, digest);
CREATE TABLE named(key TEXT PRIMARY KEY, digest BLOB, uri TEXT) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5(
    body, content='', tokenize='porter unicode61 remove_diacritics 2');
"""


class Book:
    """One user's SQLite file, its connections shared by the threads of a process."""

    def __init__(
        self,
        path: pathlib.Path,
        owner: tuple[str, str],
        durability: str = "full",
        top: pathlib.Path | None = None,
    ):
        """Be the book at a path; nothing is made.

        Args:
            path: the file's.
            owner: account and user, written into it.
            durability: "full" syncs each change; else the system may.
            top: the folder below which missing folders are made; None: the file's own.
        """
        self._path, self._owner = path, owner
        self._top = top or path.parent
        self._synchronous = "FULL" if durability == "full" else "NORMAL"
        self._idle = _Idle()
        weakref.finalize(self, self._idle.close)

    @property
    def exists(self) -> bool:
        """Say whether anything was ever put into this book."""
        return self._path.exists()

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Cursor | None]:
        """Lend a cursor to read with; None where there is no file.

        Raises:
            Busy: another process holds the file.
            CorruptPage: it is no sound book.
            FormatMismatch: it is another version's, or another owner's.
        """
        if not self.exists:
            yield None
            return
        with self._lent() as connection, self._told():
            yield connection.cursor()

    @contextlib.contextmanager
    def change(self) -> Iterator[sqlite3.Cursor]:
        """Lend a cursor within one transaction, durable when this returns.

        The lock is taken at once: what is read inside is still so when it is written.

        Raises:
            Busy: another transaction did not end within 5 seconds.
            OSError: the disk is full, or could not be written.
            CorruptPage, FormatMismatch: as `read`.
        """
        with self._lent() as connection, self._told():
            cursor = connection.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    cursor.execute("ROLLBACK")
                raise

    def scrub(self) -> None:
        """Drop from the files what was deleted: index segments and the log.

        Raises:
            Busy: a reader kept the log from being emptied for 5 seconds; what was
                deleted is gone from every answer, and not yet from the file.
        """
        with self.change() as cursor:
            cursor.execute("INSERT INTO words(words) VALUES('optimize')")
        with self._lent() as connection, self._told():
            row = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if row[0]:
            raise errors.Busy(
                errors.say(
                    "erasing the bytes of a deleted item",
                    f"a reader held the file for {_WAIT_S:.0f} s",
                    "Delete it once more when that reader is done",
                )
            )

    def close(self) -> None:
        """Close the connections that no call is using."""
        self._idle.close()

    @contextlib.contextmanager
    def _lent(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection for one call; nobody else has it meanwhile."""
        connection = self._idle.take()
        if connection is None:
            with self._told():
                connection = self._waited_for()
        try:
            yield connection
        finally:
            self._idle.put(connection)

    def _waited_for(self) -> sqlite3.Connection:
        """Open the file, again while another makes it: there SQLite does not wait."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                return self._opened()
            except sqlite3.OperationalError as error:
                name = getattr(error, "sqlite_errorname", "")
                if not name.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def _opened(self) -> sqlite3.Connection:
        self._top.mkdir(parents=True, exist_ok=True)
        files.make_folder(OsIO(), self._path.parent, self._top)
        connection = sqlite3.connect(
            self._path,
            timeout=_WAIT_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=64,
        )
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={self._synchronous}")
            connection.execute("PRAGMA secure_delete=ON")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables of a new file, or those it lacks; refuse what is no book."""
        if _version(connection) < VERSION:
            connection.execute("BEGIN IMMEDIATE")
            before = _version(connection)
            if before == 0:
                _execute(connection, _TABLES)
                connection.execute("INSERT INTO owner VALUES(?, ?)", self._owner)
            if before < VERSION:
                _execute(connection, traces.TABLE)
                connection.execute(f"PRAGMA user_version={VERSION}")
            connection.execute("COMMIT")
        version = _version(connection)
        if version != VERSION:
            self._refuse(f"it has version {version}, and this kvmem reads {VERSION}")
        owner = connection.execute("SELECT account, user FROM owner").fetchone()
        if owner != self._owner:
            self._refuse("it says that it is another user's")

    def _refuse(self, law: str) -> None:
        asked = f"the items in {self._path.name}"
        cure = "Move the file away, or open it with the kvmem that wrote it"
        raise errors.FormatMismatch(errors.say(asked, law, cure))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn SQLite's failures into kvmem's words."""
        try:
            yield
        except sqlite3.Error as error:
            raise _in_words(error) from error


class _Idle:
    """Connections at rest; those of a parent process are left alone after a fork."""

    def __init__(self):
        self._lock = threading.Lock()
        self._pid, self._at_rest = os.getpid(), []

    def take(self) -> sqlite3.Connection | None:
        with self._lock:
            self._forget_the_parents()
            return self._at_rest.pop() if self._at_rest else None

    def put(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if len(self._at_rest) < _MAX_AT_REST:
                self._at_rest.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._forget_the_parents()
            at_rest, self._at_rest = self._at_rest, []
        for connection in at_rest:
            connection.close()

    def _forget_the_parents(self) -> None:
        if self._pid != os.getpid():
            _ABANDONED.append(self._at_rest)  # to close them is their process's to do
            self._pid, self._at_rest = os.getpid(), []


def _execute(connection: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";\n"):
        connection.execute(statement)


def _version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _in_words(error: sqlite3.Error) -> Exception:
    """Return what kvmem raises for a failure of SQLite."""
    name, asked = getattr(error, "sqlite_errorname", ""), "the user's items"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        law = f"another transaction held them for {_WAIT_S:.0f} s"
        return errors.Busy(errors.say(asked, law, "Try again"))
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        law, cure = f"the file is damaged ({error})", "Restore it from a copy"
        return errors.CorruptPage(errors.say(asked, law, cure))
    code = next((c for start, c in _CODES.items() if name.startswith(start)), None)
    return error if code is None else OSError(code, f"{asked}: {error}")
