"""The seam: every step by which the store changes the disk goes through one object.

The law: between "records in memory" and "put acknowledged" nothing touches the disk
except by a verb of `Disk`, and every verb passes `perform`. So a test can number the
steps, stop the process at any of them, fail one as a full disk would, or work out what
a power loss leaves. What Orbax does is one step: it is not ours to cut.

    class Full(Disk):
        def perform(self, step, action):
            if step.verb == "write":
                raise OSError(errno.ENOSPC, "No space left on device")
            return action()

    PageStore.open(root, ..., io=Full())
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

FILE_MODE = 0o600
FOLDER_MODE = 0o700

Verb = Literal[
    "mkdir", "write", "orbax", "close", "sync", "rename", "unlink", "remove", "touch"
]


class Step(NamedTuple):
    """One change of the disk that is about to be made."""

    verb: Verb
    path: Path  # for "rename" the new name


class Disk:
    """The steps, as they are on a real disk; a test overrides `perform`."""

    def perform[T](self, step: Step, action: Callable[[], T]) -> T:
        """Do one step."""
        return action()

    def mkdir(self, path: Path) -> None:
        """Make a folder that is not there, closed to others."""
        self.perform(Step("mkdir", path), lambda: path.mkdir(mode=FOLDER_MODE))

    def write(self, path: Path, data: bytes) -> None:
        """Write a file from its start, closed to others; it is not durable yet."""
        self.perform(Step("write", path), lambda: _write(path, data))

    def orbax(self, path: Path, save: Callable[[], None]) -> None:
        """Let Orbax commit a checkpoint at `path`."""
        self.perform(Step("orbax", path), save)

    def close_to_others(self, path: Path) -> None:
        """Give a file or folder the store's modes."""
        mode = FOLDER_MODE if path.is_dir() else FILE_MODE
        self.perform(Step("close", path), lambda: os.chmod(path, mode))

    def sync(self, path: Path) -> None:
        """Make a file's bytes durable, or the names in a folder."""
        self.perform(Step("sync", path), lambda: _sync(path))

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, replacing what had it."""
        self.perform(Step("rename", new), lambda: os.rename(old, new))

    def unlink(self, path: Path) -> None:
        """Take a file away; one that is not there is no error."""
        self.perform(Step("unlink", path), lambda: path.unlink(missing_ok=True))

    def remove(self, path: Path) -> None:
        """Take a folder away with all that is in it."""
        self.perform(Step("remove", path), lambda: _remove(path))

    def touch(self, path: Path, time_ns: int) -> None:
        """Set a file's time, which is advice and never synced."""
        self.perform(Step("touch", path), lambda: os.utime(path, ns=(time_ns, time_ns)))


DISK = Disk()


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(path, flags, FILE_MODE), "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def _remove(path: Path) -> None:
    if path.is_symlink():  # somebody moved a segment to another disk
        shutil.rmtree(path.resolve())
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
