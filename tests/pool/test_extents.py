"""Virtual pages of several parts: taken, zeroed, copied and given back as one."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as kvpool

EXTENTS, VPAGES = (1, 3), (9, 4)


@pytest.fixture
def mixed():
    """Return a poisoned pool of 10 pages: pages of one part, and states of three."""
    return kvpool.init(10, 16, 2, num_vpages=VPAGES, extents=EXTENTS, poison=True)


def test_a_page_of_three_parts_takes_three_pages_and_zeroes_them_all(mixed):
    pool, _, _ = kvpool.handout(mixed, 0, [1], 1)
    pool, vpages, ok = kvpool.handout(pool, 1, [1, 0, 1], 1)
    assert bool(ok)
    assert np.asarray(vpages).tolist() == [[0], [4], [1]]
    parts = np.asarray(kvpool.translate_parts(pool, 1, vpages))
    assert parts.tolist() == [[[1, 2, 3]], [[10] * 3], [[4, 5, 6]]]
    assert int(pool.num_free) == 3
    pages = np.asarray(pool.pages)
    assert not pages[:, :7].any()
    assert (pages[:, 7:] == kvpool.POISON).all()
    assert kvpool.check(pool, holders=[[[0]], [vpages]]) == ()


def test_a_recycled_page_is_zero_in_all_parts_wherever_they_are(mixed):
    pool, _, _ = kvpool.handout(mixed, 0, [8], 8)
    pool = dataclasses.replace(pool, pages=jnp.full_like(pool.pages, 0xA5))
    pool, _ = kvpool.release(pool, 0, [7, 1, 4])
    pool, vpages, ok = kvpool.handout(pool, 1, [1], 1)
    assert bool(ok)
    parts = np.asarray(kvpool.translate_parts(pool, 1, vpages)).ravel()
    assert parts.tolist() == [4, 1, 7]
    pages = np.asarray(pool.pages)
    assert not pages[:, parts].any()
    assert (np.delete(pages, parts, axis=1) == 0xA5).all()


@pytest.mark.parametrize("want", [[2, 2], [4], [3, 1]])
def test_a_page_is_handed_out_whole_or_not_at_all(want, mixed):
    pool, _, _ = kvpool.handout(mixed, 0, [2], 2)  # 8 free: two states of three
    before = jax.tree.map(np.asarray, pool)
    pool, vpages, ok = kvpool.handout(pool, 1, want, 4)
    assert not bool(ok)
    assert (np.asarray(vpages) == VPAGES[1]).all()
    assert jax.tree.all(jax.tree.map(np.array_equal, before, pool))
    ledger = kvpool.Ledger.of(pool)
    assert ledger.headroom(1) == 2
    with pytest.raises(errors.OutOfPages, match="pages of 3 parts to .* free are 8"):
        ledger.handout(1, want, 4)


def test_a_page_that_no_pool_of_this_size_holds_says_so():
    ledger = kvpool.Ledger(10, VPAGES, EXTENTS)
    with pytest.raises(errors.OutOfPages, match="never fit: raise the pool above 3"):
        ledger.handout(1, [4], 4)


def test_released_parts_join_the_stack_part_by_part(mixed):
    pool, vpages, _ = kvpool.handout(mixed, 1, [2], 2)
    pool, rejected = kvpool.release(pool, 1, vpages[0])
    assert not np.asarray(rejected).any()
    assert pool.free.tolist() == [9, 8, 7, 6, 0, 1, 2, 3, 4, 5]
    assert int(pool.num_free) == 10
    assert kvpool.check(pool, holders=[[], []]) == ()


def test_a_fork_copies_every_part_on_every_rank(mixed, shake):
    pool, vpages, _ = kvpool.handout(mixed, 1, [1], 1)
    content = shake(*pool.pages.shape)
    pool = dataclasses.replace(pool, pages=jnp.array(content))
    pool, child, ok = kvpool.fork(pool, 1, vpages[0], 0)
    assert bool(ok)
    assert np.asarray(child).tolist() == [1]
    parts = np.asarray(kvpool.translate_parts(pool, 1, [0, 1]))
    pages = np.asarray(pool.pages)
    assert np.array_equal(pages[:, parts[1]], content[:, parts[0]])
    rest = np.delete(np.arange(10), parts[1])
    assert np.array_equal(pages[:, rest], content[:, rest])
    pool, rejected = kvpool.release(pool, 1, vpages[0])
    assert not np.asarray(rejected).any()
    pages = np.asarray(pool.pages)
    assert np.array_equal(pages[:, parts[1]], content[:, parts[0]])


def test_a_fork_that_lacks_one_part_changes_nothing(mixed):
    pool, _, _ = kvpool.handout(mixed, 0, [5], 5)
    pool, vpages, _ = kvpool.handout(pool, 1, [1], 1)  # 2 free
    before = jax.tree.map(np.asarray, pool)
    pool, child, ok = kvpool.fork(pool, 1, vpages[0], 0)
    assert not bool(ok)
    assert np.asarray(child).tolist() == [VPAGES[1]]
    assert jax.tree.all(jax.tree.map(np.array_equal, before, pool))
    with pytest.raises(errors.OutOfPages, match="fork of 1 pages of 3 parts"):
        kvpool.Ledger.of(pool).fork(1, [0], 0)


@pytest.mark.parametrize("outside", [-1, 4, 2**31 - 1])
def test_an_id_outside_is_null_in_all_parts(outside, mixed):
    pool, _, _ = kvpool.handout(mixed, 1, [3], 3)
    parts = kvpool.translate_parts(pool, 1, [outside, 1])
    assert np.asarray(parts).tolist() == [[10] * 3, [3, 4, 5]]
    ledger = kvpool.Ledger.of(pool)
    assert np.array_equal(ledger.translate_parts(1, [outside, 1]), np.asarray(parts))


def test_one_page_for_a_page_of_three_parts_is_refused(mixed):
    for books in (mixed, kvpool.Ledger.of(mixed)):
        translate = getattr(books, "translate", None)
        ask = translate or (lambda *args: kvpool.translate(mixed, *args))
        with pytest.raises(errors.IncompatiblePlan, match="cut into 3 parts"):
            ask(1, [0])
        assert ask(0, [0]).tolist() == [10]


def test_a_ledger_of_a_pool_knows_its_parts(mixed):
    pool, _, _ = kvpool.handout(mixed, 1, [2], 2)
    ledger = kvpool.Ledger.of(pool)
    assert [group.extent for group in ledger.groups] == [1, 3]
    assert ledger.differences(pool) == ()


@pytest.mark.parametrize("extents", [(1,), (1, 0), (1, 2, 3)])
def test_extents_that_are_not_one_a_group_are_refused(extents):
    with pytest.raises(errors.ConfigError, match="extents"):
        kvpool.init(8, 16, num_vpages=VPAGES, extents=extents)


# The laws of a page in parts, each broken by hand.


def with_parts(pool, parts):
    v2p = pool.groups[1].v2p.at[0].set(jnp.array(parts, jnp.int32))
    books = dataclasses.replace(pool.groups[1], v2p=v2p)
    return dataclasses.replace(pool, groups=(pool.groups[0], books))


@pytest.mark.parametrize(
    ("parts", "law"),
    [
        ([0, 1, 10], r"is mapped in part, \[0, 1, 10\]"),
        ([0, 1, 1], r"maps one page twice, \[0, 1, 1\]"),
        ([0, 1, 3], r"maps \[0, 1, 3\], owned by another or out of range"),
        ([0, 1, -1], r"maps \[0, 1, -1\], owned by another or out of range"),
        ([10, 10, 10], "has 1 references and no page"),
    ],
)
def test_a_broken_part_is_named(parts, law, mixed):
    pool, _, _ = kvpool.handout(mixed, 1, [2], 2)
    assert kvpool.check(pool) == ()
    found = kvpool.check(with_parts(pool, parts))
    assert any(re.search(law, text) for text in found), found
    assert any(text.startswith("page 2 names owner") for text in found)


# Pins.


def test_pins_are_counted_and_given_back(mixed):
    pool, _, _ = kvpool.handout(mixed, 0, [3], 3)
    ledger = kvpool.Ledger.of(pool)
    pool, rejected = kvpool.pin(pool, 0, [[0, 2], [0, 9]])
    assert np.asarray(rejected).tolist() == [[False, False], [False, False]]
    ledger.pin(0, [0, 2, 0, 9])
    assert pool.groups[0].pins.tolist() == [2, 0, 1, *[0] * 6]
    pool, rejected = kvpool.unpin(pool, 0, [0, 0, 1, -1, 9])
    assert np.asarray(rejected).tolist() == [False, False, True, True, False]
    ledger.unpin(0, [0, 0])
    assert ledger.differences(pool) == ()
    pool, rejected = kvpool.unpin(pool, 0, [2, 2])
    assert np.asarray(rejected).all()
    assert pool.groups[0].pins.tolist() == [0, 0, 1, *[0] * 6]


def test_a_pin_on_a_page_that_nobody_holds_is_rejected(mixed):
    pool, _, _ = kvpool.handout(mixed, 0, [1], 1)
    pool, rejected = kvpool.pin(pool, 0, [1, -1, 0, 9])
    assert np.asarray(rejected).tolist() == [True, True, False, False]
    ledger = kvpool.Ledger.of(pool)
    with pytest.raises(errors.InvalidId, match="pin in group 0.*page 1 is held by no"):
        ledger.pin(0, [0, 1])
    with pytest.raises(
        errors.InvalidId, match="page 0 is listed 2 times and pinned 1 times"
    ):
        ledger.unpin(0, [0, 0])
    assert ledger.differences(pool) == ()


@pytest.mark.case("ALC-12")
def test_a_page_being_saved_is_not_handed_out_when_its_sequence_is_aborted(mixed):
    pool, vpages, _ = kvpool.handout(mixed, 0, [4], 4)
    page = np.int32([3])
    pool = dataclasses.replace(pool, pages=pool.pages.at[:, 3].set(jnp.uint8(7)))
    pool, _ = kvpool.retain(pool, 0, page)  # the save holds what it reads,
    pool, _ = kvpool.pin(pool, 0, page)  # where it reads it
    saved_from = np.asarray(kvpool.translate(pool, 0, page))
    pool, rejected = kvpool.release(pool, 0, vpages)  # the sequence is aborted
    assert not np.asarray(rejected).any()
    pool, _ = kvpool.compact(pool)
    pool, others, ok = kvpool.handout(pool, 0, [6], 6)
    assert bool(ok)
    mine = np.asarray(kvpool.translate(pool, 0, others)).ravel()
    pool = dataclasses.replace(pool, pages=pool.pages.at[:, mine].set(jnp.uint8(9)))
    assert (np.asarray(pool.pages)[:, saved_from] == 7).all()  # the save ends
    pool, _ = kvpool.unpin(pool, 0, page)
    pool, _ = kvpool.release(pool, 0, page)
    assert kvpool.check(pool, holders=[[others], []]) == ()
    pool, late = kvpool.unpin(pool, 0, page)  # the same completion, once more
    assert np.asarray(late).all()
    assert kvpool.check(pool, holders=[[others], []]) == ()
