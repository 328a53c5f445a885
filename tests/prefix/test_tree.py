"""The prefix tree: hits in whole pages, tails evicted first, pages counted once."""

import random

import numpy as np
import pytest

from kvmem import errors
from kvmem.prefix import Hit, PrefixCache, tree


def idle(_):
    return True


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


@pytest.mark.case("PFX-07")
def test_a_hit_is_whole_pages_and_leaves_a_token_to_compute():
    cache = PrefixCache(16)
    tokens = text(0, 33)
    assert cache.publish(tokens, [7, 3]) == (7, 3)
    assert cache.match(tokens) == Hit(32, (7, 3))
    assert cache.match(tokens[:32]) == Hit(16, (7,))
    assert cache.match(tokens[:16]) == Hit(0, (), tree.NO_TOKEN_LEFT)
    assert cache.match(tokens[:15]) == Hit(0, (), tree.NO_PAGE)
    assert cache.match([]) == Hit(0, (), tree.NO_PAGE)
    assert cache.match(np.asarray(tokens, np.int64)) == Hit(32, (7, 3))


@pytest.mark.case("PFX-09")
def test_a_text_shorter_than_a_page_leaves_no_edge():
    cache = PrefixCache(64)
    assert cache.publish(text(30, 63), [1]) == ()
    assert cache.match(text(30, 63)) == Hit(0, (), tree.NO_PAGE)
    assert cache.num_edges == 0 and cache._roots == {}
    small = PrefixCache(4)
    assert small.publish(text(31, 6), [1, 2]) == (1,)
    assert small.num_edges == 1 and small.match(text(31, 6)) == Hit(4, (1,))


@pytest.mark.case("PFX-10")
def test_a_miss_says_why():
    cache = PrefixCache(4)
    assert cache.match(text(32, 9)).reason == tree.NO_IDENTITY
    cache.publish(text(32, 9), [1, 2])
    assert cache.match(text(33, 9)).reason == tree.NO_TEXT
    assert cache.match(text(32, 9), "another").reason == tree.NO_IDENTITY
    assert cache.match(text(32, 9)).reason is None
    assert cache.evict(2, idle) == (2, 1)
    assert cache.match(text(32, 9)).reason == tree.NO_IDENTITY and cache._roots == {}


def test_namespaces_share_nothing_and_are_evicted_together():
    cache, tokens = PrefixCache(4), text(34, 8)
    for at, namespace in enumerate(("a", "b", ())):
        assert cache.match([*tokens, 1], namespace).num_tokens == 0
        pages = (2 * at, 2 * at + 1)
        assert cache.publish(tokens, pages, namespace) == pages
    assert cache.num_pages == 6
    cache.touch(tokens, "a")
    assert cache.evict(4, idle) == (3, 2, 5, 4)
    assert cache.match([*tokens, 1], "a").vpages == (0, 1)


def test_a_marked_page_meets_the_same_mark_only_and_pages_before_it_are_shared():
    cache, tokens = PrefixCache(4), text(35, 20)
    assert cache.publish(tokens, range(5), marks={2: "cat"}) == (0, 1, 2, 3, 4)
    longer = [*tokens, 1]
    assert cache.match(longer, marks={2: "cat"}).vpages == (0, 1, 2, 3, 4)
    for other in ({2: "dog"}, {}, {1: "cat", 2: "cat"}, {2: "cat", 3: "cat"}):
        shared = next(p for p in range(5) if other.get(p) != {2: "cat"}.get(p))
        assert cache.match(longer, marks=other).vpages == tuple(range(shared))
    assert cache.publish(tokens, range(10, 15), marks={2: "dog"}) == (12, 13, 14)
    assert cache.match(longer, marks={2: "dog"}).vpages == (0, 1, 12, 13, 14)
    assert cache.publish(tokens, range(20, 25)) == (22, 23, 24)
    assert cache.match(longer).vpages == (0, 1, 22, 23, 24)
    assert cache.num_pages == 11 == len(set(cache.vpages()))
    assert len(cache.evict(11, idle)) == 11 and cache._roots == {}


def test_a_mark_behind_the_last_whole_page_of_a_text_changes_nothing():
    cache, tokens = PrefixCache(4), text(39, 32)
    cache.publish(tokens, range(8))
    for length in range(4, 13):
        for mark in range(length // 4, 10):
            part, marks = tokens[:length], {mark: "cat"}
            assert cache.match(part, marks=marks) == cache.match(part)
            assert cache.pages(part, marks=marks) == cache.pages(part)
            assert cache.publish(part, range(20, 28), marks=marks) == ()
            cache.touch(part, marks=marks)
    other = [*tokens[:4], *text(40, 5)]
    assert cache.match(other, marks={2: "cat"}) == Hit(4, (0,))


def test_using_the_head_of_an_edge_does_not_make_its_tail_recent():
    cache = PrefixCache(4)
    old, new = text(36, 12), text(37, 8)
    cache.publish(old, [0, 1, 2])
    cache.publish(new, [3, 4])
    cache.publish(old[:4] + text(38, 4), [0, 9])
    assert cache.evict(2, idle) == (2, 1)
    cache.touch(new[:4])
    assert cache.evict(1, idle) == (4,)
    assert cache.evict(3, idle) == (9, 0, 3)


def test_tokens_are_compared_at_the_page_where_they_differ():
    cache = PrefixCache(4)
    tokens = text(1, 20)
    cache.publish(tokens, [0, 1, 2, 3, 4])
    other = [*tokens[:10], tokens[10] + 1, *tokens[11:], 5]
    assert cache.match(other) == Hit(8, (0, 1))


def test_a_second_text_shares_the_pages_of_the_first_and_splits_its_edge():
    cache = PrefixCache(4)
    a = text(2, 20)
    b = a[:12] + text(3, 8)
    cache.publish(a, [0, 1, 2, 3, 4])
    assert cache.publish(b, [0, 1, 2, 8, 9]) == (8, 9)
    assert cache.match([*a, 1]).vpages == (0, 1, 2, 3, 4)
    assert cache.match([*b, 1]).vpages == (0, 1, 2, 8, 9)
    assert cache.num_pages == 7 == len(set(cache.vpages()))


def test_duplicates_of_one_text_adopt_no_page_twice():
    cache = PrefixCache(4)
    tokens = text(4, 12)
    cache.publish(tokens, [0, 1, 2])
    assert cache.publish(tokens, [5, 6, 7]) == ()
    longer = tokens + text(5, 4)
    assert cache.publish(longer, [5, 6, 7, 9]) == (9,)
    assert cache.match([*longer, 1]).vpages == (0, 1, 2, 9)


@pytest.mark.case("ALC-10")
def test_the_tail_goes_first_and_the_head_still_hits():
    cache = PrefixCache(4)
    tokens = text(6, 16)
    cache.publish(tokens, [1, 2, 3, 4])
    assert cache.evict(2, idle) == (4, 3)
    assert cache.match(tokens) == Hit(8, (1, 2))


@pytest.mark.case("ALC-06")
def test_a_page_that_a_sequence_reads_is_not_evicted():
    cache = PrefixCache(4)
    a, b = text(7, 8), text(8, 4)
    cache.publish(a + b, [1, 2, 3])
    reading = {1, 2, 3}
    assert cache.evict(3, lambda v: v not in reading) == ()
    assert cache.num_pages == 3
    reading.clear()
    assert cache.evict(1, idle) == (3,)


def test_a_busy_tail_does_not_hide_an_older_idle_one():
    cache = PrefixCache(4)
    cache.publish(text(9, 8), [1, 2])
    cache.publish(text(10, 8), [3, 4])
    assert cache.evict(2, lambda v: v != 2) == (4, 3)
    assert cache.evict(2, idle) == (2, 1)
    assert cache.num_pages == 0


def test_the_least_recently_used_text_goes_first():
    cache = PrefixCache(4)
    old, new = text(11, 8), text(12, 8)
    cache.publish(old, [1, 2])
    cache.publish(new, [3, 4])
    cache.match(old)  # a question changes nothing
    assert cache.evict(1, idle) == (2,)
    cache.touch(old)
    assert cache.evict(3, idle) == (4, 3, 1)


def test_a_branch_becomes_a_leaf_when_its_children_are_gone():
    cache = PrefixCache(4)
    a = text(13, 8)
    cache.publish(a + text(14, 4), [0, 1, 2])
    cache.publish(a + text(15, 4), [0, 1, 3])
    assert set(cache.evict(2, idle)) == {2, 3}
    assert cache.evict(5, idle) == (1, 0)


def test_clear_hands_every_page_back():
    cache = PrefixCache(4)
    cache.publish(text(16, 8), [1, 2])
    assert set(cache.clear()) == {1, 2}
    assert cache.match(text(16, 9)) == Hit(0, (), tree.NO_IDENTITY)
    assert cache.publish(text(16, 8), [5, 6]) == (5, 6)


def test_too_few_pages_are_refused():
    with pytest.raises(errors.InvalidId, match="2 whole pages"):
        PrefixCache(4).publish(text(17, 9), [1])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_tree_agrees_with_a_plain_dictionary_of_prefixes(page_size):
    rng = random.Random(page_size)
    cache, model = PrefixCache(page_size), {}
    fresh = iter(range(10**6))
    for _ in range(400):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9 * page_size))]
        if rng.random() < 0.3 and model:
            for v in cache.evict(rng.randrange(1, 4), idle):
                gone = next(k for k, page in model.items() if page == v)
                assert not any(k != gone and k[: len(gone)] == gone for k in model)
                del model[gone]
        whole = len(tokens) // page_size
        keys = [tuple(tokens[: (i + 1) * page_size]) for i in range(whole)]
        pages = [model[k] if k in model else next(fresh) for k in keys]
        new = [p for k, p in zip(keys, pages, strict=True) if k not in model]
        assert list(cache.publish(tokens, pages)) == new
        model.update(zip(keys, pages, strict=True))
        assert sorted(cache.vpages()) == sorted(model.values())
        assert cache.num_pages == len(model)
        probe = [rng.randrange(2) for _ in range(rng.randrange(1, 9 * page_size))]
        want = []
        while (n := (len(want) + 1) * page_size) < len(probe):
            if tuple(probe[:n]) not in model:
                break
            want.append(model[tuple(probe[:n])])
        assert list(cache.match(probe).vpages) == want


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([5 + 2**32, 6, 7, 8, 9]),
        np.array([5 + 2**32, 6, 7, 8, 9], np.uint64),
        np.array([2**31, 6, 7, 8, 9], np.uint32),
        np.array([5.0, 6, 7, 8, 9]),
        np.array([True] * 5),
        [2**31, 6, 7, 8, 9],
        [5.0, 6, 7, 8, 9],
        ["a", "b", "c", "d", "e"],
    ],
    ids=str,
)
def test_tokens_that_are_no_32_bit_integers_are_refused_and_nothing_is_entered(tokens):
    cache = PrefixCache(4)
    with pytest.raises(errors.InvalidId, match="32-bit integers"):
        cache.publish(tokens, [3])
    assert cache.match([5, 6, 7, 8, 9]).reason == tree.NO_IDENTITY
    cache.publish(np.array([5, 6, 7, 8], np.uint64), [11])
    for ask in (cache.match, cache.pages, cache.touch):
        with pytest.raises(errors.InvalidId, match="32-bit integers"):
            ask(tokens)
    assert cache.match([5, 6, 7, 8, 9]).vpages == (11,)


def test_namespaces_and_marks_that_only_compare_equal_share_nothing():
    tokens, names = text(41, 9), (0, False, 0.0, (0,), (False,), ("a", 1), ("a", True))
    cache = PrefixCache(4)
    for at, name in enumerate(names):
        assert cache.match(tokens, name).reason == tree.NO_IDENTITY
        assert cache.publish(tokens, [2 * at, 2 * at + 1], name) == (2 * at, 2 * at + 1)
    for at, name in enumerate(names):
        assert cache.match(tokens, name).vpages == (2 * at, 2 * at + 1)
    marked = PrefixCache(4)
    for at, mark in enumerate(names):
        assert marked.match(tokens, marks={0: mark}).num_tokens == 0
        marked.publish(tokens[:4], [at], marks={0: mark})
    assert marked.num_pages == len(names)
    assert len(marked.evict(99, idle)) == len(names) and marked._roots == {}


@pytest.mark.parametrize("page_size", [0, -1, "4", 2.0, True, None])
def test_a_page_of_no_whole_number_of_tokens_is_refused(page_size):
    with pytest.raises(errors.ConfigError, match="a whole number of tokens"):
        PrefixCache(page_size)
