"""A disk in memory that knows what was synced, and a process that can die at any step.

A name is durable when its folder was synced since, bytes when their file was. `kill`
keeps all that was written; `lose_power` keeps what was synced, and of the rest nothing
(`rng=None`) or, name by name and file by file, whatever a random choice says.
"""

import copy
import random
from pathlib import Path

from kvmem.session.io import OsIO, Step


class Crash(BaseException):
    """The process died: nothing of it runs any more."""


class File:
    def __init__(self):
        self.data, self.synced = b"", b""


class Folder:
    def __init__(self):
        self.entries, self.synced = {}, {}


class MemoryDisk(OsIO):
    """The verbs of `OsIO` on a tree in memory.

    `die_at` is the step before which the process dies; with `tear` a part of a write
    has reached the file by then. `forgets(step)` says which syncs do nothing.
    """

    def __init__(self, root: Folder | None = None, forgets=lambda step: False):
        self.root = root or Folder()
        self.forgets = forgets
        self.steps: list[Step] = []
        self.die_at, self.tear, self.is_dead = None, None, False
        self.time, self.held = 0.0, set()

    # What the world does to it.

    def kill(self) -> "MemoryDisk":
        """Return the disk as another process finds it after this one was killed."""
        return MemoryDisk(copy.deepcopy(self.root), self.forgets)

    def lose_power(self, rng: random.Random | None = None) -> "MemoryDisk":
        """Return the disk as it may be found after a power cut."""
        return MemoryDisk(_survived(self.root, rng), self.forgets)

    # Steps.

    def perform(self, step, action):
        if self.is_dead:
            raise Crash
        if self.die_at == len(self.steps):
            self.is_dead = True
            raise Crash
        self.steps.append(step)
        return action()

    def _put(self, verb: str, path: Path, data: bytes, fresh: bool) -> None:
        def put(data=data):
            folder, file = self._at(path.parent).entries, None
            if path.name in folder:
                file = folder[path.name]
            elif not fresh:
                raise FileNotFoundError(path)
            else:
                file = folder[path.name] = File()
            file.data = data if fresh else file.data + data

        if self.die_at == len(self.steps) and self.tear is not None:
            put(data[: int(len(data) * self.tear)])
        self.perform(Step(verb, path), put)

    def write(self, path, data):
        self._put("write", path, data, fresh=True)

    def append(self, path, data):
        self._put("append", path, data, fresh=False)

    def mkdir(self, path):
        def make():
            entries = self._at(path.parent).entries
            if path.name in entries:
                raise FileExistsError(path)
            entries[path.name] = Folder()

        self.perform(Step("mkdir", path), make)

    def truncate(self, path, nbytes):
        def cut():
            file = self._at(path)
            file.data = file.data[:nbytes]

        self.perform(Step("truncate", path), cut)

    def sync(self, path):
        def sync():
            file = self._at(path)
            file.synced = file.data

        step = Step("sync", path)
        self.perform(step, (lambda: None) if self.forgets(step) else sync)

    def sync_dir(self, path):
        def sync():
            folder = self._at(path)
            folder.synced = dict(folder.entries)

        step = Step("sync_dir", path)
        self.perform(step, (lambda: None) if self.forgets(step) else sync)

    def replace(self, old, new):
        self.perform(Step("replace", new), lambda: self._move(old, new))

    def rename_dir(self, old, new):
        def rename():
            there = self._at(new.parent).entries.get(new.name)
            if there is not None and there.entries:
                raise OSError(39, "Directory not empty", str(new))
            self._move(old, new)

        self.perform(Step("rename_dir", new), rename)

    def unlink(self, path):
        def unlink():
            self._at(path.parent).entries.pop(path.name, None)

        self.perform(Step("unlink", path), unlink)

    def remove_tree(self, path):
        if self.is_dir(path):
            take = self._at(path.parent).entries.pop
            self.perform(Step("remove_tree", path), lambda: take(path.name))

    # Questions.

    def read(self, path):
        file = self._at(path)
        if not isinstance(file, File):
            raise FileNotFoundError(path)
        return file.data

    def names(self, folder):
        return sorted(self._at(folder).entries) if self.is_dir(folder) else []

    def is_dir(self, path):
        return isinstance(self._look(path), Folder)

    def is_file(self, path):
        return isinstance(self._look(path), File)

    def try_lock(self, path):
        if path in self.held:
            return None
        self.held.add(path)
        return path

    def unlock(self, handle):
        self.held.discard(handle)

    def now(self):
        return self.time

    def pause(self, seconds):
        self.time += seconds

    def _look(self, path: Path):
        node = self.root
        for name in filter(None, str(path).split("/")):
            node = node.entries.get(name) if isinstance(node, Folder) else None
        return node

    def _at(self, path: Path):
        if (node := self._look(path)) is None:
            raise FileNotFoundError(path)
        return node

    def _move(self, old: Path, new: Path) -> None:
        node = self._at(old.parent).entries.pop(old.name)
        self._at(new.parent).entries[new.name] = node


def _survived(node, rng: random.Random | None):
    """Return a node as it may be found after a power cut."""
    if isinstance(node, File):
        kept = File()
        data = node.synced
        if rng is not None and node.data != node.synced:
            is_grown = node.data.startswith(node.synced)  # what was synced stays
            least = len(node.synced) if is_grown else 0
            part = node.data[: rng.randint(least, len(node.data))]
            data = rng.choice([node.synced, node.data, part])
        kept.data = kept.synced = data
        return kept
    kept = Folder()
    for name in sorted({*node.entries, *node.synced}):
        choices = [node.synced.get(name)]
        if rng is not None:
            choices.append(node.entries.get(name))
        found = rng.choice(choices) if rng is not None else choices[0]
        if found is not None:
            kept.entries[name] = _survived(found, rng)
    kept.synced = dict(kept.entries)
    return kept
