"""Unnamed: that chains went while nobody was there to free the pages they named.

A store without conversations cannot reach pages. When it forgets a memory it takes the
manifests of its user's chains away, and says so in one small file of the root; whoever
holds a page store of that root sees that the file is another one, and frees what no
chain names, that of turns which others were taking included. The law: the file changes,
durably, before the first manifest goes, in case that nothing after it is done, and
again when the last one is gone. It holds nothing but what tells it from the one before.

    with unnamed.noted(store.root, store.io, is_alone=True):
        ...                              # manifests go
    unnamed.last(store.root, store.io)   # b"" if that never happened
"""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from kvmem.session.files import TEMPORARY
from kvmem.session.io import OsIO

_FILE = ".unnamed"


@contextlib.contextmanager
def noted(root: Path, io: OsIO, is_alone: bool) -> Iterator[None]:
    """Say durably that the block takes the last name of pages away.

    Args:
        root: of the store.
        io: its files.
        is_alone: nobody here frees the pages; else nothing is noted.
    """
    if is_alone:
        _note(root, io)
    yield
    if is_alone:
        _note(root, io)


def last(root: Path, io: OsIO) -> bytes:
    """Return what tells one note from the next."""
    try:
        return io.read(root / _FILE)
    except FileNotFoundError:
        return b""


def _note(root: Path, io: OsIO) -> None:
    name = uuid.uuid4().hex
    mine = root / f"{_FILE}-{name}{TEMPORARY}"  # two may note at the same time
    io.write(mine, name.encode())
    io.sync(mine)
    io.replace(mine, root / _FILE)
    io.sync_dir(root)
