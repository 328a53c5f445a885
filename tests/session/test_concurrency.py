"""The vectors of concurrency: what two writers of one session may not do to each other.

Rows run from their data in many interleavings, each chosen by a seed; C07 and C08 run
real processes. The law: nothing is lost, nothing is doubled, and who waits, waits.
"""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmem.errors import Deleted
from kvmem.session import Hit, SessionStore, locks, materialise, messages

VECTORS = Path(__file__).with_name("vectors.jsonl").read_text().splitlines()
ROWS = {v["id"]: v for v in map(json.loads, VECTORS) if v["id"][0] == "C"}
INTERLEAVED = ("C01", "C02", "C03", "C04", "C05", "C06", "C09")
SEEDS = range(12)


class Parallel:
    """One row's world, its jobs side by side, and what is expected of them."""

    def __init__(self, world, row):
        self.world, self.row = world, row
        world.play(row.get("given", []))

    def jobs(self):
        return [functools.partial(getattr(self, op), *rest) for op, *rest in self.par]

    @property
    def par(self):
        return self.row["par"]

    @property
    def session(self):
        return self.world.session("s")

    def recall(self, name, args=None):
        """Recall what this job's own retriever finds: jobs do not share hits."""
        args, world = args or {}, self.world
        hits = args.get("hits", [["M", "abstract"]])
        return world.me.recall(
            json.dumps(hits),
            session=world.session(name),
            cooldown=messages(3),
            request_id=args.get("rid"),
        )

    def msg(self, name, count, more=None):
        said = [{"role": "user", "content": f"message {i}"} for i in range(count)]
        return self.world.session(name).append(said, key=(more or {}).get("key"))

    def msg_slow(self, name, count):
        with self.world.session(name).place.locked():
            for _ in range(20):  # far longer than a recall waits in vain
                self.world.io.pause(0.1)
        return self.msg(name, count)

    def msg_after_phase1(self, name, count):
        while self.session.clock and self.session.live():  # until the archive is cut
            self.world.io.pause(0.001)
        return self.msg(name, count)

    def commit(self, name):
        return self.world.session(name).commit()

    def delete(self, name):
        return self.world.session(name).delete()

    def check(self, answers) -> None:
        errors = [a for a in answers if isinstance(a, Exception)]
        if "or_msg_first" not in self.row["expect"]:
            assert not errors, errors
        for what, value in self.row["expect"].items():
            getattr(self, f"check_{what}")(value, answers)
        assert self.world.store.fsck(self.session) == () or errors

    def check_clock(self, value, answers):
        assert self.session.clock == value

    def check_files(self, value, answers):
        self.world.files("s", value)

    def check_ledger(self, value, answers):
        self.world.ledger("s", value)

    def check_union_entries(self, value, answers):
        assert sorted({e.uri for a in answers for e in a.entries}) == value

    def check_times_served(self, value, answers):
        assert sum(len(a.entries) for a in answers) == value

    def check_status_not(self, value, answers):
        assert value not in [getattr(a, "status", None) for a in answers]

    def check_archived_once(self, value, answers):
        assert sorted(a.status for a in answers) == ["archived", "skipped"]

    def check_live(self, value, answers):
        assert len(self.session.live()) == value

    def check_or_msg_first(self, value, answers):
        deleted, appended = answers
        assert deleted is None
        assert isinstance(appended, Deleted) or appended.stop == 1
        with pytest.raises(Deleted):
            self.session.messages()


class OwnHits:
    """A retriever that finds what the query itself says."""

    def search(self, principal, query, limit, actor, peer_scope):
        return [Hit(uri, f"text of {uri}", 1.0) for uri, _ in json.loads(query)]


@pytest.fixture
def make_parallel(tmp_path, interpreter, turns):
    numbers = iter(range(1_000))

    def make(row, rules="kvmem") -> Parallel:
        disk = turns.with_turns(interpreter.FaultyDisk)()
        world = interpreter.World(tmp_path / f"{next(numbers)}", rules, disk)
        world.retriever = OwnHits()
        world.reopen()
        return Parallel(world, row)

    return make


@pytest.mark.case("SES-27")
@pytest.mark.parametrize("name", INTERLEAVED)
def test_a_vector_holds_in_every_interleaving(name, make_parallel):
    orders = set()
    for seed in SEEDS:
        parallel = make_parallel(ROWS[name])
        answers = parallel.world.io.interleave(parallel.jobs(), seed)
        parallel.check(answers)
        orders.add(repr([type(a).__name__ for a in answers]))
    if name == "C09":
        assert len(orders) == 2, "both orders were seen"


@pytest.mark.parametrize("name", [k for k, v in ROWS.items() if v["who"] == "ov"])
def test_a_vector_of_openviking_holds_under_its_rules(name, make_parallel):
    for seed in SEEDS[:3]:
        parallel = make_parallel(ROWS[name], "openviking")
        parallel.check(parallel.world.io.interleave(parallel.jobs(), seed))


@pytest.mark.parametrize("name", ["C01", "C02", "C03", "C05"])
def test_without_the_lock_some_interleaving_breaks(name, make_parallel, monkeypatch):
    monkeypatch.setattr(locks.Locks, "_try", lambda self, path, mine: 0)
    monkeypatch.setattr(locks.Locks, "_give", lambda self, handle, mine: None)

    def is_broken(seed):
        parallel = make_parallel(ROWS[name])
        try:
            parallel.check(parallel.world.io.interleave(parallel.jobs(), seed))
        except Exception as error:
            return type(error).__name__
        return None

    assert any(is_broken(seed) for seed in range(60))


APPENDING = """
import sys
from kvmem.session import SessionStore
root, who, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
session = SessionStore.open(root, wait_s=60).principal("lab", "ann").session("s")
for i in range(count):
    session.append([{"role": "user", "content": f"{who}.{i}"}], key=f"{who}.{i}")
"""


def processes(code: str, arguments) -> list[str]:
    """Run a program in processes side by side; return what each printed."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, each)], stdout=subprocess.PIPE
        )
        for each in arguments
    ]
    printed = [process.communicate(timeout=150)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    return printed


def test_c07_eight_processes_append_to_one_session(tmp_path):
    ((_, num, (_, name, count)),) = ROWS["C07"]["par"]
    root, expected = tmp_path / "root", ROWS["C07"]["expect"]
    processes(APPENDING, [(root, who, count) for who in range(num)])
    store = SessionStore.open(root)
    session = store.principal("lab", "ann").session(name)
    found = session.messages()
    assert session.clock == expected["clock"] == num * count
    assert expected["seq"] == "0..399 dense"
    assert [m.seq for m in found] == list(range(400))
    assert len({m.id for m in found}) == 400
    for who in range(num):  # each writer's own messages are in the order it sent them
        texts = [m.text for m in found if m.text.startswith(f"{who}.")]
        assert texts == [f"{who}.{i}" for i in range(count)]
    assert store.fsck(session) == ()


CREATING = """
import sys, time
from kvmem.session import SessionStore
session = SessionStore.open(sys.argv[1]).principal("lab", "ann").session("s")
while time.time() < float(sys.argv[2]):
    pass
print(session.create())
"""


def test_c08_two_processes_make_one_session(tmp_path):
    root = tmp_path / "root"
    store = SessionStore.open(root)
    start = time.time() + 1.0
    made = processes(CREATING, [(root, start)] * len(ROWS["C08"]["par"]))
    assert sum("True" in each for each in made) == ROWS["C08"]["expect"]["created"]
    assert store.fsck(store.principal("lab", "ann").session("s")) == ()


def test_who_comes_second_adopts_the_folder_even_without_a_lock(ann):
    session = ann.session("s")
    assert materialise.build(session.place)
    session.append([{"role": "user", "content": "mine"}])
    assert not materialise.build(session.place)
    assert [m.text for m in session.messages()] == ["mine"]


@pytest.mark.case("SES-11")
def test_two_first_recalls_and_a_first_message_make_one_session(make_parallel):
    row = {
        "par": [["recall", "s"], ["recall", "s"], ["msg", "s", 1]],
        "expect": {
            "clock": 1,
            "times_served": 1,
            "files": {"messages.jsonl": True, ".recall_log.json": True},
        },
    }

    class First(Parallel):
        def check_times_served(self, value, answers):
            super().check_times_served(value, answers[:2])
            assert len(self.session.ledger()) == 1

    for seed in SEEDS:
        parallel = make_parallel(row)
        first = First(parallel.world, row)
        first.check(first.world.io.interleave(first.jobs(), seed))


RECALLING = """
import sys
from kvmem.session import Hit, SessionStore, messages
class Own:
    def search(self, principal, query, limit, actor, peer_scope):
        return [Hit(query, query, 1.0)]
root, who, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
me = SessionStore.open(root, retriever=Own(), wait_s=60).principal("lab", "ann")
for i in range(count):
    found = me.recall(f"m{who}.{i}", session=me.session("s"), cooldown=messages(100))
    assert found.status in ("new", "ok") and found.entries, found
"""


@pytest.mark.case("SES-13")
def test_sixty_servings_of_threads_and_processes_are_all_in_the_ledger(
    tmp_path, make_parallel
):
    root = tmp_path / "root"
    processes(RECALLING, [(root, who, 15) for who in range(4)])
    session = SessionStore.open(root).principal("lab", "ann").session("s")
    assert len(session.ledger()) == 60

    row = {"par": [["recall", "s", {"hits": [[f"t{i}", "full"]]}] for i in range(8)]}
    parallel = make_parallel(row | {"expect": {}})
    parallel.check(parallel.world.io.interleave(parallel.jobs(), seed=3))
    assert len(parallel.session.ledger()) == 8
