"""Files that stay: how the steps of io.py are put in an order that survives.

The law: what these verbs have returned from is on the disk, names included. A new name
is durable only after its folder was synced, so every verb that makes one syncs the
folder. Folders are 0700 and files 0600. POSIX only: `flock` and folder syncs have no
counterpart elsewhere, and the store says so when it is imported.

    durable.write_file(root / "_store.json", b"{}")  # temp, sync, rename, sync folder
"""

import concurrent.futures
import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvmem.errors import StoreLocked, say
from kvmem.store.io import DISK, FILE_MODE, Disk

try:
    import fcntl
except ImportError as missing:
    raise ImportError(
        say(
            "the page store on this system",
            "it needs flock and folder syncs, which only POSIX systems have",
            "Run it on Linux or macOS",
        )
    ) from missing

_SYNCS_AT_ONCE = 4


def digest(data) -> bytes:
    """Return the 16-byte XXH3-128 of any contiguous buffer.

    Bits rot by accident, not by attack, so speed decides: 36 GB/s on one thread where
    SHA-256 makes 1.3 and zlib's crc32 4 (32 MB in 45 pieces), and 128 bits leave damage
    no more chance than a cryptographic digest would. It is no defence against a forger.
    """
    return xxhash.xxh3_128_digest(data)


def make_folder(path: Path, disk: Disk = DISK) -> None:
    """Make `path` and its missing parents, each durable in its own parent.

    A folder that is there is synced in its parent all the same, where this user may:
    whoever made it may have died before that.
    """
    if path.is_dir():
        with contextlib.suppress(PermissionError):
            disk.sync(path.parent)
        return
    if not path.parent.is_dir():
        make_folder(path.parent, disk)
    with contextlib.suppress(FileExistsError):
        disk.mkdir(path)
    disk.sync(path.parent)


def write_file(
    path: Path,
    data: bytes,
    disk: Disk = DISK,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Put `data` under `path` whole or not at all: temp, sync, rename, sync folder.

    `confirm` is asked before the rename, and may raise in its place.
    """
    temporary = path.with_name(path.name + ".tmp")
    disk.write(temporary, data)
    disk.sync(temporary)
    confirm()
    disk.rename(temporary, path)
    disk.sync(path.parent)


class Written(NamedTuple):
    """What a file was given to hold, known without reading it back."""

    nbytes: int
    running: xxhash.xxh3_128  # over them; it is continued with what the writer added
    check_tail: Callable[[Path, int, bytes], None]  # raises at what it does not know


def seal_tree(
    folder: Path, disk: Disk = DISK, written: Mapping[str, Written] | None = None
) -> dict[str, tuple[int, bytes]]:
    """Close modes, sync all of `folder`, return (nbytes, digest) a file.

    Modes change first and syncs follow, or each sync would wait for the next change.
    Syncs run side by side, four at a time: one after another, 180 of them took 350 ms
    on a busy machine; more at a time only wait for one another.

    A file in `written` is not read back but for what was put behind its bytes: its
    digest is that of what it should hold. Bits that flipped on the way to the disk are
    then damage that every read and `verify` find; read back, they would have been
    sealed as right.

    Args:
        folder: all of whose files are sealed.
        disk: what the steps go through.
        written: what files hold, by their names below the folder.

    Raises:
        CorruptPage: a file in `written` is shorter or its tail is not as it should be.
    """
    files, folders = [], []
    for parent, _, names in os.walk(folder, topdown=False):
        folders.append(Path(parent))
        files += [Path(parent, name) for name in names]
    for path in files + folders:
        disk.close_to_others(path)
    names = [path.relative_to(folder).as_posix() for path in files]
    known = [(written or {}).get(name) for name in names]
    with concurrent.futures.ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
        sealed = list(pool.map(_seal_file, files, known, itertools.repeat(disk)))
        list(pool.map(disk.sync, folders))
    return dict(zip(names, sealed, strict=True))


class WriterLock:
    """An exclusive `flock` on a file; it dies with the process that holds it.

    A forked child shares its parent's lock, and keeps it when the parent dies first.
    """

    def __init__(self, path: Path):
        """Take the lock, or raise StoreLocked at once naming who holds it."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as busy:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace")
            self.release()
            raise StoreLocked(
                say(
                    f"a writer's lock on {path.parent}",
                    f"a root has one writer at a time, and {holder or 'another'} is it",
                    "Close that store first, or open this one with read_only=True",
                )
            ) from busy
        except BaseException:
            self.release()
            raise
        name = f"process {os.getpid()} on {socket.gethostname()}"
        with contextlib.suppress(OSError):  # a full disk is opened to make room on it
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, name.encode(), 0)

    @property
    def is_held(self) -> bool:
        """Say whether this object still holds the lock."""
        return self._descriptor is not None

    def check(self) -> None:
        """Raise StoreLocked if the file is another by now, which locks nobody out."""
        mine = os.fstat(self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(mine, os.stat(self._path)):
                return
        raise StoreLocked(
            say(
                f"writing under the lock {self._path}",
                "somebody deleted or replaced the file, so another writer may be at "
                "work",
                "Leave that file alone, close this store and open it again",
            )
        )

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _seal_file(path: Path, known: Written | None, disk: Disk) -> tuple[int, bytes]:
    if known is None:
        data = path.read_bytes()
        disk.sync(path)
        return len(data), digest(data)
    with open(path, "rb") as file:
        file.seek(known.nbytes)
        tail = file.read()
    known.check_tail(path, known.nbytes, tail)
    known.running.update(tail)
    disk.sync(path)
    return known.nbytes + len(tail), known.running.digest()
