"""Random traffic: at every step each page's holders add up, and free + evictable + in
use is all there is."""

import random

import numpy as np
import pytest

from kvmem import pool as pools
from kvmem.prefix import PrefixCache
from kvmem.serve import Identity, Image, SamplingParams
from kvmem.serve.page_table import PageTable
from kvmem.serve.request import Sequence
from kvmem.serve.scheduler import Scheduler

WHOSE = (
    Identity(),
    Identity(adapter=("a", 1)),
    Identity(tenant="t"),
    Identity(images=(Image(b"i" * 32, 1, 3),)),
)


class Quiet:
    def push(self, token):
        return ""

    def finish(self):
        return ""


@pytest.fixture
def traffic():
    """Make a driver of random requests over a scheduler of a few pages."""

    def make(seed, num_pages, page_size, checks):
        rng = random.Random(seed)
        table = PageTable(pools.Ledger(num_pages), PrefixCache(page_size))
        scheduler = Scheduler(table, max_batch=4, prefill_chunk=8, max_length=64)
        stems = [[rng.randrange(97) for _ in range(40)] for _ in range(3)]
        counts = dict.fromkeys(("forked", "aborted", "finished", "reset", "hits"), 0)

        def add(number):
            prompt = rng.choice(stems)[: rng.randrange(4, 40)] + [rng.randrange(97)]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 20), n=rng.choice((1, 1, 3))
            )
            if table.needs.pages_for(len(prompt) + params.max_tokens - 1) <= num_pages:
                whose = rng.choice(WHOSE)
                made = Sequence(number, 0, tuple(prompt), params, Quiet(), whose)
                scheduler.add(made)

        def accept(sequence):
            sequence.accept(rng.randrange(97), frozenset(), None)
            if sequence.finish_reason:
                scheduler.finish(sequence)
                counts["finished"] += 1

        def step(number):
            if len(scheduler.waiting) < 6:
                add(number)
            counts["hits"] += sum(s.num_computed > 0 for s, _ in scheduler.admit())
            checks(scheduler)
            work = scheduler.plan()
            checks(scheduler)
            for sequence in scheduler.advance(work) if work else ():
                twins = []
                if not sequence.sample and not sequence.output_ids:
                    for sample in range(1, sequence.sampling.n):
                        twins.append(sequence.twin(sample, Quiet()))
                        scheduler.fork(sequence, twins[-1])
                        counts["forked"] += bool(twins[-1].vpages)
                        checks(scheduler)
                for each in [sequence, *(t for t in twins if t.vpages)]:
                    accept(each)
                    checks(scheduler)
            everyone = [*scheduler.running, *scheduler.waiting]
            if rng.random() < 0.03 and everyone:
                scheduler.drop(rng.choice(everyone))
                counts["aborted"] += 1
            if rng.random() < 0.005:
                scheduler.reset(scheduler.weights_epoch + rng.randrange(2))
                counts["reset"] += 1
            checks(scheduler)

        return scheduler, step, counts

    return make


def add_up(scheduler):
    assert scheduler.objections() == ()
    free, evictable, in_use, total = scheduler.table.accounts()
    assert free + evictable + in_use == total
    assert in_use == len({v for s in scheduler.running for v in s.vpages})


@pytest.mark.case("ALC-03")
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 96), (4, 20), (16, 7)])
def test_pages_add_up_at_every_step_of_random_traffic(traffic, page_size, num_pages):
    scheduler, step, counts = traffic(page_size, num_pages, page_size, add_up)
    for number in range(1500):
        step(number)
    assert scheduler.num_preempted > 0 and scheduler.table.num_evicted > 0
    assert min(counts.values()) > 0, counts
    while everyone := [*scheduler.running, *scheduler.waiting]:
        scheduler.drop(everyone[0])
        add_up(scheduler)
    scheduler.reset(scheduler.weights_epoch)
    assert scheduler.table.accounts().free == num_pages


@pytest.mark.parametrize(
    "breaks",
    [
        lambda table: table.ledger.retain(0, table.is_held[:1]),
        lambda table: table.books.num_alone.__setitem__(
            0, table.books.num_alone[0] + 1
        ),
        lambda table: table.cache.evict(1, lambda v: True),
    ],
)
def test_traffic_over_broken_books_is_seen(traffic, breaks):
    scheduler, step, _ = traffic(4, 20, 4, lambda s: None)
    for number in range(60):
        step(number)
    table = scheduler.table
    table.is_held = [v for s in scheduler.running for v in s.vpages]
    add_up(scheduler)
    breaks(table)
    with pytest.raises(AssertionError):
        add_up(scheduler)


@pytest.mark.case("ALC-03")
def test_the_device_follows_random_traffic_of_a_scheduler(traffic):
    pool = [pools.init(num_pages=20, page_nbytes=16)]

    def follow(scheduler):
        pool[0] = scheduler.table.apply(pool[0])
        assert scheduler.table.ledger.differences(pool[0]) == ()
        add_up(scheduler)

    scheduler, step, _ = traffic(11, 20, 4, lambda s: None)
    for number in range(300):
        step(number)
        if number % 5 == 0:
            follow(scheduler)
    follow(scheduler)
    assert pools.check(pool[0]) == ()


def test_look_ups_of_waiting_requests_evict_nothing_and_fail_nobody(traffic):
    """8 pages, 50 requests of 4 pages in turn, as a tier that promotes would thrash."""
    table = PageTable(pools.Ledger(8), PrefixCache(4))
    scheduler = Scheduler(table, max_batch=4, prefill_chunk=16, max_length=64)
    texts = [np.random.default_rng(t).integers(0, 97, 15).tolist() for t in range(5)]
    for number in range(50):
        params = SamplingParams(max_tokens=1)
        scheduler.add(
            Sequence(number, 0, tuple(texts[number % 5]), params, Quiet(), Identity())
        )
    finished = 0
    while scheduler.has_work:
        scheduler.admit()
        before = table.num_evicted, sorted(table.cache.vpages()), table.accounts()
        for _ in range(5):
            for sequence in scheduler.waiting:
                table.match(sequence.tokens, sequence.identity)
            assert scheduler.admit() == []
        assert before == (
            table.num_evicted,
            sorted(table.cache.vpages()),
            table.accounts(),
        )
        for sequence in scheduler.advance(scheduler.plan()):
            sequence.accept(1, frozenset(), None)
            scheduler.finish(sequence)
            finished += 1
        add_up(scheduler)
    assert finished == 50 and scheduler.num_preempted == 0
