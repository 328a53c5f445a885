"""What a power loss leaves: only what our steps have synced is sure to be there.

A disk that remembers what was synced makes every state that may be found afterwards:
a name since the last sync of its folder may be old, new or absent; a file whose bytes
were not synced may be absent, empty, a prefix or whole, each file by itself, Orbax's
files too, whatever Orbax has synced. Then the store has to keep its word on it.
"""

import itertools
import os
import random
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvmem import store
from kvmem.errors import KVMemError
from kvmem.store.io import Disk

CHUNK, RECORD = 4, 96
ABSENT = None


class Moment(NamedTuple):
    """What is sure, and what may be, after one step."""

    acked: int
    removed: bool  # the step took a folder away
    names: dict  # folder -> {name: thing} as it was synced
    maybe: dict  # folder -> {name: {thing or ABSENT}} seen since then
    synced: dict  # file -> bytes as they were synced
    bytes: dict  # file -> bytes now or last seen; ABSENT for a folder


class Remembering(Disk):
    """The real disk, with a note after every step of what a power loss may leave."""

    def __init__(self, top: Path, forget=lambda step: False):
        self.top, self.forget = top, forget
        self.moments: list[Moment] = []
        self.acked = 0
        self._lock = threading.Lock()
        self._things = {}  # inode -> number of the thing that has it now
        self._numbers = itertools.count()
        self._names, self._maybe, self._synced, self._bytes = {}, {}, {}, {}
        self._look()
        self._names = {0: {}}

    def perform(self, step, action):
        with self._lock:
            result = action()
            now = self._look()
            if step.verb == "sync" and not self.forget(step):
                thing = self._things[step.path.stat().st_ino]
                if step.path.is_dir():
                    self._names[thing] = dict(now[thing])
                    self._maybe.pop(thing, None)
                else:
                    self._synced[thing] = self._bytes[thing]
            self.note(removed=step.verb == "remove")
            return result

    def note(self, acked: int | None = None, removed: bool = False) -> None:
        self.acked = self.acked if acked is None else acked
        maybe = {
            folder: {name: set(things) for name, things in seen.items()}
            for folder, seen in self._maybe.items()
        }
        names = {folder: dict(held) for folder, held in self._names.items()}
        self.moments.append(
            Moment(
                self.acked,
                removed,
                names,
                maybe,
                dict(self._synced),
                dict(self._bytes),
            )
        )

    def _look(self) -> dict:
        """Note names and bytes as they are; return the names by folder."""
        there, paths = {}, [self.top, *sorted(self.top.rglob("*"))]
        for path in paths:
            inode = path.stat().st_ino
            if inode not in self._things:
                self._things[inode] = next(self._numbers)
            thing = self._things[inode]
            there[inode] = thing
            self._bytes[thing] = ABSENT if path.is_dir() else path.read_bytes()
        self._things = there
        now = {}
        for folder in (path for path in paths if path.is_dir()):
            held = {p.name: there[p.stat().st_ino] for p in folder.iterdir()}
            now[there[folder.stat().st_ino]] = held
        for folder, held in now.items():
            seen = self._maybe.setdefault(folder, {})
            for name in held.keys() | self._names.get(folder, {}).keys() | seen.keys():
                seen.setdefault(name, set()).add(held.get(name))
        for folder in self._names.keys() | self._maybe.keys():
            if folder not in now:  # removed: it may come back, with part of what it had
                seen = self._maybe.setdefault(folder, {})
                for name in self._names.get(folder, {}).keys() | seen.keys():
                    seen.setdefault(name, set()).add(ABSENT)
        return now


def lose_power(moment: Moment, top: Path, rng: random.Random) -> None:
    """Make one of the states that a power loss at this moment may leave."""

    def make(folder: int, path: Path) -> None:
        os.mkdir(path, 0o700)
        sure, seen = moment.names.get(folder, {}), moment.maybe.get(folder, {})
        for name in sorted(sure.keys() | seen.keys()):
            options = {sure.get(name)} | seen.get(name, set())
            thing = rng.choice(sorted(options, key=lambda t: -1 if t is None else t))
            if thing is ABSENT:
                continue
            if moment.bytes[thing] is ABSENT:
                make(thing, path / name)
            elif (data := content(thing)) is not ABSENT:
                (path / name).write_bytes(data)

    def content(thing: int) -> bytes | None:
        data = moment.bytes[thing]
        if moment.synced.get(thing) == data:
            return data
        prefix = data[: rng.randrange(len(data) + 1)]
        return rng.choice([ABSENT, b"", prefix, data, moment.synced.get(thing)])

    make(0, top)


def open_at(root: Path, **limits) -> store.PageStore:
    return store.PageStore.open(root, "m", "f", RECORD, CHUNK, **limits)


def played(tmp_path, chunks, forget=lambda step: False) -> Remembering:
    """Two puts on a new root, every moment noted."""
    (tmp_path / "real").mkdir()
    disk = Remembering(tmp_path / "real", forget)
    with open_at(tmp_path / "real" / "root", io=disk) as st:
        for start, stop in ((0, 3), (3, 5)):
            st.put(*chunks.part(start, stop), chunks.keys[start - 1] if start else None)
            disk.note(acked=stop)
    return disk


def complaints(root: Path, chunks, least: int, **limits) -> list[str]:
    """Open what is left, and say where the store's word is broken."""
    said = []
    try:
        opened = open_at(root, **limits)
    except KVMemError as error:
        return [str(error)]
    with opened as st:
        found = st.get(chunks.keys, chunks.tokens)
        if found.num_hit < least:
            said.append(f"{found.num_hit} of {least} acknowledged: {found.reason}")
        if not np.array_equal(found.records, chunks.records[: found.num_hit * CHUNK]):
            said.append("other bytes")
        said += [f"{r}" for r in st.verify() if r.status != "ok"]
        st.put(*chunks)
        found = st.get(chunks.keys, chunks.tokens)
        if found.num_hit != len(chunks.keys):
            said.append(f"after the next put: {found.num_hit}, {found.reason}")
    return said


def lost(tmp_path, disk, chunks, moments, seeds, **limits) -> list[str]:
    said = []
    for at, moment in moments:
        for seed in seeds:
            top = tmp_path / f"lost-{at}-{seed}"
            lose_power(moment, top, random.Random(f"{at}/{seed}"))
            broken = complaints(top / "root", chunks, moment.acked, **limits)
            said += [f"step {at}, seed {seed}: {words}" for words in broken]
    return said


def test_a_power_loss_takes_nothing_acknowledged(tmp_path, make_chunks):
    chunks = make_chunks(5)
    disk = played(tmp_path, chunks)
    moments = list(enumerate(disk.moments))
    assert len(moments) > 60 and moments[-1][1].acked == 5
    some = [each for each in moments if each[0] % 6 == 0] + moments[-1:]
    some = list(dict(some).items())
    assert lost(tmp_path, disk, chunks, some, range(3)) == []


@pytest.mark.long
def test_a_power_loss_at_any_step_takes_nothing_acknowledged(tmp_path, make_chunks):
    chunks = make_chunks(5)
    disk = played(tmp_path, chunks)
    moments = list(enumerate(disk.moments))
    assert lost(tmp_path, disk, chunks, moments, range(8)) == []


FORGOTTEN = {
    "a file of Orbax's": lambda step: step.path.name == "zarr.json",
    "the records": lambda step: step.path.parent.name == "c",
    "the table of chunks": lambda step: step.path.name == "chunks.safetensors",
    "a folder of Orbax's": lambda step: step.path.name == "c",
    "the segment's folder": lambda step: step.path.parent.name == "f",
    "the store's folder": lambda step: step.path.name == "f",
    "the model's folder": lambda step: step.path.name == "m",
    "the root's folder": lambda step: step.path.name == "root",
    "the folder of the root": lambda step: step.path.name == "real",
    "the manifest": lambda step: step.path.name == "manifest.json.tmp",
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_any_sync_that_is_left_out_is_missed(tmp_path, make_chunks, what):
    """The twins: after a put was acknowledged, each of our syncs matters."""
    chunks = make_chunks(5)
    disk = played(tmp_path, chunks, FORGOTTEN[what])
    last = len(disk.moments) - 1, disk.moments[-1]
    for seed in range(60):
        if lost(tmp_path, disk, chunks, [last], [seed]):
            return
    pytest.fail(f"no power loss ever needed the sync of {what}")


# eviction and rewriting


def test_a_power_loss_while_room_is_made_leaves_whole_segments(tmp_path, make_chunks):
    """Chunks may be evicted, so fewer are sure; none is half there."""
    chunks, others = make_chunks(6), make_chunks(12, seed=5)
    (tmp_path / "real").mkdir()
    disk = Remembering(tmp_path / "real")
    limits = {"max_nbytes": 34_000}
    with open_at(tmp_path / "real" / "root", io=disk, **limits) as st:
        st.put(*chunks.part(0, 4))
        for at in range(0, 12, 2):
            st.put(*others.part(at, at + 2), others.keys[at - 1] if at else None)
        st.gc()
        assert st.stats().evicted
    moments = list(enumerate(disk.moments))
    some = [moment for moment in moments if moment[1].removed]
    assert len(some) > 2
    some = some[:8] + random.Random(0).sample(moments, 12)
    assert lost(tmp_path, disk, chunks, some, range(3)) == []
