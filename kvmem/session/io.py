"""The seam: everything by which a session store touches its disk.

The law: no file of a session is read, written, synced, renamed or locked but by a
verb of `OsIO`, and every verb that changes something passes `perform`. So a test can
number the steps, stop at any of them, fail one as a full disk would, or put a disk in
memory in its place that forgets what was not synced.

    class Full(OsIO):
        def perform(self, step, action):
            if step.verb == "append":
                raise OSError(errno.ENOSPC, "No space left on device")
            return action()

    SessionStore.open(root, io=Full())
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from kvmem.errors import say

try:
    import fcntl
except ImportError as missing:
    raise ImportError(
        say(
            "the session store on this system",
            "it needs flock and folder syncs, which only POSIX systems have",
            "Run it on Linux or macOS",
        )
    ) from missing

FILE_MODE = 0o600
FOLDER_MODE = 0o700

Verb = Literal[
    "mkdir",
    "write",
    "append",
    "truncate",
    "sync",
    "sync_dir",
    "replace",
    "rename_dir",
    "unlink",
    "remove_tree",
]


class Step(NamedTuple):
    """One change of the disk that is about to be made."""

    verb: Verb
    path: Path  # for "replace" and "rename_dir" the new name


class OsIO:
    """The verbs on a real disk; a test overrides `perform`, or all of them."""

    def perform[T](self, step: Step, action: Callable[[], T]) -> T:
        """Do one step."""
        return action()

    def read(self, path: Path) -> bytes:
        """Return a file's bytes."""
        return path.read_bytes()

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted; none where there is no folder."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def is_dir(self, path: Path) -> bool:
        """Say whether a folder is there."""
        return path.is_dir()

    def is_file(self, path: Path) -> bool:
        """Say whether a file is there."""
        return path.is_file()

    def mkdir(self, path: Path) -> None:
        """Make a folder that is not there, closed to others."""
        self.perform(Step("mkdir", path), lambda: os.mkdir(path, FOLDER_MODE))

    def write(self, path: Path, data: bytes) -> None:
        """Write a file from its start, closed to others; it is not durable yet."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self.perform(Step("write", path), lambda: _put(path, flags, data))

    def append(self, path: Path, data: bytes) -> None:
        """Write behind the bytes of a file that is there."""
        flags = os.O_WRONLY | os.O_APPEND
        self.perform(Step("append", path), lambda: _put(path, flags, data))

    def truncate(self, path: Path, nbytes: int) -> None:
        """Cut a file to its first `nbytes`."""
        self.perform(Step("truncate", path), lambda: os.truncate(path, nbytes))

    def sync(self, path: Path) -> None:
        """Make a file's bytes durable, and its length."""
        self.perform(Step("sync", path), lambda: _sync(path))

    def sync_dir(self, path: Path) -> None:
        """Make the names in a folder durable."""
        self.perform(Step("sync_dir", path), lambda: _sync(path))

    def replace(self, old: Path, new: Path) -> None:
        """Give a file another name, replacing what had it."""
        self.perform(Step("replace", new), lambda: os.replace(old, new))

    def rename_dir(self, old: Path, new: Path) -> None:
        """Give a folder another name, which nothing but an empty folder may have."""
        self.perform(Step("rename_dir", new), lambda: os.rename(old, new))

    def unlink(self, path: Path) -> None:
        """Take a file away; one that is not there is no error."""
        self.perform(Step("unlink", path), lambda: path.unlink(missing_ok=True))

    def remove_tree(self, path: Path) -> None:
        """Take a folder away with all that is in it, if it is there."""
        self.perform(Step("remove_tree", path), lambda: _remove(path))

    def try_lock(self, path: Path) -> int | None:
        """Take the lock on a file through a descriptor of its own, None if held."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def unlock(self, handle: int) -> None:
        """Give a lock back."""
        os.close(handle)

    def now(self) -> float:
        """Return seconds of a clock that only goes forward."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait a little for a lock."""
        time.sleep(seconds)


class Unsynced:
    """Another IO without its syncs: what is written survives a kill, no power cut."""

    def __init__(self, io: OsIO):
        """Stand in front of `io`."""
        self._io = io

    def sync(self, path: Path) -> None:
        """Leave a file's bytes to the system."""

    def sync_dir(self, path: Path) -> None:
        """Leave the names in a folder to the system."""

    def __getattr__(self, name: str):
        return getattr(self._io, name)


def _put(path: Path, flags: int, data: bytes) -> None:
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
