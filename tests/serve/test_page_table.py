"""The engine's pages: the host decides, the device follows, each counted once."""

import numpy as np
import pytest

from kvmem import pool as pools
from kvmem.prefix import PrefixCache
from kvmem.serve.page_table import Accounts, Cleared, PageTable


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
    other = table.take(1)
    table.publish(text(4, 4), other)
    table.give_back(other)
    assert table.clear_cache() == Cleared(freed=other, in_use=held)
    assert table.accounts() == Accounts(6, 0, 2, 8)
    table.give_back(held)
    assert table.accounts() == Accounts(8, 0, 0, 8)
    assert table.clear_cache() == Cleared((), ())


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
            at = int(rng.integers(len(held)))
            held[at] = (held[at][0], table.publish(*held[at]))
        elif held and kind == 4:
            tokens, pages = held[int(rng.integers(len(held)))]
            if twin := table.fork(pages, len(tokens) - int(rng.integers(4))):
                held.append((tokens, twin))
        if step % 8 == 0:
            pool = table.apply(pool)
            assert table.ledger.differences(pool) == ()
        assert table.objections(pages for _, pages in held) == ()
    for _, pages in held:
        table.give_back(pages)
    table.clear_cache()
    pool = table.apply(pool)
    assert table.ledger.differences(pool) == ()
    assert pools.check(pool) == ()
    assert int(pool.num_free) == 90


def test_a_page_whose_holders_do_not_add_up_is_named(page_table):
    def made():
        table = page_table()
        held, other = table.take(2), table.take(2)
        table.publish(text(5, 8), held)
        table.publish(text(6, 8), other)
        table.give_back(other)
        assert table.objections([held]) == ()
        return table, held

    table, held = made()
    said, *_ = table.objections([])
    assert f"page {held[0]} has 2 references, 0 tables" in said
    table, held = made()
    table.ledger.groups[0].refs[held[1]] += 1
    (said,) = table.objections([held])
    assert f"page {held[1]} has 3 references, 1 tables" in said
    table, held = made()
    table._num_evictable -= 1
    (said,) = table.objections([held])
    assert "2 evictable and 2 in use" in said and "say 1 and 3" in said
    table, held = made()
    table.publish(text(60, 4), held[:1])  # one page for two texts
    (said,) = table.objections([held])
    assert f"page {held[0]} has 3 references, 1 tables name it and the cache 2" in said
    table, held = made()
    table.cache.evict(1, lambda v: True)
    assert any("the cache 0 times" in said for said in table.objections([held]))


def test_duplicates_of_one_prefix_never_free_a_page_that_a_table_names(page_table):
    table, tokens = page_table(), text(7, 8)
    first, second = table.take(2), table.take(3)
    assert table.publish(tokens, first) == list(first)
    # the copies of the second go back, and it reads those of the first
    shared = table.publish(tokens, second)
    assert shared == [*first, second[2]]
    assert table.objections([first, shared]) == ()
    assert table.accounts() == Accounts(free=5, evictable=0, in_use=3, total=8)
    table.give_back(first)
    assert table.take(6) is None and table.num_evicted == 0
    assert table.objections([shared]) == ()
    table.give_back(shared)
    assert table.accounts() == Accounts(free=6, evictable=2, in_use=0, total=8)


def test_a_longer_text_hangs_its_tail_below_the_head_that_it_holds(page_table):
    """Else the head would look idle, and be counted on, while its tail is read."""
    table, tokens = page_table(num_pages=4), text(9, 12)
    first, second = table.take(1), table.take(3)
    table.publish(tokens[:4], first)
    longer = table.publish(tokens, second)
    assert longer == [*first, *second[1:]]
    table.give_back(first)
    assert table.accounts() == Accounts(free=1, evictable=0, in_use=3, total=4)
    assert table.take(2) is None
    assert table.take(1) is not None


def test_a_page_behind_which_another_is_read_cannot_be_had(page_table):
    table, tokens = page_table(num_pages=2), text(10, 8)
    held = table.take(2)
    table.publish(tokens, held)
    table.give_back(held[:1])  # the tail alone stays in use
    assert table.can_take(1) and table.take(1) is None
    assert table.fork(held[1:], length=3) is None
    assert table.num_evicted == 0 and table.objections([held[1:]]) == ()


def test_pages_of_a_hit_are_not_counted_on_to_make_room_for_its_rest(page_table):
    table, tokens = page_table(num_pages=4), text(8, 16)
    held = table.take(4)
    table.publish(tokens, held)
    table.give_back(held)
    hit = table.match([*tokens[:8], 1, 2])
    assert table.can_take(2, keeping=hit.vpages)
    assert not table.can_take(3, keeping=hit.vpages)
    before = table.accounts()
    assert table.match([*tokens, 1]).num_tokens == 16
    assert table.accounts() == before and table.num_evicted == 0
