"""Runs test vectors from their data: every op of vectors.jsonl, one method each.

A world is one root with one rule set, a retriever that answers what the vector says and
a disk that fails where it says. An op's last argument is what is expected of it.
"""

import contextlib
import errno
import fnmatch
import json
from pathlib import Path

from kvmem.errors import CorruptPage
from kvmem.session import Hit, OsIO, SessionStore, Step, lines, messages

ERRORS = {"io": OSError, "corrupt": CorruptPage}


class Died(BaseException):
    """The process died in the middle of a write."""


class FaultyDisk(OsIO):
    """The real disk, failing steps as told: [op, glob, times].

    Nothing is synced really: no vector pulls the plug, and syncs are slow.
    """

    def __init__(self):
        self.faults: list[list] = []
        self.share = 0.5  # of an append that reaches the disk before it fails

    def strikes(self, op: str, name: str) -> bool:
        """Say whether a fault is due here, and count it off."""
        for fault in self.faults:
            if fault[0] == op and fault[2] and fnmatch.fnmatch(name, fault[1]):
                fault[2] -= 1
                return True
        return False

    def perform(self, step, action):
        name = str(step.path).removesuffix(".tmp")
        is_write = step.verb in ("write", "append", "replace")
        if is_write and self.strikes("write", name):
            raise OSError(errno.EIO, "Input/output error", name)
        return super().perform(step, action)

    def sync(self, path):
        self.perform(Step("sync", path), lambda: None)

    def sync_dir(self, path):
        self.perform(Step("sync_dir", path), lambda: None)

    def append(self, path, data):
        part = data[: int(len(data) * self.share)]
        if self.strikes("append:enospc", str(path)):
            super().append(path, part)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if self.strikes("append:die", str(path)):
            super().append(path, part)
            raise Died
        super().append(path, data)


class Answers:
    """A retriever that returns what it was told to."""

    def __init__(self, io: FaultyDisk):
        self.io, self.hits = io, []

    def search(self, principal, query, limit, actor, peer_scope):
        if self.io.strikes("search", "*"):
            raise RuntimeError("the index is gone")
        return [Hit(uri, f"text of {uri}", 1.0) for uri, _ in self.hits][:limit]


class World:
    """One root under one rule set."""

    def __init__(self, root: Path, rules: str = "kvmem", io: OsIO | None = None):
        self.root, self.rules, self.io = root, rules, io or FaultyDisk()
        self.retriever = Answers(self.io)
        self.who, self.actor, self.count = ("lab", "ann"), None, 0
        self.reopen()

    def play(self, steps) -> None:
        for number, (op, *args) in enumerate(steps):
            try:
                getattr(self, op)(*args)
            except AssertionError as bad:
                raise AssertionError(f"step {number}, {op} {args}: {bad}") from bad

    def session(self, name: str):
        return self.me.session(name.split("@")[0])

    # Ops of the vectors.

    def reopen(self):
        self.store = SessionStore.open(
            self.root, self.rules, io=self.io, retriever=self.retriever
        )
        self.me = self.store.principal(*self.who)

    def recall(self, name, args, expected=None):
        hits = args.get("hits", [["M", "abstract"]])
        if hits == "u0..u599":
            hits = [[f"u{i}", "abstract"] for i in range(600)]
        tiers, self.retriever.hits = dict(hits), hits
        found = self.me.recall(
            "what?",
            session=self.session(name),
            cooldown=messages(args.get("n", 3)),
            actor=self.actor,
            request_id=args.get("rid"),
            mark=args.get("mark", "return"),
            limit=1000,
            render=lambda hit: tiers[hit.uri],
            served=(lambda entries: False) if "digest" in args else None,
        )
        seen = {
            "entries": [entry.uri for entry in found.entries],
            "count": len(found.entries),
        }
        for field, value in (expected or {}).items():
            got = seen[field] if field in seen else getattr(found, field)
            assert got == value, f"{field} is {got!r}, not {value!r}"
        return found

    def msg(self, name, count, more=None):
        more = more or {}
        key, self.count = more.get("key"), self.count + 1
        said = [
            {"role": "user", "content": f"{key or self.count}: message {i}"}
            for i in range(count)
        ]
        expects = contextlib.nullcontext()
        if "err" in more:
            expects = _raises(ERRORS[more["err"]])
        with expects:
            carries = more.get("carries", ())
            self.session(name).append(said, key=key, actor=self.actor, carries=carries)

    def msg_text(self, name, text):
        self.session(name).append([{"role": "user", "content": text}])
        assert self.session(name).messages()[-1].text == text

    def commit(self, name):
        return self.session(name).commit()

    def delete(self, name):
        self.session(name).delete()

    def fault(self, op, glob, times):
        self.io.faults.append([op, glob, times])

    def files(self, name, expected):
        for file, is_there in expected.items():
            path = self.session(name).place.file(file)
            assert path.exists() == is_there, f"{file!r} is there: {not is_there}"

    def ledger(self, name, expected):
        actor = name.split("@")[1] if "@" in name else None
        found = self.session(name).ledger(actor)
        assert {uri: record.turn for uri, record in found.items()} == expected

    def ledger_size(self, name, expected):
        assert len(self.session(name).ledger()) == expected

    def meta(self, name, expected):
        found = self.session(name).meta()
        assert {field: found.get(field) for field in expected} == expected

    def clock(self, name, expected):
        allowed = expected if isinstance(expected, list) else [expected]
        assert self.session(name).clock in allowed, self.session(name).clock

    def fsck(self, name, expected):
        assert expected == "clean" and self.store.fsck(self.session(name)) == ()

    def rmfile(self, name, file):
        self.session(name).place.file(file).unlink()

    def put(self, name, file, text):
        path = self.session(name).place.file(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def tear(self, name, file, share):
        """A fourth append got only so far: part of a line, and no newline."""
        stored = {"id": "m", "role": "user", "parts": [{"type": "text", "text": "é"}]}
        raw = lines.batch(self.session(name).clock, [stored], None, "")
        with open(self.session(name).place.file(file), "ab") as log:
            log.write(raw[: int(len(raw) * share)])

    def flip(self, name, file, where):
        path, number = self.session(name).place.file(file), int(where.split()[1])
        all_lines = path.read_bytes().split(b"\n")
        line = bytearray(all_lines[number - 1])
        line[len(line) // 2] ^= 1
        all_lines[number - 1] = bytes(line)
        path.write_bytes(b"\n".join(all_lines))

    def crash_in_append(self, name, count, more):
        self.io.faults.append(["append:die", "*/messages.jsonl", 1])
        with _raises(Died):
            self.msg(name, count, more)


setattr(World, "as", lambda world, who, *steps: _as(world, who, steps))


def _as(world: World, who, steps) -> None:
    """Run steps as another user or actor."""
    before = world.who, world.actor
    world.who, world.actor = tuple(who[:2]), who[2]
    world.me = world.store.principal(*world.who)
    world.play(steps)
    world.who, world.actor = before
    world.me = world.store.principal(*world.who)


@contextlib.contextmanager
def _raises(kind):
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was expected")


def rows(path: Path) -> dict[str, dict]:
    """Return the vectors of a file by their ids."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["id"]: row for row in found}
