"""Where one session lies, and what stands between it and its disk.

The law: everything of a session is in its own folder, but for its lock and the note of
its deletion, which must outlive the folder. The folder's name is `ids.to_path` of the
id, and files in it carry the id itself.

    <root>/accounts/<account>/users/<user>/sessions/<session>/
        messages.jsonl  .meta.json  .recall_log.json  history/  chains/
    …/sessions/.locks/<session>   …/sessions/.deleted/<session>.json
"""

import dataclasses
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from kvmem.session import files, ids
from kvmem.session.identity import Identity
from kvmem.session.io import OsIO
from kvmem.session.ledger_file import Found
from kvmem.session.lines import Log
from kvmem.session.locks import Locks
from kvmem.session.rules import Rules

LOG, META, LEDGER = "messages.jsonl", ".meta.json", ".recall_log.json"
HISTORY, CHAINS = "history", "chains"
LOCKS, DELETED = ".locks", ".deleted"
_MAX_KNOWN = 5_000  # folders
ITSELF = "."  # of a folder: its name is durable in its parent


@dataclasses.dataclass(frozen=True)
class Place:
    """One session's paths, with the store's own io, locks, rules and memory of logs."""

    root: Path
    identity: Identity
    io: OsIO
    locks: Locks
    rules: Rules
    logs: MutableMapping[Path, Log]  # what was read last, to read only what is new
    ledgers: MutableMapping[Path, Found]  # and of their ledgers
    # What this process knows to be on the disk: of each folder, its parts by name.
    durable: MutableMapping[Path, dict[str, bytes]]

    @cached_property
    def parent(self) -> Path:
        """Return the folder of the user's sessions."""
        return sessions_folder(self.root, *self.identity[:2])

    @cached_property
    def folder(self) -> Path:
        """Return the session's own folder."""
        return self.parent / ids.to_path(self.identity.session)

    def file(self, name: str) -> Path:
        """Return the path of one of its files."""
        return self.folder / name

    @cached_property
    def tombstone(self) -> Path:
        """Return the note that says whether the session was deleted."""
        return self.parent / DELETED / f"{ids.to_path(self.identity.session)}.json"

    @contextmanager
    def locked(self, other: str = "", wait_s: float | None = None) -> Iterator[None]:
        """Hold the session's lock, or another one of it that has a name.

        No id is a path with a "~" (`ids.to_path`), so no session's lock is another's.
        """
        folder = self.parent / LOCKS
        if folder not in self.durable:
            files.make_folder(self.io, folder, self.root)
            self.durable[folder] = {}
        name = ids.to_path(self.identity.session) + (other and f"~{other}")
        path = folder / name
        with self.locks.hold(path, f"session {self.identity.session!r}", wait_s):
            yield

    @property
    def known(self) -> dict[str, bytes]:
        """Return what this process knows to be on the disk of the session's folder."""
        return self.durable.setdefault(self.folder, {})

    def settle(self, log: Log | None = None) -> None:
        """Make sure that what was read is durable before something builds on it.

        Whoever wrote the log, or gave the folder its name, may have died before its
        sync. What this process has synced itself is not synced again.
        """
        if len(self.durable) > _MAX_KNOWN:  # to sync once more is all that is lost
            self.durable.clear()
        known = self.known
        if ITSELF not in known:
            self.io.sync_dir(self.folder)
            self.io.sync_dir(self.parent)
            if self.io.is_file(self.tombstone):  # it may say that the session lives
                self.io.sync_dir(self.tombstone.parent)
            known[ITSELF] = b""
        if log is not None and known.get(LOG) != log.digest:
            self.io.sync(self.file(LOG))
            known[LOG] = log.digest

    def unsettle(self) -> None:
        """Forget what is known of the folder: it is another one now."""
        self.durable.pop(self.folder, None)
        self.logs.pop(self.file(LOG), None)
        self.ledgers.pop(self.file(LEDGER), None)


def sessions_folder(root: Path, account: str, user: str) -> Path:
    """Return the folder of one user's sessions."""
    return user_folder(root, account, user) / "sessions"


def user_folder(root: Path, account: str, user: str) -> Path:
    """Return the folder of all that one user owns."""
    return root / "accounts" / ids.to_path(account) / "users" / ids.to_path(user)
