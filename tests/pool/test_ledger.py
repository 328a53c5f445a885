"""The ledger: refuses with numbers, changes nothing then, and leaks nothing."""

import random

import jax
import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as kvpool


def books_of(ledger):
    """Return every book as bytes, to compare whole states."""
    state = [ledger.p2v.tobytes(), ledger.free.tobytes(), ledger.num_free]
    for group in ledger.groups:
        state += [book.tobytes() for book in (group.v2p, group.refs, group.vfree)]
        state.append(group.num_vfree)
    return state


@pytest.fixture
def ledger():
    """Return a ledger of 8 pages where one sequence holds pages 0, 1 and 2."""
    made = kvpool.Ledger(8)
    assert made.handout(0, [3], 3).tolist() == [[0, 1, 2]]
    return made


def refused(ledger, error, phrase, call):
    before = books_of(ledger)
    with pytest.raises(error, match=phrase):
        call()
    assert books_of(ledger) == before
    assert kvpool.check(ledger) == ()


def test_a_handout_too_large_says_what_is_free_and_what_would_help(ledger):
    phrase = (
        r"handout of 6 pages to 2 sequences of group 0: free are 5 of 8 physical pages "
        r"and 5 of 8 virtual ones\. Release pages"
    )
    refused(ledger, errors.OutOfPages, phrase, lambda: ledger.handout(0, [3, 3], 4))
    phrase = "It can never fit: raise the pool above 8 pages"
    refused(ledger, errors.OutOfPages, phrase, lambda: ledger.handout(0, [9], 9))


@pytest.mark.parametrize("want", [[-1, 2], [4, 0]])
def test_a_want_outside_its_bounds_is_refused(want, ledger):
    call = lambda: ledger.handout(0, want, 3)  # noqa: E731
    refused(ledger, errors.ConfigError, r"lies in \[0, max_pages=3\]", call)


def test_headroom_is_the_smaller_of_the_two_stacks():
    ledger = kvpool.Ledger(8, (8, 3))
    assert [ledger.headroom(group) for group in (0, 1)] == [8, 3]
    ledger.handout(0, [6], 6)
    assert [ledger.headroom(group) for group in (0, 1)] == [2, 2]


@pytest.mark.case("ALC-01")
def test_a_double_free_is_refused_by_name(ledger):
    assert ledger.release(0, [1]).tolist() == [1]
    phrase = "page 1 is listed 1 times and held 0 times"
    refused(ledger, errors.InvalidId, phrase, lambda: ledger.release(0, [1]))
    first, second = (int(ledger.handout(0, [1], 1)[0, 0]) for _ in range(2))
    assert first != second


@pytest.mark.case("ALC-02")
def test_duplicates_in_one_call_count_as_often_as_they_stand(ledger):
    ledger.retain(0, [2])
    assert ledger.release(0, [2, 2]).tolist() == [2]
    assert ledger.num_free == 6
    phrase = "page 1 is listed 2 times and held 1 times"
    refused(ledger, errors.InvalidId, phrase, lambda: ledger.release(0, [0, 1, 1]))


@pytest.mark.case("ALC-04")
def test_the_second_release_of_a_finished_sequence_is_a_typed_error():
    ledger = kvpool.Ledger(8)
    table = ledger.handout(0, [2], 4)[0]
    table[2:3] = ledger.handout(0, [1], 1)[0]  # the step reserved one more slot
    ledger.release(0, table)  # the finish path
    refused(
        ledger, errors.InvalidId, "held 0 times", lambda: ledger.release(0, table)
    )  # the step path
    assert ledger.num_free == 8


@pytest.mark.case("ALC-08")
@pytest.mark.parametrize("bad", [-1, 3, 7, -(2**31)])
def test_bad_ids_are_refused_with_the_id_in_the_text(bad, ledger):
    for verb in (ledger.release, ledger.retain):
        refused(ledger, errors.InvalidId, f"page {bad} is", lambda v=verb: v(0, [bad]))
    fork = lambda: ledger.fork(0, [0, bad], 2)  # noqa: E731
    refused(ledger, errors.InvalidId, f"page {bad} is held by nobody", fork)


@pytest.mark.case("ALC-08")
def test_no_ids_and_padding_are_a_no_op(ledger):
    before = books_of(ledger)
    for nothing in ([], [8], [[8, 8], [9, 2**31 - 1]]):
        assert ledger.release(0, nothing).size == 0
        ledger.retain(0, nothing)
    assert books_of(ledger) == before


def test_a_pinned_page_keeps_its_last_reference(ledger):
    ledger.groups[0].pins[1] = 1
    ledger.retain(0, [1])
    ledger.release(0, [1])
    phrase = "page 1 is pinned by a move in flight"
    refused(ledger, errors.InvalidId, phrase, lambda: ledger.release(0, [0, 1]))


def test_every_bad_id_of_a_call_is_named_up_to_eight(ledger):
    phrase = "page -1 .*; page 3 .*; page 5 "
    refused(ledger, errors.InvalidId, phrase, lambda: ledger.release(0, [5, 0, -1, 3]))
    many = list(range(-12, 0))
    refused(ledger, errors.InvalidId, "and 4 more", lambda: ledger.retain(0, many))


def test_a_fork_needs_a_page_for_its_copy_and_a_column_that_holds_one(ledger):
    assert ledger.fork(0, [0, 1, 2, 8], 2).tolist() == [0, 1, 3, 8]
    assert ledger.groups[0].refs[:4].tolist() == [2, 2, 1, 1]
    for column in (3, -1):
        call = lambda at=column: ledger.fork(0, [0, 1, 2, 8], at)  # noqa: E731
        refused(ledger, errors.InvalidId, f"column {column} of 4", call)
    ledger.handout(0, [4], 4)
    call = lambda: ledger.fork(0, [0, 1], 1)  # noqa: E731
    refused(ledger, errors.OutOfPages, "fork of 1 pages", call)


def test_an_unknown_group_is_named(ledger):
    refused(
        ledger, errors.InvalidId, "group 1 of a pool of 1", lambda: ledger.headroom(1)
    )


@pytest.mark.case("IDX-05")
def test_a_wrapped_page_id_is_refused_with_its_value(ledger):
    wrapped = np.array([4_294_967_297], np.int64)
    refused(ledger, ValueError, "4294967297", lambda: ledger.release(0, wrapped))
    refused(ledger, ValueError, "dtype float64", lambda: ledger.release(0, [1.0]))


@pytest.mark.case("JAX-08")
def test_the_ledger_inside_jit_is_refused_in_words(ledger):
    def step(ids):
        ledger.release(0, ids)
        return ids

    with pytest.raises(errors.InvalidId, match="the ledger lives on the host"):
        jax.jit(step)(np.int32([0]))
    assert ledger.num_free == 5


def test_a_ledger_of_a_pool_takes_over_its_books():
    pool = kvpool.init(6, 16, num_vpages=(6, 5))
    pool, vpages, _ = kvpool.handout(pool, 1, [2, 1], 2)
    pool, _ = kvpool.release(pool, 1, vpages[0])
    ledger = kvpool.Ledger.of(pool)
    assert ledger.differences(pool) == ()
    ledger.handout(1, [2], 2)
    assert ledger.differences(pool)[0] == "p2v of the device differs from the ledger's"
    pool, _, _ = kvpool.handout(pool, 1, [2], 2)
    assert ledger.differences(pool) == ()


class Sequences:
    """Sequences that grow, fork and go on a ledger, as a scheduler would drive it."""

    def __init__(self, ledger, page_size, rng):
        self.ledger, self.page_size, self.rng = ledger, page_size, rng
        self.running = {}

    def append(self, name, num_tokens):
        pages, length = self.running[name]
        length += num_tokens
        missing = -(-length // self.page_size) - len(pages)
        while missing > self.ledger.headroom(0):
            victim = self.rng.choice([n for n in self.running if n != name])
            self.drop(victim)  # preempted
        pages = [*pages, *self.ledger.handout(0, [missing], missing)[0].tolist()]
        self.running[name] = pages, length

    def fork(self, name, child):
        pages, length = self.running[name]
        partial = length // self.page_size if length % self.page_size else len(pages)
        if partial == len(pages) or self.ledger.headroom(0):
            copy = self.ledger.fork(0, pages, partial).tolist()
            self.running[child] = copy, length

    def drop(self, name):
        self.ledger.release(0, self.running.pop(name)[0])


@pytest.mark.case("ALC-05")
@pytest.mark.parametrize("page_size", [64, 1])
def test_a_thousand_random_lifecycles_leak_no_page(page_size):
    rng = random.Random(64)
    num_pages = 24 if page_size == 64 else 900
    ledger = kvpool.Ledger(num_pages, (num_pages + 7,))
    sequences = Sequences(ledger, page_size, rng)
    for lifecycle in range(1000):
        sequences.running[lifecycle] = [], 0
        sequences.append(lifecycle, rng.randint(1, 200))
        if rng.random() < 0.4:
            sequences.fork(lifecycle, f"fork of {lifecycle}")
        for name in list(sequences.running):
            if name in sequences.running and rng.random() < 0.3:
                sequences.append(name, rng.randint(1, 30))
            if name in sequences.running and rng.random() < 0.35:
                sequences.drop(name)  # finished, or aborted
        if lifecycle % 50 == 0:
            tables = [pages for pages, _ in sequences.running.values()]
            assert kvpool.check(ledger, holders=[tables]) == ()
    for name in list(sequences.running):
        sequences.drop(name)
    assert ledger.num_free == num_pages
    assert not ledger.groups[0].refs.any()
    assert kvpool.check(ledger, holders=[[]]) == ()
