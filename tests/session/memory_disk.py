"""A disk in memory that knows what was synced, and a process that can die at any step.

A name is durable when its folder was synced since, bytes when their file was. `kill`
keeps all that was written; `lose_power` keeps what was synced, and of the rest nothing
(`rng=None`) or, name by name and file by file, whatever a random choice says.
"""

import random
from pathlib import Path

from kvmem.session.io import OsIO, Step

# How much of a write has reached its file when the process dies in it.
TEARS = {"append": (0.5, 1.0), "write": (0.5,)}


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
    has reached the file by then. `watch(step, share, disk)` is shown what a death
    before each step leaves, or one in the middle of a write. `forgets(step)` says which
    syncs do nothing.
    """

    def __init__(self, root: Folder | None = None, forgets=lambda step: False):
        self.root = root or Folder()
        self.forgets = forgets
        self.steps: list[Step] = []
        self.die_at, self.tear, self.is_dead = None, None, False
        self.watch = None
        self.time, self.held = 0.0, set()

    # What the world does to it.

    def kill(self) -> "MemoryDisk":
        """Return the disk as another process finds it after this one was killed."""
        return MemoryDisk(_copied(self.root, {}), self.forgets)

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
        if self.watch:
            self.watch(step, None, self.kill())
        self.steps.append(step)
        return action()

    def _put(self, verb: str, path: Path, data: bytes, fresh: bool) -> None:
        step = Step(verb, path)
        if self.die_at == len(self.steps) and self.tear is not None:
            self._store(path, data[: int(len(data) * self.tear)], fresh)
        if self.watch:
            for share in TEARS[verb]:
                torn = self.kill()
                torn._store(path, data[: int(len(data) * share)], fresh)
                self.watch(step, share, torn)
        self.perform(step, lambda: self._store(path, data, fresh))

    def _store(self, path: Path, data: bytes, fresh: bool) -> None:
        folder = self._at(path.parent).entries
        if path.name not in folder:
            if not fresh:
                raise FileNotFoundError(path)
            folder[path.name] = File()
        file = folder[path.name]
        file.data = data if fresh else file.data + data

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


def _copied(node, known: dict):
    """Return a copy; what is one file under two names stays one."""
    if id(node) in known:
        return known[id(node)]
    new = known[id(node)] = type(node)()
    if isinstance(node, File):
        new.data, new.synced = node.data, node.synced
        return new
    for names, held in ((new.entries, node.entries), (new.synced, node.synced)):
        names.update((name, _copied(each, known)) for name, each in held.items())
    return new


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
