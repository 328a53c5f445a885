"""A folder of segments on a disk: names, leftovers, and when each was last asked for.

The law: a segment's name begins with its number, and numbers only grow. What cannot be
read, or belongs to somebody else, is never taken away: leftovers are folders with a
name of ours and no manifest, and drafts of manifests that are there.

    shelf = FolderShelf(root / model_id / format_id, facts)
    extend(index, shelf)
"""

import contextlib
import dataclasses
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvmem.store import manifest, root_folder, rows, segment
from kvmem.store.index import Index
from kvmem.store.io import DISK, Disk
from kvmem.store.results import SegmentReport
from kvmem.store.rows import Fault
from kvmem.store.segment import Facts, Segment, Unusable
from kvmem.store.shelf import Seen, extend
from kvmem.store.sidecar import Key

_NAME = re.compile(r"(\d{8,})-[0-9a-f]{8}")


class FolderShelf:
    """Segments below `folder`, whose last three parts are root, model and format."""

    def __init__(self, folder: Path, facts: Facts, disk: Disk = DISK):
        """Look at a folder; only the holder of the writer's lock changes it."""
        self.folder, self.facts, self.disk = folder, facts, disk
        self._number = max(map(number, names(folder)), default=0)
        self._writing: set[str] = set()  # not published yet: nobody else's to take in

    def look(self, held: Index) -> Seen:
        """Load what is new; see what has lost its manifest."""
        there = names(self.folder)
        writing = set(self._writing)  # first: what is published leaves it afterwards
        with held.lock:
            known = held.segments.keys() | held.leaving.keys() | writing
        new = [self._load(name) for name in there if name not in known]
        gone = {n for n, each in list(held.segments.items()) if not each.is_there}
        return Seen(new, gone | set(held.unusable) - set(there))

    def write(
        self,
        keys: Sequence[Key],
        tokens: np.ndarray,
        rows: np.ndarray,
        parents: Sequence[Key | None],
        checksums: Callable[[], Sequence[bytes]] | None,
        confirm: Callable[[], None],
        publish: Callable[[Segment], None],
    ) -> Segment:
        """Write a segment under the next number."""
        self._number += 1
        folder = self.folder / f"{self._number:08d}-{secrets.token_hex(4)}"
        said = self.facts, keys, tokens, rows, parents, self.disk, checksums, confirm
        self._writing.add(folder.name)
        try:
            sealed = segment.write(folder, *said)
            try:
                publish(sealed)
            except BaseException:
                self.drop(sealed)
                raise
        finally:
            self._writing.discard(folder.name)
        return sealed

    def drop(self, segment_: Segment) -> None:
        """Take a segment away, its manifest first."""
        segment.drop(segment_.folder, self.disk)

    def read(
        self,
        segment_: Segment,
        numbers: Sequence[int],
        out: np.ndarray,
        deadline: float = rows.NEVER,
    ) -> list[Fault | None]:
        """Read and verify rows."""
        return rows.read(segment_, numbers, out, deadline)

    def sweep(self, held: Index) -> tuple[str, ...]:
        """Take away what a dead writer left; return its names in the folder."""
        left = [
            name
            for name, refused in list(held.unusable.items())
            if refused.status == "unfinished"
            and number(name)
            and (self.folder / name).is_dir()
            and not (self.folder / name).is_symlink()  # the store makes none
        ]
        for name in left:
            self.disk.remove(self.folder / name)
            with held.lock:
                del held.unusable[name]
        drafts = [f"{name}/{manifest.NAME}.tmp" for name in list(held.segments)]
        drafts = [name for name in drafts if (self.folder / name).exists()]
        for name in drafts:
            self.disk.unlink(self.folder / name)
        return (*left, *drafts)

    def note_used(self, used_ns: Mapping[str, int]) -> None:
        """Let the segments' times say when they were last asked for.

        It is advice: no chunk depends on it, so it is not synced, and failing is no
        failure of a put.
        """
        for name, time_ns in used_ns.items():
            with contextlib.suppress(OSError):
                self.disk.touch(self.folder / name / manifest.NAME, time_ns)

    def explain(self, held: Index) -> tuple[str, str]:
        """Say what else the root holds."""
        return root_folder.explain(self.folder.parents[1], self.facts, held)

    def verify(self) -> tuple[SegmentReport, ...]:
        """Read everything in the folder and report every segment."""
        reports = (self._report(name) for name in names(self.folder))
        return tuple(filter(None, reports))

    def _load(self, name: str) -> Segment | Unusable:
        found = segment.load(self.folder / name, self.facts)
        if isinstance(found, Unusable) and found.status != "unfinished":
            nbytes = file_nbytes(self.folder / name)
            return dataclasses.replace(found, file_nbytes=nbytes)
        return found

    def _report(self, name: str) -> SegmentReport | None:
        """Return what is to be said of a name, None if it went while it was read."""
        found, problems = self._load(name), ()
        if isinstance(found, Segment):
            with contextlib.suppress(FileNotFoundError):
                problems = rows.inspect(found)
            if not found.is_there:
                found = self._load(name)
        if isinstance(found, Unusable):
            if not (self.folder / name).exists():
                return None
            return SegmentReport(name, found.status, 0, 0, (found.detail,))
        status = "damaged" if problems else "ok"
        return SegmentReport(name, status, len(found.keys), found.nbytes, problems)


def rebuild(folder: Path, facts: Facts) -> Index:
    """Return the index of all sealed segments in `folder`, oldest first."""
    held = Index()
    extend(held, FolderShelf(folder, facts))
    return held


def file_nbytes(folder: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if not folder.is_dir():
        paths = [str(folder)]
    else:
        walked = os.walk(folder)
        paths = [os.path.join(at, name) for at, _, found in walked for name in found]
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # it went meanwhile
            total += os.stat(path).st_size
    return total


def names(folder: Path) -> Sequence[str]:
    """Return the names in a store folder in the order in which they were given.

    Hidden files are the system's own.
    """
    if not folder.is_dir():
        return ()
    return sorted(
        (path.name for path in folder.iterdir() if not path.name.startswith(".")),
        key=lambda n: (number(n), n),
    )


def number(name: str) -> int:
    """Return a segment name's number, 0 for a name the store did not give."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0
