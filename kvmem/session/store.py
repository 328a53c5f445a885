"""The store of sessions: one folder, many accounts, one way in.

The law: every handle comes from a principal, and every byte goes through `io`. Any
number of processes may have the same root open; each session has one writer at a time.

    store = SessionStore.open("runs/sessions")
    me = store.principal("lab", "ann")
"""

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from kvmem.errors import ConfigError, FormatMismatch, say
from kvmem.session import files, fsck, ids, items, ledger_file, lines, place
from kvmem.session.book import Book
from kvmem.session.fsck import HookFn, Violation
from kvmem.session.identity import VERSION, Identity
from kvmem.session.io import OsIO, Unsynced
from kvmem.session.late import Late
from kvmem.session.locks import WAIT_S, Locks
from kvmem.session.place import LOG, Place
from kvmem.session.principal import Principal
from kvmem.session.recent import Recent
from kvmem.session.rules import Rules, named
from kvmem.session.search import Retriever
from kvmem.session.session import Session

FORMAT = "kvmem.session.store"
_FACTS = "store.json"
ITEMS = "items.sqlite3"
_MAX_OPEN_BOOKS = 128  # users whose items' files stay open


class SessionStore:
    """An open root; `SessionStore.open` makes it."""

    def __init__(
        self,
        root: Path,
        rules: Rules,
        io: OsIO,
        retriever: Retriever,
        wait_s: float,
        durability: str,
    ):
        """Be an open store; use `open`."""
        self.root, self.rules, self.io, self.retriever = root, rules, io, retriever
        # Called with a session and its chains when it is deleted for good.
        self.on_delete: list[Callable[[Session, dict], None]] = []
        # Called with a principal and a uri when a memory is forgotten.
        self.on_forget: list[Callable[[Principal, str], None]] = []
        self.fsck_hooks: list[HookFn] = []  # judges of chains: I8 to I10
        self.recent = Recent()  # recalls, for messages that carry them
        self.late = Late()  # what was forgotten, for messages that tell it yet
        self.locks = Locks(io, wait_s)
        self._logs: dict[Path, lines.Log] = {}
        self._ledgers: dict[Path, ledger_file.Found] = {}
        self._durable: dict[Path, dict[str, bytes]] = {}
        self._books: dict[tuple[str, str], Book] = {}
        self._durability = durability
        self.secret = self._facts()

    @classmethod
    def open(
        cls,
        root: str | Path,
        rules: str = "kvmem",
        io: OsIO | None = None,
        retriever: Retriever | None = None,
        durability: Literal["full", "process"] = "full",
        wait_s: float = WAIT_S,
    ) -> "SessionStore":
        """Open a root, made if it is not there.

        Args:
            root: the folder.
            rules: "kvmem", or "openviking" for what that does where it differs.
            io: everything that touches the disk; None: the disk itself.
            retriever: what finds memories; None: words, by FTS5 over the user's items.
            durability: "full": acknowledged is on the disk; "process": it survives the
                process, and not a power cut.
            wait_s: how long a writer waits for another before it is Busy.
        """
        if durability not in ("full", "process"):
            law = 'what is acknowledged is on the disk ("full"), or the system\'s'
            cure = 'Pass "full" or "process"'
            raise ConfigError(say(f"durability={durability!r}", law, cure))
        io = OsIO() if io is None else io
        io = io if durability == "full" else Unsynced(io)
        if retriever is None:
            retriever = items.Retriever()
        return cls(
            Path(root).absolute(), named(rules), io, retriever, wait_s, durability
        )

    def principal(
        self, account: str, user: str, require_actor: bool = False
    ) -> Principal:
        """Return the principal of a user; with `require_actor`, calls need an actor."""
        return Principal(self, account, user, require_actor)

    def place(self, identity: Identity) -> Place:
        """Return where a session lies."""
        return Place(
            self.root,
            identity,
            self.io,
            self.locks,
            self.rules,
            self._logs,
            self._ledgers,
            self._durable,
        )

    def book(self, account: str, user: str) -> Book:
        """Return the file of a user's items."""
        books = self._books
        if (account, user) not in books:
            if len(books) >= _MAX_OPEN_BOOKS:
                self.close()
                books = self._books
            path = place.user_folder(self.root, account, user) / ITEMS
            book = Book(path, (account, user), self._durability, self.root)
            return books.setdefault((account, user), book)
        return books[account, user]

    def fsck(self, session: Session) -> tuple[Violation, ...]:
        """Return every law that a session's files break, () when it is sound."""
        return fsck.run(session.place, self.fsck_hooks)

    def close(self) -> None:
        """Close the files of items that are open; the store may be used again."""
        books, self._books = self._books, {}
        for book in books.values():
            book.close()

    def __enter__(self) -> "SessionStore":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def session_ids(self, account: str, user: str) -> tuple[str, ...]:
        """Return the ids of a user's sessions, as their logs say them."""
        found = self._folders(account, user).values()
        return tuple(sorted(id for id in found if id is not None))

    def nameless(self, account: str, user: str) -> tuple[str, ...]:
        """Return the folders with files of a user's whose logs say no id."""
        found = self._folders(account, user).items()
        return tuple(name for name, id in found if id is None)

    def _folders(self, account: str, user: str) -> dict[str, str | None]:
        """Return the folders of a user's sessions, and whose id each one's log says."""
        folder, found = place.sessions_folder(self.root, account, user), {}
        for name in self.io.names(folder):
            if name.startswith("."):
                continue
            try:
                head = self.io.read(folder / name / LOG).partition(b"\n")[0]
            except (FileNotFoundError, NotADirectoryError):
                if self.io.is_dir(folder / name) and self.io.names(folder / name):
                    found[name] = None
                continue
            id = (lines.unseal(head) or {}).get("session")
            is_own = isinstance(id, str) and ids.to_path(id) == name
            found[name] = id if is_own else None
        return found

    def _facts(self) -> bytes:
        """Return the root's secret, made with the root by whoever is first."""
        path = self.root / _FACTS
        try:
            return self._read_facts(path)
        except FileNotFoundError:
            pass
        except NotADirectoryError as bad:
            asked, law = f"session store {self.root}", "a file stands in its path"
            raise ConfigError(say(asked, law, "Name a folder")) from bad
        files.make_root(self.io, self.root)
        with self.locks.hold(self.root / ".lock", "the root"):
            try:
                return self._read_facts(path)
            except FileNotFoundError:
                secret = secrets.token_hex(32)
                fields = {"format": FORMAT, "version": VERSION, "secret": secret}
                files.write(self.io, path, lines.seal(fields))
        return bytes.fromhex(secret)

    def _read_facts(self, path: Path) -> bytes:
        try:
            data = self.io.read(path)
            fields = json.loads(data)
            found = f"{fields['format']} of version {fields['version']}"
            if (fields["format"], fields["version"]) == (FORMAT, VERSION):
                if lines.is_right(data, fields, ("format", "version", "secret")):
                    return bytes.fromhex(fields["secret"])
                found = "a damaged file (its crc is not that of its bytes)"
        except (ValueError, KeyError, TypeError) as bad:
            found = f"a damaged file ({bad})"
        law = f"this kvmem reads {FORMAT} of version {VERSION}, not {found}"
        cure = "Open it with the kvmem that wrote it, or put store.json back"
        raise FormatMismatch(say(f"session store {self.root}", law, cure))
