"""Long random schedules on one pool of three groups: the laws hold all the way.

Sequences take, share, copy, fill, pin and give back pages of one and of three parts;
compaction and calls that must fail come in between. A plain model says who holds what
and what every byte of every page is; device and ledger are compared with it.
"""

import collections
import dataclasses
import random

import jax
import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as kvpool
from kvmem.pool import verbs

RANKS, NBYTES = 2, 16
LANES, COLUMNS = 6, 4
_REFUSED = (errors.OutOfPages, errors.InvalidId, errors.ConfigError)


@jax.jit
def _fill(pages, parts, content):
    return pages.at[:, parts].set(content)


class Schedule:
    """A pool, its ledger and a model of both in plain words, under random operations.

    `content` is what each held page must hold; `image` every byte of every page.
    """

    def __init__(self, seed, num_pages=26, vpages=(30, 11, 7), extents=(1, 1, 3)):
        self.rng = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        sizes = {"num_vpages": vpages, "extents": extents}
        self.pool = kvpool.init(num_pages, NBYTES, RANKS, poison=True, **sizes)
        self.ledger = kvpool.Ledger(num_pages, vpages, extents)
        self.vpages, self.extents, self.num_pages = vpages, extents, num_pages
        self.refs = [collections.Counter() for _ in vpages]
        self.pins = [collections.Counter() for _ in vpages]
        self.content = {}
        self.image = np.full((RANKS, num_pages, NBYTES), kvpool.POISON, np.uint8)
        self.counts = collections.Counter()

    # what the model knows

    def in_use(self):
        return sum(
            len(held) * extent
            for held, extent in zip(map(self.held, range(3)), self.extents, strict=True)
        )

    def held(self, group):
        return [v for v, count in self.refs[group].items() if count]

    def headroom(self, group):
        free = (self.num_pages - self.in_use()) // self.extents[group]
        return min(free, self.vpages[group] - len(self.held(group)))

    def parts(self, group, vpage):
        return self.ledger.translate_parts(group, [vpage])[0]

    def keep(self, group, vpage, content):
        self.content[group, vpage] = content
        self.image[:, self.parts(group, vpage)] = content

    def lanes(self, group, ids):
        return np.int32([*ids, *[self.vpages[group]] * (LANES - len(ids))])

    # operations

    def handout(self, group, want):
        fits = sum(want) <= self.headroom(group)
        self.pool, vpages, ok = kvpool.handout(
            self.pool, group, np.int32(want), COLUMNS
        )
        assert bool(ok) == fits
        if not fits:
            with pytest.raises(errors.OutOfPages):
                self.ledger.handout(group, want, COLUMNS)
            return
        answer = self.ledger.handout(group, want, COLUMNS)
        assert np.array_equal(np.asarray(vpages), answer)
        for vpage in answer[answer < self.vpages[group]].tolist():
            assert not self.refs[group][vpage]
            self.refs[group][vpage] = 1
            self.keep(group, vpage, np.uint8(0))

    def change(self, verb, group, ids):
        """Call a verb of lanes that must succeed."""
        places = {vpage: self.parts(group, vpage).copy() for vpage in ids}
        args = group, self.lanes(group, ids)
        self.pool, rejected = getattr(kvpool, verb)(self.pool, *args)
        assert not np.asarray(rejected).any()
        getattr(self.ledger, verb)(*args)
        counts = {"retain": self.refs, "release": self.refs}.get(verb, self.pins)[group]
        for vpage in ids:
            counts[vpage] += 1 if verb in ("retain", "pin") else -1
            if verb == "release" and not counts[vpage]:
                self.image[:, places[vpage]] = kvpool.POISON

    def fork(self, group, ids, copied):
        copies = copied < len(ids)
        fits = not copies or self.headroom(group) >= 1
        column = copied if copies else LANES
        args = group, self.lanes(group, ids), np.int32(column)
        self.pool, child, ok = kvpool.fork(self.pool, *args)
        assert bool(ok) == fits
        if not fits:
            with pytest.raises(errors.OutOfPages):
                self.ledger.fork(*args[:2], column)
            return
        answer = self.ledger.fork(*args[:2], column)
        assert np.array_equal(np.asarray(child), answer)
        for at, (mine, theirs) in enumerate(zip(ids, answer.tolist(), strict=False)):
            self.refs[group][theirs] += 1
            if at == copied:
                held = self.image[:, self.parts(group, mine)].copy()
                self.keep(group, theirs, held)

    def fill(self, group, vpage):
        shape = RANKS, self.extents[group], NBYTES
        content = self.bytes.integers(0, 256, shape, dtype=np.uint8)
        pages = _fill(self.pool.pages, self.parts(group, vpage), content)
        self.pool = dataclasses.replace(self.pool, pages=pages)
        self.keep(group, vpage, content)

    def compact(self):
        before = {key: self.parts(*key).copy() for key in self.live()}
        kept = [g.vfree.copy() for g in self.ledger.groups]
        self.pool, moved = kvpool.compact(self.pool)
        assert int(moved) == self.ledger.compact()
        after = {key: self.parts(*key) for key in before}
        pairs = [
            (old, new)
            for key in before
            for old, new in zip(before[key], after[key], strict=True)
            if old != new
        ]
        assert len(pairs) == int(moved)
        sources, destinations = (
            map(set, zip(*pairs, strict=True)) if pairs else ((), ())
        )
        assert not set(sources) & set(destinations)
        old = self.image.copy()
        for source, destination in pairs:
            self.image[:, destination] = old[:, source]
            self.image[:, source] = kvpool.POISON
        assert all(map(np.array_equal, kept, (g.vfree for g in self.ledger.groups)))
        self.require_lowest(after)
        self.counts["moved"] += len(pairs)

    def require_lowest(self, places):
        pinned = {p for (g, v) in places if self.pins[g][v] for p in places[g, v]}
        loose = {p for key in places for p in places[key]} - pinned
        candidates = [p for p in range(self.num_pages) if p not in pinned]
        assert sorted(loose) == candidates[: len(loose)]

    def fail(self, group):
        """Ask for something that cannot be: refused by both, and nothing changes."""
        unheld = [v for v in range(self.vpages[group]) if not self.refs[group][v]]
        some = self.held(group)[:1]
        bad = [-1, *unheld[:1]]
        calls = [("retain", [b]) for b in bad] + [("release", [b]) for b in bad]
        calls += [("pin", [b]) for b in bad] + [("unpin", [b]) for b in bad]
        calls += (
            [("release", some * 6)] if some and self.refs[group][some[0]] < 6 else []
        )
        calls += [("unpin", [v]) for v in some if not self.pins[group][v]]
        last = [v for v in self.held(group) if self.pins[group][v]]
        calls += [("release", [v]) for v in last if self.refs[group][v] == 1]
        verb, ids = self.rng.choice(calls)
        before = self.books()
        args = group, self.lanes(group, ids)
        self.pool, rejected = getattr(kvpool, verb)(self.pool, *args)
        assert np.asarray(rejected)[: len(ids)].all()
        with pytest.raises(_REFUSED):
            getattr(self.ledger, verb)(*args)
        assert self.books() == before

    def books(self):
        books = [self.ledger.p2v, self.ledger.free]
        for group in self.ledger.groups:
            books += [group.v2p, group.refs, group.pins, group.vfree]
        return [book.tobytes() for book in books]

    def live(self):
        return [(g, v) for g in range(len(self.vpages)) for v in self.held(g)]

    # one step, and the look at everything

    def step(self):
        rng = self.rng
        group = rng.choices(range(3), (5, 3, 2))[0]
        held = self.held(group)
        name = rng.choices(
            ("handout", "release", "retain", "fork", "fill", "pin", "unpin"),
            (30, 30, 6, 8, 20, 5, 6),
        )[0]
        self.counts[name] += 1
        if name == "handout":
            self.handout(group, [rng.randint(0, COLUMNS) for _ in range(2)])
        elif name == "release":
            loose = [v for v in held if not self.pins[group][v]]
            self.change("release", group, rng.sample(loose, min(len(loose), 3)))
        elif name == "unpin":
            pinned = [v for v in held if self.pins[group][v]]
            self.change("unpin", group, rng.sample(pinned, min(len(pinned), 2)))
        elif name == "fork":
            ids = rng.sample(held, min(len(held), 3))
            self.fork(group, ids, rng.randint(0, len(ids)))
        elif name == "fill" and held:
            self.fill(group, rng.choice(held))
        elif name in ("retain", "pin"):
            self.change(name, group, rng.sample(held, min(len(held), 2)))
        if rng.random() < 0.06:
            self.compact()
        if rng.random() < 0.1:
            self.fail(group)

    def agree(self):
        """Compare device, ledger and model: every book and every byte."""
        assert self.ledger.differences(self.pool) == ()
        holders = [[list(refs.elements())] for refs in self.refs]
        assert kvpool.check(self.pool, holders=holders) == ()
        assert self.ledger.num_free + self.in_use() == self.num_pages
        for group in range(3):
            assert self.ledger.headroom(group) == self.headroom(group)
            pins = np.asarray(self.pool.groups[group].pins)
            assert (
                +collections.Counter(dict(enumerate(pins.tolist())))
                == +self.pins[group]
            )
        pages = np.asarray(self.pool.pages)
        assert np.array_equal(pages, self.image)
        for key in self.live():
            assert (pages[:, self.parts(*key)] == self.content[key]).all()

    def drain(self):
        for group in range(3):
            for verb, counts in (("unpin", self.pins), ("release", self.refs)):
                for vpage in list(counts[group].elements()):
                    self.change(verb, group, [vpage])
        self.compact()
        self.agree()
        assert self.ledger.num_free == self.num_pages
        assert not self.live()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_laws_hold_after_each_of_400_operations(seed):
    schedule = Schedule(seed)
    for _ in range(400):
        schedule.step()
        schedule.agree()
    schedule.drain()
    assert schedule.counts["moved"] > 20
    assert min(schedule.counts.values()) > 5


@pytest.mark.parametrize("seed", [4])
def test_the_laws_hold_through_3000_operations(seed):
    schedule = Schedule(seed)
    for step in range(3000):
        schedule.step()
        if step % 50 == 0:
            schedule.agree()
    schedule.drain()
    assert schedule.counts["moved"] > 250


def run_until_seen(schedule):
    for _ in range(100):
        schedule.step()
        schedule.agree()


def test_the_schedule_sees_a_page_that_was_not_zeroed(monkeypatch):
    monkeypatch.setattr(kvpool, "handout", verbs._handout_books)
    with pytest.raises(AssertionError):
        run_until_seen(Schedule(1))


def test_the_schedule_sees_bytes_that_did_not_follow_their_page(monkeypatch):
    compact = kvpool.compact

    def move_books_alone(pool):
        kept = np.asarray(pool.pages).copy()
        pool, moved = compact(pool)
        return dataclasses.replace(pool, pages=jax.numpy.array(kept)), moved

    monkeypatch.setattr(kvpool, "compact", move_books_alone)
    with pytest.raises(AssertionError):
        run_until_seen(Schedule(1))
