"""What all sessions of a root name: every chain, whoever's it is.

For whoever frees pages that no chain names. The law: what cannot be read names nothing,
and what this reads is shown to nobody.

    for identity, actor, blob in named.chains(store.root, store.io): ...
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvmem.errors import FormatMismatch
from kvmem.session.chains import FORMAT
from kvmem.session.identity import Identity
from kvmem.session.io import OsIO
from kvmem.session.place import CHAINS


def chains(root: Path, io: OsIO) -> Iterator[tuple[Identity, str | None, bytes]]:
    """Yield the owner, the actor and the bytes of every chain that is whole."""
    for account in _folders(root / "accounts", io):
        for user in _folders(account / "users", io):
            for session in _folders(user / "sessions", io):
                for name in io.names(session / CHAINS):
                    found = _read(session / CHAINS / name, io)
                    if found is not None:
                        yield found


def _folders(parent: Path, io: OsIO) -> Iterator[Path]:
    """Yield the folders that are no notes or locks of a store."""
    for name in io.names(parent):
        if not name.startswith("."):
            yield parent / name


def _read(path: Path, io: OsIO) -> tuple[Identity, str | None, bytes] | None:
    try:
        head, _, blob = io.read(path).partition(b"\n")
        fields = json.loads(head)
        identity = Identity(*(fields[name] for name in Identity._fields))
        identity.check(fields, FORMAT)
        is_whole = (len(blob), zlib.crc32(blob)) == (fields["nbytes"], fields["crc"])
    except (OSError, ValueError, KeyError, TypeError, FormatMismatch):
        return None
    return (identity, fields["actor"], blob) if is_whole else None
