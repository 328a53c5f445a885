"""Every death of a script of operations: a process kill or a power cut at any step.

The script runs on a disk in memory and dies before every one of its steps, or in the
middle of a write. Then the disk is as a kill leaves it, or as a power cut may, and the
script goes on from the operation that was cut off, each operation in a new process.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from kvmem.errors import KVMemError
from kvmem.session import Hit, SessionStore, archive, commit, files, log, messages

ROOT = Path("/r")
ITEMS = Path("/items.json")
EMPTY = {"texts": [], "ledger": {}, "clock": 0, "chain": None}


class Memory:
    def search(self, principal, query, limit, actor, peer_scope):
        return [Hit("M", "a memory", 1.0)]


class Run:
    """Processes on one disk, one an operation."""

    def __init__(self, disk):
        self.disk = disk

    @property
    def session(self):
        store = SessionStore.open(ROOT, io=self.disk, retriever=Memory())
        return store.principal("lab", "ann").session("s")

    def do(self, op: str):
        """Do one operation and return what it acknowledges."""
        verb, *names = op.split()
        return getattr(self, verb)(self.session, *names)

    def recall(self, session, rid, mark="return"):
        found = session.principal.recall(
            "?", session=session, cooldown=messages(3), request_id=rid, mark=mark
        )
        assert found.status in ("new", "ok", "replayed"), found
        return [entry.uri for entry in found.entries]

    def msg(self, session, key, count=1, carries=()):
        said = [{"role": "user", "content": f"{key}.{i}"} for i in range(count)]
        return session.append(said, key=key, carries=carries)[:2]

    def batch(self, session, key):
        return self.msg(session, key, 3)

    def carry(self, session, key, rid):
        return self.msg(session, key, 1, [rid])

    def commit(self, session, keep="0"):
        session.commit(int(keep))

    def extract(self, session):
        def remember(text, peer, key):
            kept = self.items() | {key: text}
            files.write(self.disk, ITEMS, json.dumps(kept).encode())

        def texts(said):
            return [message.text for message in said]

        commit.run(session.place, 1, 0, texts, remember)

    def delete(self, session):
        session.delete()

    def create(self, session):
        session.create()

    def chain(self, session, text):
        blob, generation = session.chains.get()
        if blob != text.encode():
            session.chains.put(None, text.encode(), generation)

    def items(self) -> dict:
        is_there = self.disk.is_file(ITEMS)
        return json.loads(self.disk.read(ITEMS)) if is_there else {}

    def seen(self) -> dict:
        """Return what a reader finds."""
        session, place = self.session, self.session.place
        found = {"exists": session.exists, "items": sorted(self.items().values())}
        if not session.exists:
            return found
        return found | {
            "texts": [m.text for m in session.messages()],
            "ledger": {u: r.turn for u, r in session.ledger().items()},
            "clock": session.clock,
            "live": len(session.live()),
            "archives": [
                (a.first, a.stop, a.is_extracted)
                for a in archive.listed(place)
                if a.first < log.read(place).start.messages
            ],
            "chain": session.chains.get()[0],
            "fsck": session.principal.store.fsck(session),
        }


def deaths(make_disk, script, num_random: int) -> Iterator[tuple[str, object, list]]:
    """Yield (how, disk, acknowledged answers) of every death."""
    disk, answers, found = make_disk(), [], []

    def watch(step, share, left):
        found.append((step, share, left, list(answers)))

    disk.watch = watch
    for op in script:
        answers.append(Run(disk).do(op))
    for number, (step, share, left, acked) in enumerate(found):
        cuts = [left.lose_power(random.Random(seed)) for seed in range(num_random)]
        cuts = [left.lose_power(), *cuts]
        where = f"before death {number} ({step.verb} {step.path}), {share} of it there"
        yield f"kill {where}", left, acked
        for each in cuts:
            yield f"power loss {where}", each, acked


def judged(make_disk, script, num_random: int = 2, twice: bool = False):
    """Yield what is wrong with each death in words, None where nothing is.

    Args:
        make_disk: makes an empty disk in memory.
        script: operations of `Run`.
        num_random: of a power cut's outcomes, beside the worst one.
        twice: the power goes again after each operation that was tried again.
    """
    calm, expected = Run(make_disk()), []
    after = [calm.seen()]
    for op in script:
        expected.append(calm.do(op))
        after.append(calm.seen())
    for where, disk, answers in deaths(make_disk, script, num_random):
        acked = len(answers)
        try:
            assert answers == expected[:acked], "answers differ"
            _check_found(Run(disk).seen(), after, acked)
            for number in range(acked, len(script)):
                got = Run(disk).do(script[number])
                assert got == expected[number], f"{script[number]}: {got}"
                if twice:
                    disk = disk.lose_power()
            assert Run(disk).seen() == after[-1], Run(disk).seen()
        except (AssertionError, KVMemError, OSError, ValueError, KeyError) as bad:
            yield f"{where}: {bad!r}"
        else:
            yield None


def _check_found(found: dict, after: list[dict], acked: int) -> None:
    """Check that what is found is what the last or the cut-off operation leaves."""
    both = after[acked], after[min(acked + 1, len(after) - 1)]
    for name, empty in EMPTY.items():
        allowed = [each.get(name, empty) for each in both]
        assert found.get(name, empty) in allowed, found
    assert found.get("fsck", ()) == (), found
