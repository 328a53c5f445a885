"""Unnamed: that chains went while nobody was there to free the pages they named.

A store without conversations cannot reach pages. When it forgets a memory it takes the
manifests of its user's chains away, and says so in one small file of the root; whoever
holds a page store of that root sees that the file is another one, and frees what no
chain names. The law: the file changes, durably, before the first manifest goes, and it
holds nothing but what tells it from the one before.

    unnamed.note(store.root, store.io)
    unnamed.last(store.root, store.io)   # b"" if that never happened
"""

import uuid
from pathlib import Path

from kvmem.session import files
from kvmem.session.io import OsIO

_FILE = ".unnamed"


def note(root: Path, io: OsIO) -> None:
    """Say durably that pages may be there which no chain names."""
    files.write(io, root / _FILE, uuid.uuid4().hex.encode())


def last(root: Path, io: OsIO) -> bytes:
    """Return what tells one note from the next."""
    try:
        return io.read(root / _FILE)
    except FileNotFoundError:
        return b""
