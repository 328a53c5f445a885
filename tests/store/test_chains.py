"""Chains: what a held chunk continues is never the one to go, nor what is pinned."""

import numpy as np
import pytest

from kvmem import errors
from kvmem.store import PageKey
from kvmem.store.chains import Chains


def keys(num: int, of: int = 0) -> list[PageKey]:
    return [PageKey(bytes([of, i]) + bytes(30)) for i in range(num)]


def chained(chain: list[PageKey], into: Chains) -> Chains:
    for i, key in enumerate(chain):
        into.add(key, chain[i - 1] if i else None)
    into.touch(chain)
    return into


def order_of_going(chains: Chains) -> list[PageKey]:
    gone = []
    while (key := chains.oldest()) is not None:
        gone.append(key)
        chains.forget(key)
    return gone


def test_suffixes_go_before_their_prefixes():
    chain = keys(5)
    assert order_of_going(chained(chain, Chains())) == chain[::-1]


def test_the_chain_used_least_recently_goes_first():
    old, new = keys(3, of=1), keys(3, of=2)
    chains = chained(new, chained(old, Chains()))
    chains.touch(old[:1])
    assert order_of_going(chains) == [*old[:0:-1], *new[::-1], old[0]]


def test_a_prefix_outlives_a_suffix_that_came_later_by_itself():
    chain = keys(6)
    chains = chained(chain[:3], Chains())
    chains.add(chain[3], parent=chain[2])
    other = keys(2, of=9)
    chained(other, chains)
    chains.touch(chain[3:4])  # brings what it continues along
    assert order_of_going(chains) == [*other[::-1], *chain[3::-1]]


def test_two_texts_share_a_prefix_that_goes_after_both():
    trunk, one, two = keys(2), keys(2, of=1), keys(2, of=2)
    chains = chained(trunk + one, Chains())
    for key, parent in zip(two, [trunk[1], two[0]], strict=True):
        chains.add(key, parent)
    chains.touch(two)
    assert order_of_going(chains) == [*one[::-1], *two[::-1], *trunk[::-1]]


def test_to_use_a_suffix_is_to_use_what_it_continues():
    trunk, leaf, other = keys(2), keys(1, of=1), keys(2, of=2)
    chains = chained(other, chained(trunk + leaf, Chains()))
    chains.touch(leaf)
    chains.forget(leaf[0])
    assert order_of_going(chains) == [*other[::-1], *trunk[::-1]]


def test_the_chunk_to_go_is_found_without_a_search():
    chain = keys(200)
    chains = chained(chain, Chains())
    for _ in chain:
        first = next(iter(chains._parents))
        assert chains.oldest() == first
        chains.forget(first)


def test_pinned_chunks_stay_with_all_that_they_continue():
    chain = keys(4)
    chains = chained(chain, Chains())
    chains.pin(chain[1:2])
    assert order_of_going(chains) == [chain[3], chain[2]]
    chains.unpin(chain[1:2])
    assert order_of_going(chains) == [chain[1], chain[0]]


def test_pins_are_counted_and_undone_all_or_none():
    chain = keys(2)
    chains = chained(chain, Chains())
    chains.pin([chain[1], chain[1]])
    with pytest.raises(errors.InvalidId, match="none left"):
        chains.unpin([chain[1], chain[1], chain[1]])
    with pytest.raises(errors.InvalidId, match="none left"):
        chains.unpin([chain[1], chain[0]])
    chains.unpin([chain[1]])
    assert chains.num_pinned == 1 and chains.oldest() is None
    chains.unpin([chain[1]])
    assert chains.num_pinned == 0 and chains.oldest() == chain[1]


def test_what_is_forgotten_in_the_middle_still_keeps_its_prefix_when_it_returns():
    chain = keys(3)
    chains = chained(chain, Chains())
    chains.forget(chain[1])
    chains.add(chain[1], parent=chain[0])
    assert order_of_going(chains) == chain[::-1]


def test_a_parent_that_would_close_a_cycle_is_not_believed():
    chain = keys(3)
    chains = chained(chain, Chains())
    chains.forget(chain[0])
    chains.add(chain[0], parent=chain[2])
    chains.touch(chain)
    assert order_of_going(chains) == chain[::-1]


def test_random_histories_never_forget_a_continued_or_pinned_chunk():
    random = np.random.default_rng(7)
    chains, parents, pinned = Chains(), {}, set()
    for step in range(3000):
        held = list(parents)
        if random.random() < 0.5 or not held:
            key = PageKey(step.to_bytes(4, "big") + bytes(28))
            parent = held[random.integers(len(held))] if held else None
            chains.add(key, parent)
            parents[key] = parent
        elif random.random() < 0.3:
            chains.touch([held[random.integers(len(held))]])
        elif random.random() < 0.1:
            key = held[random.integers(len(held))]
            chains.pin([key])
            pinned.add(key)
        elif (victim := chains.oldest()) is not None:
            assert victim not in pinned and victim not in parents.values()
            chains.forget(victim)
            del parents[victim]
        assert len(chains) == len(parents)
