"""Pages and states from one list: a script, and churn on the host's books alone."""

import random

import pytest

from kvmem import errors
from kvmem import pool as kvpool

EXTENT = 3  # pages of a state


def in_use(ledger):
    """Return how many physical pages are held, counted from the groups."""
    return sum(int((g.refs > 0).sum()) * g.extent for g in ledger.groups)


def sound(ledger, held):
    assert kvpool.check(ledger, holders=held) == ()
    assert ledger.num_free + in_use(ledger) == ledger.num_pages


def test_pages_handed_out_and_given_back_in_another_order_leave_nothing():
    ledger = kvpool.Ledger(104, (104, 34), (1, EXTENT))
    assert [ledger.headroom(group) for group in (0, 1)] == [104, 34]
    first, second, third = (ledger.handout(0, [n], n)[0] for n in (3, 5, 2))
    sound(ledger, [[first, second, third], []])
    ledger.release(0, second)
    sound(ledger, [[first, third], []])
    assert ledger.compact() == 2
    assert ledger.translate(0, [*first, *third]).tolist() == [0, 1, 2, 3, 4]
    sound(ledger, [[first, third], []])
    for rest in (first, third):
        ledger.release(0, rest)
    sound(ledger, [[], []])
    assert ledger.num_free == 104


def test_states_cut_what_is_left_for_pages_and_pages_what_is_left_for_states():
    ledger = kvpool.Ledger(28, (28, 9), (1, EXTENT))
    before = ledger.headroom(0)
    ledger.handout(1, [1, 1, 1], 1)
    assert ledger.headroom(0) == before - 3 * EXTENT
    ledger.handout(0, [10], 10)
    assert ledger.headroom(1) == (28 - 19) // EXTENT
    with pytest.raises(errors.OutOfPages, match="free are 9 of 28"):
        ledger.handout(1, [4], 4)
    assert ledger.handout(1, [3], 3).size == 3
    assert [ledger.headroom(group) for group in (0, 1)] == [0, 0]


@pytest.mark.parametrize(("operations", "every"), [(400, 1), (3_000, 20)])
@pytest.mark.parametrize("page_of_one_token", [True, False])
def test_churn_over_both_kinds_drains_to_nothing(operations, every, page_of_one_token):
    rng = random.Random(operations)
    num_pages = 48 + 24 * EXTENT if page_of_one_token else 40
    ledger = kvpool.Ledger(num_pages, (num_pages, 24), (1, EXTENT))
    held = [[], []]
    refused = moved = 0
    for operation in range(operations):
        group = 0 if rng.random() < 0.6 else 1
        count = rng.randint(1, 5)
        can = ledger.headroom(group)
        if rng.random() < 0.55:
            if count > can:
                refused += 1
                with pytest.raises(errors.OutOfPages):
                    ledger.handout(group, [count], count)
            else:
                held[group].append(ledger.handout(group, [count], count)[0])
        elif held[group]:
            ledger.release(group, held[group].pop(rng.randrange(len(held[group]))))
        if rng.random() < 0.05:
            moved += ledger.compact()
        if operation % every == 0:
            sound(ledger, held)
    assert refused > 5
    assert moved > 10
    for group in (0, 1):
        while held[group]:
            ledger.release(group, held[group].pop())
    sound(ledger, held)
    assert ledger.num_free == num_pages
    assert ledger.compact() == 0
