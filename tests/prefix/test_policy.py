"""Eviction policies: each forgets what it says, and the optimum is the optimum."""

import functools
import itertools
import math
import random

import pytest

from kvmem.prefix import PrefixCache, policy


def idle(_):
    return True


def chat(*letters):
    """One page of two tokens a letter."""
    return [token for letter in letters for token in (ord(letter), 7)]


@pytest.fixture
def replay():
    """Replay texts on a pool of a few pages; return the pages found, text by text."""

    def run(make_policy, texts, capacity):
        uses, now = [], [0]
        for at, letters in enumerate(texts):
            uses += [(letters[: end + 1], at) for end in range(len(letters))]
        name_of, fresh = {}, itertools.count()

        def next_use(vpage):
            later = [at for name, at in uses if name == name_of[vpage] and at > now[0]]
            return min(later, default=math.inf)

        cache = PrefixCache(2, make_policy(next_use))
        found = []
        for at, letters in enumerate(texts):
            now[0] = at
            hit = cache.match([*chat(*letters), 0])
            cache.touch(chat(*letters))
            needed = len(letters) - len(hit.vpages)
            held = set(hit.vpages)
            short = cache.num_pages + needed - capacity
            if short > 0:
                assert len(cache.evict(short, lambda v, h=held: v not in h)) == short
            pages = [*hit.vpages, *itertools.islice(fresh, needed)]
            name_of |= {v: letters[: i + 1] for i, v in enumerate(pages)}
            cache.publish(chat(*letters), pages)
            found.append(len(hit.vpages))
        return found

    return run


def optimum(texts, capacity):
    """Return the most pages that any order of eviction finds again, by trying all."""

    @functools.cache
    def best(at, held):
        if at == len(texts):
            return 0
        mine = {texts[at][: end + 1] for end in range(len(texts[at]))}
        hits = len(mine & held)
        full = held | mine
        others = sorted(full - mine)
        short = max(0, len(full) - capacity)
        return hits + max(
            best(at + 1, frozenset(full - set(gone)))
            for gone in itertools.combinations(others, short)
            if not any(
                kept not in gone and kept[: len(lost)] == lost
                for lost in gone
                for kept in full
            )
        )

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_belady_finds_again_as_much_as_any_order_of_eviction_can(replay, seed):
    rng = random.Random(seed)
    stems = ["a", "b", "ab", "ca"]
    texts = [
        rng.choice(stems) + "".join(rng.choices("xyz", k=rng.randrange(3)))
        for _ in range(9)
    ]
    found = sum(replay(policy.belady, texts, 5))
    assert found == optimum(tuple(texts), 5)
    for other in (policy.lru, policy.lfu, policy.size_aware):
        assert sum(replay(lambda _, make=other: make(), texts, 5)) <= found


def test_the_optimum_is_not_what_another_order_reaches(replay):
    texts = ["a", "b", "c"] * 4
    found = {
        name: sum(replay(make, texts, 2))
        for name, make in {
            "lru": lambda _: policy.lru(),
            "belady": policy.belady,
        }.items()
    }
    assert found == {"lru": 0, "belady": optimum(tuple(texts), 2)}
    assert found["belady"] > 4


def test_lfu_keeps_what_many_used_and_lru_what_was_used_last():
    for made, first in ((policy.lfu(), (2,)), (policy.lru(), (1,))):
        cache = PrefixCache(2, made)
        for _ in range(3):
            cache.publish(chat("a"), [1])
        cache.publish(chat("b"), [2])
        assert cache.evict(1, idle) == first, made.name


def test_a_head_that_is_cut_off_keeps_its_uses():
    cache = PrefixCache(2, policy.lfu())
    for _ in range(3):
        cache.publish(chat("a", "b"), [1, 2])
    for _ in range(2):
        cache.publish(chat("z"), [9])
    cache.publish(chat("a", "c"), [1, 3])
    assert cache.evict(3, idle) == (3, 9, 2)
    assert cache.evict(1, idle) == (1,)


def test_size_aware_forgets_one_long_text_before_short_ones():
    cache = PrefixCache(2, policy.size_aware())
    cache.publish(chat("s"), [9])
    cache.publish(chat(*"long"), [1, 2, 3, 4])
    cache.touch(chat(*"long"))
    assert cache.evict(3, idle) == (4, 3, 2)
    assert PrefixCache(2).evict(1, idle) == ()


def test_what_was_popular_once_ages():
    cache = PrefixCache(2, policy.size_aware())
    for _ in range(3):
        cache.publish(chat("p"), [0])
    for at, letter in enumerate("abcdefgh", 1):
        cache.publish(chat(letter), [at])
        cache.evict(1, idle)
    assert 0 not in set(cache.vpages())


@pytest.mark.parametrize("name", ["lru", "lfu", "size_aware"])
def test_every_policy_keeps_the_law_of_the_tree(name):
    rng, cache = random.Random(name), PrefixCache(2, getattr(policy, name)())
    held, fresh = {}, itertools.count()
    for _ in range(600):
        letters = "".join(rng.choices("ab", k=rng.randrange(1, 7)))
        if rng.random() < 0.4:
            busy = {v for v in held.values() if rng.random() < 0.3}
            for v in cache.evict(rng.randrange(1, 5), lambda v, b=busy: v not in b):
                assert v not in busy
                gone = next(k for k, page in held.items() if page == v)
                del held[gone]
                assert not any(k.startswith(gone) for k in held)
        names = [letters[: end + 1] for end in range(len(letters))]
        pages = [held[k] if k in held else next(fresh) for k in names]
        cache.publish(chat(*letters), pages)
        held |= dict(zip(names, pages, strict=True))
        assert sorted(cache.vpages()) == sorted(held.values())
    everything = cache.evict(10**6, idle)
    assert sorted(everything) == sorted(held.values()) and cache.num_edges == 0
