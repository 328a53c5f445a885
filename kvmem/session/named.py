"""What all sessions of a root name: every chain, whoever's it is.

For whoever frees pages that no chain names. The law: what cannot be read names nothing,
and what this reads is shown to nobody.

    for identity, actor, blob in named.chains(store.root, store.io): ...
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvmem.session.chains import Held, parse
from kvmem.session.identity import Identity
from kvmem.session.io import OsIO
from kvmem.session.place import CHAINS


def chains(root: Path, io: OsIO) -> Iterator[tuple[Identity, str | None, bytes]]:
    """Yield the owner, the actor and the bytes of every chain that is whole."""
    for account in _folders(root / "accounts", io):
        for user in _folders(account / "users", io):
            for session in _folders(user / "sessions", io):
                for name in io.names(session / CHAINS):
                    held = _read(session / CHAINS / name, io)
                    if held is not None:
                        yield held.identity, held.actor, held.blob


def _folders(parent: Path, io: OsIO) -> Iterator[Path]:
    """Yield the folders that are no notes or locks of a store."""
    for name in io.names(parent):
        if not name.startswith("."):
            yield parent / name


def _read(path: Path, io: OsIO) -> Held | None:
    with contextlib.suppress(OSError):  # it was taken away meanwhile
        return parse(io.read(path))
    return None
