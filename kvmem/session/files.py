"""Files that stay: the orders of steps that survive a kill and a power cut.

The law: when one of these verbs has returned, what it made is durable, its name and the
names of its folders included; before that, the old file is there whole. Whoever made a
folder may have died before its name was synced, so a process syncs the names it did not
make itself once, on its first touch.

    write(io, folder / ".meta.json", b"{}")  # temp, sync, replace, sync folder
"""

import contextlib
from pathlib import Path

from kvmem.session.io import OsIO

TEMPORARY = ".tmp"


def write(io: OsIO, path: Path, data: bytes, durable: bool = True) -> None:
    """Put `data` under `path`, whole or not at all; the caller holds the lock.

    A file that is advice (`durable=False`) is replaced without any sync.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    io.write(temporary, data)
    if durable:
        io.sync(temporary)
    io.replace(temporary, path)
    if durable:
        io.sync_dir(path.parent)


def make_root(io: OsIO, root: Path) -> None:
    """Make a store's root and its missing parents, each durable in its parent.

    The first that is there is synced in its parent too, where this user may.
    """
    if not io.is_dir(root):
        make_root(io, root.parent)
        with contextlib.suppress(FileExistsError):
            io.mkdir(root)
    with contextlib.suppress(PermissionError):
        io.sync_dir(root.parent)


def make_folder(io: OsIO, path: Path, top: Path) -> None:
    """Make `path` and its missing parents below `top`, each durable in its parent."""
    if path == top:
        return
    make_folder(io, path.parent, top)
    if not io.is_dir(path):
        with contextlib.suppress(FileExistsError):
            io.mkdir(path)
    io.sync_dir(path.parent)
