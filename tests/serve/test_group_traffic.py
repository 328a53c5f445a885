"""Random traffic over several lifecycle groups in one pool of a few pages.

At every step each page's holders add up, windows hold what the rule says and no more,
and in the end every page comes back.
"""

import random

import pytest

from kvmem import manage
from kvmem import pool as pools
from kvmem.budget import PoolPages
from kvmem.geometry import Lifecycle
from kvmem.geometry.lifecycle import FULL, STATE
from kvmem.prefix import PrefixCache
from kvmem.serve import Identity, SamplingParams
from kvmem.serve.page_table import PageTable
from kvmem.serve.request import Sequence
from kvmem.serve.scheduler import Scheduler

WHOSE = (Identity(), Identity(adapter=("a", 1)))
PAGE = 4
MIXES = {  # lives, physical pages of one vpage, pages of the pool, vpages if divided
    "full + window": ((FULL, Lifecycle("window", 10)), (1, 1), 34),
    "full + window with sinks": ((FULL, Lifecycle("window", 7, 5)), (1, 1), 34),
    "full + index keys": ((FULL, FULL), (1, 1), 40),
    "full + state": ((FULL, STATE), (1, 3), 40),
    "all": (
        (FULL, FULL, Lifecycle("window", 6), Lifecycle("window", 13, 2), STATE),
        (1, 1, 1, 1, 2),
        80,
    ),
    "full + window, each its half": (
        (FULL, Lifecycle("window", 10)),
        (1, 1),
        50,
        (25, 25),
    ),
    "full + window + state, divided": (
        (FULL, Lifecycle("window", 7, 5), STATE),
        (1, 1, 3),
        70,
        (30, 20, 6),
    ),
    "window alone": ((Lifecycle("window", 9),), (1,), 12),
    "state alone": ((STATE,), (2,), 9),
}


def sizes_of(mix):
    lives, extents, num_pages, *divided = MIXES[mix]
    return (
        lives,
        extents,
        num_pages,
        *(divided or [tuple(num_pages // extent for extent in extents)]),
    )


class Quiet:
    def push(self, token):
        return ""

    def finish(self):
        return ""


class Traffic:
    """A scheduler over one pool, and random requests for it."""

    def __init__(self, seed, mix, prefix_cache=True):
        lives, extents, num_pages, vpages = sizes_of(mix)
        self.rng = random.Random(seed)
        ledger = pools.Ledger(num_pages, vpages, extents)
        self.table = PageTable(ledger, PrefixCache(PAGE), lives)
        self.scheduler = Scheduler(
            self.table,
            max_batch=4,
            prefill_chunk=8,
            max_length=64,
            prefix_cache=prefix_cache,
        )
        self.stems = [[self.rng.randrange(97) for _ in range(40)] for _ in range(3)]
        self.counts = dict.fromkeys(("forked", "aborted", "finished", "hits"), 0)

    def add(self, number):
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randrange(4, 40)] + [rng.randrange(97)]
        count, n = rng.randrange(1, 20), rng.choice((1, 1, 3))
        params = SamplingParams(max_tokens=count, n=n)
        peak = self.table.needs.peak(len(prompt) + count - 1, 8)
        if not self.table.needs.never_fits(peak):
            whose = rng.choice(WHOSE)
            made = Sequence(number, 0, tuple(prompt), params, Quiet(), whose)
            self.scheduler.add(made)

    def step(self, number, checks=lambda: None):
        if len(self.scheduler.waiting) < 5:
            self.add(number)
        admitted = self.scheduler.admit()
        self.counts["hits"] += sum(s.num_computed > 0 for s, _ in admitted)
        checks()
        work = self.scheduler.plan()
        checks()
        for sequence in self.scheduler.advance(work) if work else ():
            checks()
            for each in [sequence, *self.twins(sequence)]:
                each.accept(self.rng.randrange(97), frozenset(), None)
                if each.finish_reason:
                    self.scheduler.finish(each)
                    self.counts["finished"] += 1
                checks()
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        if everyone and self.rng.random() < 0.04:
            self.scheduler.drop(self.rng.choice(everyone))
            self.counts["aborted"] += 1
        if self.rng.random() < 0.005:
            self.scheduler.reset(self.scheduler.weights_epoch + self.rng.randrange(2))
        checks()

    def twins(self, sequence):
        if sequence.sample or sequence.output_ids:
            return []
        twins = [
            sequence.twin(sample, Quiet()) for sample in range(1, sequence.sampling.n)
        ]
        for twin in twins:
            self.scheduler.fork(sequence, twin)
        going = [twin for twin in twins if twin.held is not None]
        self.counts["forked"] += len(going)
        return going

    def adds_up(self):
        assert self.scheduler.objections() == ()
        free, evictable, in_use, total = self.table.accounts()
        assert free + evictable + in_use == total and min(free, evictable, in_use) >= 0
        for sequence in self.scheduler.running:
            self.holds_what_is_read(sequence)

    def holds_what_is_read(self, sequence):
        held, history = sequence.held, sequence.num_computed
        for group, life in enumerate(self.table.lives):
            if life.kind == "state":
                assert len(held.columns[group]) == 1
                continue
            end = held.end(group)
            stale = life.stale(history, PAGE)
            wanted = [page for page in range(end) if page not in stale]
            assert held.ordinals(group) == wanted
            assert len(wanted) == life.resident(end * PAGE, history, PAGE)
            assert len(wanted) <= life.peak(64, PAGE, 8)

    def ends(self):
        while everyone := [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.drop(everyone[0])
            self.adds_up()
        self.scheduler.reset(self.scheduler.weights_epoch)
        assert self.table.accounts().free == self.table.ledger.num_pages


@pytest.mark.parametrize("mix", MIXES)
def test_pages_of_all_groups_add_up_at_every_step_of_random_traffic(mix):
    traffic = Traffic(1, mix)
    for number in range(500):
        traffic.step(number, traffic.adds_up)
    counts = traffic.counts
    shares = traffic.table.shelf.first is not None
    assert counts["hits"] > 0 or not shares
    assert min(counts["forked"], counts["aborted"], counts["finished"]) > 0, counts
    grows = mix != "state alone"  # else a sequence never asks for more
    assert traffic.scheduler.num_preempted > 0 or not grows
    assert traffic.table.num_evicted > 0 or not shares
    traffic.ends()


def test_nothing_is_kept_without_a_prefix_cache():
    traffic = Traffic(2, "all", prefix_cache=False)
    for number in range(200):
        traffic.step(number, traffic.adds_up)
        assert traffic.table.accounts().evictable == 0
    assert traffic.counts["finished"] > 0
    traffic.ends()


@pytest.mark.parametrize(
    "mix", ["full + window", "all", "full + window + state, divided"]
)
def test_the_device_follows_the_host_in_every_group(mix):
    traffic = Traffic(3, mix)
    _, extents, num_pages, vpages = sizes_of(mix)
    pool = pools.init(num_pages, 16, num_vpages=vpages, extents=extents, poison=True)
    for number in range(120):
        traffic.step(number)
        if number % 10 == 0:
            pool = traffic.table.apply(pool)
            assert traffic.table.ledger.differences(pool) == ()
            assert pools.check(pool) == ()
    traffic.ends()
    pool = traffic.table.apply(pool)
    assert traffic.table.ledger.differences(pool) == ()
    assert int(pool.num_free) == num_pages


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (lambda table: table.ledger.retain(1, [table.held[1]]), "of group 1 has"),
        (lambda table: table.books.num_alone.__setitem__(4, 7), "accounts say"),
        (lambda table: table.cache.evict(1, lambda v: True), "which is not cached"),
        (
            lambda table: table.shelf.companions.spares.__setitem__((2, 79), None),
            "may spare",
        ),
    ],
)
def test_traffic_over_broken_books_of_any_group_is_seen(breaks, words):
    traffic = Traffic(4, "all")
    for number in range(60):
        traffic.step(number)
    traffic.table.held = [
        vpages[0] for vpages in traffic.scheduler.running[0].held.columns
    ]
    assert traffic.scheduler.objections() == ()
    breaks(traffic.table)
    assert any(words in said for said in traffic.scheduler.objections())


@pytest.mark.parametrize("mix", [*MIXES][:-2])
def test_what_can_be_had_is_what_the_managers_rule_grants(mix):
    """`manage.evictions` says it of numbers; the room of a pool holds to it."""
    traffic = Traffic(5, mix)
    lives, extents, num_pages, vpages = sizes_of(mix)
    pool = PoolPages(1, num_pages, tuple(range(len(lives))), vpages, extents)
    quotas = tuple(
        manage.Quota(str(g), 0, extent, 0, 1.0, most)
        for g, (extent, most) in enumerate(zip(extents, vpages, strict=True))
    )
    manager = manage.Manager("of a test", quotas, (pool,))
    answers = []
    for number in range(150):
        traffic.step(number)
        table, rng = traffic.table, traffic.rng
        counts = tuple(rng.randrange(0, 1 + most // 3) for most in vpages)
        groups = table.ledger.groups
        held = tuple(g.num_vpages - g.num_vfree for g in groups)
        left = manage.Room((table.ledger.num_free,), held)
        alone = tuple(table.books.num_alone)
        said = manage.evictions(manager, left, counts, alone)
        answers.append(isinstance(said, manage.Evictions))
        assert table.room.can_make(counts) == answers[-1]
        if answers[-1] and number % 10 == 0:
            assert table.room.make(counts)
            traffic.adds_up()
    assert len(set(answers)) == 2
