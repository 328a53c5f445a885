"""The engine's pages: the host decides, the device follows, each counted once."""

import numpy as np
import pytest

from kvmem import pool as pools
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.page_table import Accounts, Cleared, PageTable
from kvmem.serve.shelf import BACKED_OFF

MISS = Hit(0, ())


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 9_000, length).tolist()


@pytest.mark.case("ALC-03")
def test_a_shared_page_is_counted_once(page_table):
    table = page_table(num_pages=12)
    a = text(0, 20)
    b = a[:12] + text(1, 8)
    held_a = table.begin(MISS, a)
    table.publish(a, held_a)
    hit = table.match(b)
    held_b = table.begin(hit, b)
    assert hit.num_tokens == 12
    table.publish(b, held_b)
    assert table.accounts() == Accounts(free=5, evictable=0, in_use=7, total=12)
    table.give_back(held_a)
    table.give_back(held_b)
    assert table.accounts() == Accounts(free=5, evictable=7, in_use=0, total=12)


def test_pages_are_evicted_only_as_far_as_a_handout_needs(page_table):
    table = page_table(num_pages=4)
    held = table.begin(MISS, text(2, 16))
    table.publish(text(2, 16), held)
    table.give_back(held)
    assert table.accounts() == Accounts(0, 4, 0, 4)
    assert len(table.begin(MISS, text(20, 8)).columns[0]) == 2
    assert table.accounts() == Accounts(0, 2, 2, 4)
    assert table.match(text(2, 16)).num_tokens == 8
    assert table.begin(MISS, text(21, 12)) is None
    assert table.accounts() == Accounts(0, 2, 2, 4)


def test_a_fork_shares_whole_pages_and_copies_a_partial_one(page_table):
    table = page_table(num_pages=6)
    held = table.begin(MISS, text(22, 12))
    (pages,) = held.columns
    whole = table.fork(held, length=12)
    assert whole.columns == [pages]
    (partial,) = table.fork(held, length=10).columns
    assert partial[:2] == pages[:2] and partial[2] not in pages
    assert table.accounts().in_use == 4
    table.begin(MISS, text(23, 8))
    assert table.fork(held, length=10) is None


def test_clearing_the_cache_says_what_sequences_still_hold(page_table):
    table = page_table()
    held = table.begin(MISS, text(3, 8))
    table.publish(text(3, 8), held)
    other = table.begin(MISS, text(4, 4))
    table.publish(text(4, 4), other)
    ours, theirs = (tuple(each.columns[0]) for each in (held, other))
    table.give_back(other)
    assert table.clear_cache() == Cleared(freed=theirs, in_use=ours)
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
        if kind < 2:
            tokens = text(step, 4 * int(rng.integers(1, 40)))
            if (pages := table.begin(MISS, tokens)) is not None:
                held.append((tokens, pages))
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
        held = table.begin(MISS, text(5, 8))
        table.publish(text(5, 8), held)
        other = table.begin(MISS, text(6, 8))
        table.publish(text(6, 8), other)
        table.give_back(other)
        assert table.objections([held]) == ()
        return table, held, held.columns[0]

    table, held, pages = made()
    said, *_ = table.objections([])
    assert f"page {pages[0]} has 2 references, 0 tables" in said
    table, held, pages = made()
    table.ledger.groups[0].refs[pages[1]] += 1
    (said,) = table.objections([held])
    assert f"page {pages[1]} has 3 references, 1 tables" in said
    table, held, pages = made()
    table.books.num_alone[0] -= 1
    (said,) = table.objections([held])
    assert "2 evictable and 2 in use" in said and "say 1 and 3" in said
    table, held, pages = made()
    table.publish(text(60, 4), held)  # one page for two texts
    (said,) = table.objections([held])
    assert f"page {pages[0]} has 3 references, 1 tables name it and the cache 2" in said
    table, held, pages = made()
    table.cache.evict(1, lambda v: True)
    assert any("the cache 0 times" in said for said in table.objections([held]))


def test_duplicates_of_one_prefix_never_free_a_page_that_a_table_names(page_table):
    table, tokens = page_table(), text(7, 8)
    first, second = table.begin(MISS, tokens), table.begin(MISS, [*tokens, 1])
    pages, last = list(first.columns[0]), second.columns[0][2]
    table.publish(tokens, first)
    assert first.columns == [pages]
    # the copies of the second go back, and it reads those of the first
    table.publish(tokens, second)
    assert second.columns == [[*pages, last]]
    assert table.objections([first, second]) == ()
    assert table.accounts() == Accounts(free=5, evictable=0, in_use=3, total=8)
    table.give_back(first)
    assert table.begin(MISS, text(70, 24)) is None and table.num_evicted == 0
    assert table.objections([second]) == ()
    table.give_back(second)
    assert table.accounts() == Accounts(free=6, evictable=2, in_use=0, total=8)


def test_a_longer_text_hangs_its_tail_below_the_head_that_it_holds(page_table):
    """Else the head would look idle, and be counted on, while its tail is read."""
    table, tokens = page_table(num_pages=4), text(9, 12)
    first, second = table.begin(MISS, tokens[:4]), table.begin(MISS, tokens)
    head, tail = list(first.columns[0]), second.columns[0][1:]
    table.publish(tokens[:4], first)
    table.publish(tokens, second)
    assert second.columns == [[*head, *tail]]
    table.give_back(first)
    assert table.accounts() == Accounts(free=1, evictable=0, in_use=3, total=4)
    assert table.begin(MISS, text(90, 8)) is None
    assert table.begin(MISS, text(90, 4)) is not None


def test_pages_of_a_hit_are_not_counted_on_to_make_room_for_its_rest(page_table):
    table, tokens = page_table(num_pages=4), text(8, 16)
    held = table.begin(MISS, tokens)
    table.publish(tokens, held)
    table.give_back(held)
    hit = table.match([*tokens[:8], 1, 2])
    assert table.room.can_make((2,), keeping=[hit.vpages])
    assert not table.room.can_make((3,), keeping=[hit.vpages])
    before = table.accounts()
    assert table.match([*tokens, 1]).num_tokens == 16
    assert table.accounts() == before and table.num_evicted == 0


@pytest.mark.case("PFX-13")
@pytest.mark.parametrize(
    ("length", "plain", "backed_off"),
    [(16, 3, 3), (17, 4, 3), (18, 4, 3), (20, 4, 4), (8, 1, 1), (6, 1, 0), (4, 0, 0)],
)
def test_a_page_computed_again_for_a_draft_also_leaves_the_token_to_compute(
    page_table, length, plain, backed_off
):
    table, tokens = page_table(), text(30, length)
    held = table.begin(MISS, tokens)
    table.publish(tokens, held)
    for back_off, pages in ((0, plain), (4, backed_off)):
        table.shelf.compute_again(back_off)
        hit = table.match(tokens)
        assert hit.vpages == tuple(held.columns[0][:pages])
        assert hit.num_tokens == 4 * pages
    assert (hit.reason == BACKED_OFF) == (length == 6)
    # of another text, the last page that is found is computed again as well
    assert (
        table.match([*tokens[:12], 9_001, 9_002]).num_tokens
        == min(length // 4, 3) * 4 - 4
    )


@pytest.mark.parametrize("length", [5, 16, 18])
def test_a_page_that_is_used_in_part_is_copied_and_the_cached_one_stays(
    page_table, length
):
    """One token computed again: the page that it lies in is the sequence's own."""
    table, tokens = page_table(), text(31, length)
    table.shelf.compute_again(1)
    held = table.begin(MISS, tokens)
    table.publish(tokens, held)
    cached = list(held.columns[0])
    hit = table.match(tokens)
    most = length // 4 * 4 - 1
    assert (hit.num_tokens, hit.vpages) == (most, tuple(cached[: most // 4]))
    assert hit.copied == cached[most // 4]
    other = table.begin(hit, tokens)
    shared, own = other.columns[0][: most // 4], other.columns[0][most // 4 :]
    assert shared == cached[: most // 4] and not set(own) & set(cached)
    assert len(other.columns[0]) == -(-length // 4)
    table.publish(tokens, other)  # of equal text: it gives its copy back for the page
    assert other.columns[0][: length // 4] == cached[: length // 4]
    assert table.objections([held, other]) == ()
    for each in (held, other):
        table.give_back(each)
    assert table.accounts() == Accounts(8 - length // 4, length // 4, 0, 8)


def test_without_room_for_the_copy_nothing_changes(page_table):
    table, tokens = page_table(num_pages=4), text(32, 16)
    table.shelf.compute_again(1)
    held = table.begin(MISS, tokens)
    table.publish(tokens, held)
    table.give_back(held)
    before, hit = table.accounts(), table.match(tokens)
    assert table.begin(hit, tokens) is None  # its source cannot be evicted for it
    assert table.accounts() == before and table.match(tokens) == hit
    assert table.begin(MISS, tokens) is not None


def test_a_page_that_is_copied_is_used_as_much_as_those_that_are_shared(page_table):
    table, texts = page_table(num_pages=4), [text(33, 5), text(34, 5)]
    table.shelf.compute_again(1)
    for tokens in texts:
        held = table.begin(table.match(tokens), tokens)
        table.publish(tokens, held)
        table.give_back(held)
    table.give_back(table.begin(table.match(texts[0]), texts[0]))
    table.give_back(table.begin(MISS, text(35, 12)))  # three pages: one is evicted
    assert [table.match(tokens).num_tokens for tokens in texts] == [3, 0]
