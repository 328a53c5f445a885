"""An engine under random traffic: checked mode counts every page's holders at every
step."""

import random

import pytest

from kvmem import errors
from kvmem.serve import Identity, SamplingParams

WHOSE = (Identity(), Identity(adapter=("a", 1)), Identity(salt="s"))


@pytest.mark.case("ALC-03")
@pytest.mark.parametrize("seed", [0, 1])
def test_pages_add_up_at_every_step_of_random_requests(engine, seed):
    rng = random.Random(seed)
    made = engine(pages=26, page_size=4)
    stems = [[rng.randrange(256) for _ in range(30)] for _ in range(3)]
    going, seen = [], {"forked": 0, "aborted": 0, "reset": 0}
    for _ in range(300):
        if len(made.scheduler.waiting) < 3:
            prompt = rng.choice(stems)[: rng.randrange(2, 30)] + [rng.randrange(256)]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 24),
                temperature=1.0,
                seed=rng.randrange(9),
                n=rng.choice((1, 1, 3)),
                ignore_eos=True,
            )
            going.append(made.add(prompt, params, rng.choice(WHOSE)))
        made.step()  # raises where a law is broken
        free, evictable, in_use, total = made.accounts
        assert free + evictable + in_use == total
        assert in_use == len({v for s in made.scheduler.running for v in s.vpages})
        seen["forked"] += any(s.sample for s in made.scheduler.running)
        if rng.random() < 0.05:
            seen["aborted"] += made.abort(rng.choice(going))
        if rng.random() < 0.01:
            made.reset(made.stats().weights_epoch + rng.randrange(2))
            seen["reset"] += 1
    stats = made.stats()
    assert min(*seen.values(), stats.hits, stats.preempted, stats.evicted_pages) > 0
    assert stats.hits + sum(stats.misses.values()) == stats.admitted
    for request_id in going:
        made.abort(request_id)
    assert (made.accounts.in_use, made.has_work) == (0, False)
    made.reset()
    assert made.accounts.free == made.accounts.total


def test_a_checked_engine_sees_a_hold_that_nobody_owns(engine):
    made = engine()
    made.add(list(range(20)), SamplingParams(max_tokens=9, ignore_eos=True))
    made.step()
    made.step()
    page = made.scheduler.running[0].vpages[0]
    made.table.books.retain(0, (page,))
    with pytest.raises(errors.CorruptPage, match=f"page {page} has 3 references"):
        made.step()
