"""Null stays null, and every id outside the books, whatever the pool went through."""

import random

import numpy as np

from kvmem import pool as kvpool

VPAGES, EXTENTS, PAGES = (9, 5), (1, 3), 14


def null_is_null(pool, ledger, held):
    """Translate every id of the books and some outside: null but where one is held."""
    for group, count in enumerate(VPAGES):
        ids = np.int32([*range(count), count, count + 1, -1, 2**31 - 1, -(2**31)])
        expected = np.isin(ids, held[group])
        for parts in (
            kvpool.translate_parts(pool, group, ids),
            ledger.translate_parts(group, ids),
        ):
            found = np.asarray(parts)
            assert (found[~expected] == PAGES).all()
            assert (found[expected] < PAGES).all()


def test_null_is_null_after_churn_and_compaction():
    rng = random.Random(7)
    sizes = {"num_vpages": VPAGES, "extents": EXTENTS}
    pool = kvpool.init(PAGES, 16, poison=True, **sizes)
    ledger = kvpool.Ledger(PAGES, VPAGES, EXTENTS)
    held, moved = [[], []], 0
    for _ in range(120):
        group = rng.randrange(2)
        if held[group] and rng.random() < 0.45:
            gone = np.int32([held[group].pop(rng.randrange(len(held[group])))])
            pool, rejected = kvpool.release(pool, group, gone)
            assert not np.asarray(rejected).any()
            ledger.release(group, gone)
        elif ledger.headroom(group):
            pool, _, ok = kvpool.handout(pool, group, np.int32([1]), 1)
            assert bool(ok)
            held[group].extend(ledger.handout(group, [1], 1)[0].tolist())
        if rng.random() < 0.2:
            pool, count = kvpool.compact(pool)
            assert int(count) == ledger.compact()
            moved += int(count)
        null_is_null(pool, ledger, held)
    assert moved > 10
    assert ledger.differences(pool) == ()
