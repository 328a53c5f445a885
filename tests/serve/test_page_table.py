"""The engine's pages: the host decides, the device follows, each counted once."""

import numpy as np
import pytest

from kvmem import pool as pools
from kvmem.prefix import PrefixCache
from kvmem.serve.page_table import Accounts, PageTable


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 9_000, length).tolist()


@pytest.mark.case("ALC-03")
def test_a_shared_page_is_counted_once(page_table):
    table = page_table(num_pages=12)
    a = text(0, 20)
    b = a[:12] + text(1, 8)
    held_a = list(table.take(5))
    table.publish(a, held_a)
    hit = table.cache.match(b)
    held_b = table.adopt(hit, b)
    assert hit.num_tokens == 12
    held_b += table.take(2)
    table.publish(b, held_b)
    assert table.accounts() == Accounts(free=5, evictable=0, in_use=7, total=12)
    table.give_back(held_a)
    table.give_back(held_b)
    assert table.accounts() == Accounts(free=5, evictable=7, in_use=0, total=12)


def test_pages_are_evicted_only_as_far_as_a_handout_needs(page_table):
    table = page_table(num_pages=4)
    held = table.take(4)
    table.publish(text(2, 16), held)
    table.give_back(held)
    assert table.accounts() == Accounts(0, 4, 0, 4)
    assert len(table.take(2)) == 2
    assert table.accounts() == Accounts(0, 2, 2, 4)
    assert table.cache.match(text(2, 16)).num_tokens == 8
    assert table.take(3) is None
    assert table.accounts() == Accounts(0, 2, 2, 4)


def test_a_fork_shares_whole_pages_and_copies_a_partial_one(page_table):
    table = page_table(num_pages=6)
    held = table.take(3)
    whole = table.fork(held, length=12)
    assert whole == list(held)
    partial = table.fork(held, length=10)
    assert partial[:2] == list(held[:2]) and partial[2] not in held
    assert table.accounts().in_use == 4
    table.take(2)
    assert table.fork(held, length=10) is None


def test_clearing_the_cache_says_what_sequences_still_hold(page_table):
    table = page_table()
    held = table.take(2)
    table.publish(text(3, 8), held)
    assert table.clear_cache() == 2
    table.give_back(held)
    assert table.accounts() == Accounts(8, 0, 0, 8)
    assert table.clear_cache() == 0


def test_the_device_follows_the_host_through_a_random_history():
    rng = np.random.default_rng(7)
    pool = pools.init(num_pages=90, page_nbytes=16, poison=True)
    table = PageTable(pools.Ledger(90), PrefixCache(4))
    held = []
    for step in range(120):
        kind = rng.integers(5)
        if kind < 2 and (pages := table.take(int(rng.integers(1, 40)))):
            held.append((text(step, len(pages) * 4), list(pages)))
        elif held and kind == 2:
            table.give_back(held.pop(int(rng.integers(len(held))))[1])
        elif held and kind == 3:
            table.publish(*held[int(rng.integers(len(held)))])
        elif held and kind == 4:
            tokens, pages = held[int(rng.integers(len(held)))]
            if twin := table.fork(pages, len(tokens) - int(rng.integers(4))):
                held.append((tokens, twin))
        if step % 8 == 0:
            pool = table.apply(pool)
            assert table.ledger.differences(pool) == ()
        free, evictable, in_use, total = table.accounts()
        assert free + evictable + in_use == total
        assert in_use == len({page for _, pages in held for page in pages})
    for _, pages in held:
        table.give_back(pages)
    table.clear_cache()
    pool = table.apply(pool)
    assert table.ledger.differences(pool) == ()
    assert pools.check(pool) == ()
    assert int(pool.num_free) == 90
