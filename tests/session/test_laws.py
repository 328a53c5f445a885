"""Random operations on one session, by several handles, kept beside a simple model.

The law: whatever is appended, recalled, committed, forgotten, deleted, begun anew,
reopened or killed in whatever order, readers find what a list and a few counters say.
"""

import random
from pathlib import Path

import pytest

from kvmem.errors import Conflict, Deleted
from kvmem.session import Hit, SessionStore, archive, forget, messages

NAMES = ("A", "B", "C")


class Finds:
    hits = ()

    def search(self, principal, query, limit, actor, peer_scope):
        return [Hit(uri, f"text of {uri}", 1.0) for uri in self.hits]


class Model:
    """What one session holds, in the plainest words."""

    def __init__(self):
        self.texts, self.keys, self.served = [], {}, {}
        self.num_live, self.is_deleted = 0, False

    def append(self, texts, key):
        if key not in self.keys:
            self.keys[key] = tuple(texts)
            self.texts += texts
            self.num_live += len(texts)

    def recall(self, uris, n, actor):
        turn, mine = len(self.texts), self.served.setdefault(actor, {})
        fresh = [u for u in uris if u not in mine or turn - mine[u] >= n]
        mine.update(dict.fromkeys(fresh, turn))
        return fresh


class Player:
    """Plays one random life on a disk in memory and checks it after every step."""

    def __init__(self, memory_disk, seed: int):
        self.rng, self.memory_disk = random.Random(seed), memory_disk
        self.disk, self.model = memory_disk.MemoryDisk(), Model()
        self.finds = Finds()
        self.reopen()

    def reopen(self):
        store = SessionStore.open(Path("/r"), io=self.disk, retriever=self.finds)
        self.me = store.principal("lab", "ann")

    @property
    def session(self):
        return self.me.session("s")

    def append(self):
        key = f"k{self.rng.randrange(30)}"
        texts = [f"{key}.{i}" for i in range(1 + len(key) % 3)]
        said = [{"role": "user", "content": text} for text in texts]
        self.session.append(said, key=key)
        self.model.append(texts, key)
        with pytest.raises(Conflict):
            self.session.append([{"role": "user", "content": "other"}], key=key)

    def recall(self):
        self.finds.hits = self.rng.sample(NAMES, self.rng.randint(0, 3))
        n, actor = self.rng.randint(2, 9), self.rng.choice([None, "p", "q"])
        found = self.me.recall(
            "q", session=self.session, cooldown=messages(n), actor=actor
        )
        if self.model.is_deleted:
            assert found.status == "unavailable"
            return
        expected = self.model.recall(self.finds.hits, n, actor)
        assert [entry.uri for entry in found.entries] == expected
        self.session.append([{"role": "tool", "content": "turn"}])  # the clock moves on
        self.model.append(["turn"], object())

    def commit(self):
        keep = self.rng.randint(0, 4)
        self.session.commit(keep=keep)

    def forget(self):
        uri = self.rng.choice(NAMES)
        forget.in_session(self.session.place, forget.Memory(uri))
        for served in self.model.served.values():
            served.pop(uri, None)

    def delete(self):
        if self.rng.random() < 0.4:
            self.session.delete()
            self.model = Model()
            self.model.is_deleted = True

    def create(self):
        self.session.create()
        self.model.is_deleted = False

    def kill(self):
        """Die somewhere in an append, and try it again in another process."""
        key = f"x{self.rng.randrange(1000)}"
        said = [{"role": "user", "content": f"{key}.{i}"} for i in range(3)]
        self.disk.die_at = len(self.disk.steps) + self.rng.randrange(6)
        self.disk.tear = self.rng.random()
        try:
            self.session.append(said, key=key)
        except (self.memory_disk.Crash, Deleted):
            pass
        is_kill = self.rng.random() < 0.5
        self.disk = self.disk.kill() if is_kill else self.disk.lose_power(self.rng)
        self.reopen()
        self.session.append(said, key=key)
        self.model.append([m["content"] for m in said], key)

    def play(self, count: int) -> None:
        verbs = [self.append] * 4 + [self.recall] * 4 + [self.commit, self.forget]
        verbs += [self.reopen, self.create, self.kill, self.delete]
        for _ in range(count):
            verb = self.rng.choice(verbs)
            try:
                verb()
            except Deleted:
                assert self.model.is_deleted, verb
            self.check()

    def check(self) -> None:
        assert self.me.store.fsck(self.session) == ()
        if self.model.is_deleted:
            return
        session, model = self.session, self.model
        assert [m.text for m in session.messages()] == model.texts
        assert session.clock == len(model.texts)
        for actor, served in model.served.items():
            ledger = session.ledger(actor)
            assert all(ledger[u].turn == t for u, t in served.items() if u in ledger)
            recent = {u for u, t in served.items() if session.clock - t <= 8}
            assert recent <= set(ledger)


@pytest.mark.parametrize("seed", range(6))
def test_a_random_life_is_what_a_simple_model_says(seed, memory_disk):
    Player(memory_disk, seed).play(60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_random_lives_are_what_a_simple_model_says(seed, memory_disk):
    Player(memory_disk, seed).play(200)


def test_a_store_that_forgets_a_key_is_seen_by_the_model(memory_disk, monkeypatch):
    monkeypatch.setattr(archive, "batch_of", lambda archives, live, key: None)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        Player(memory_disk, 0).play(60)
