"""Admission is whole or not at all, as a question and as a deed."""

import pytest

from kvmem import errors, manage
from kvmem.budget import PoolPages
from kvmem.manage import Admission, Manager, Quota, Room, Shortage
from kvmem.pool import Ledger


def manager_of(*pools: int, **quotas) -> Manager:
    """Return quotas written as name=(pool, extents, floor, pages)."""
    made = [
        Quota(name, pool, extents, floor, 1 / len(quotas), pages)
        for name, (pool, extents, floor, pages) in quotas.items()
    ]
    return Manager(
        "grouped", tuple(made), tuple(PoolPages(64, n, (), (), ()) for n in pools)
    )


def test_what_is_granted_is_taken_of_every_group_at_once():
    manager = manager_of(
        10, 8, full=(0, 1, 0, 10), state=(0, 3, 0, 3), keys=(1, 1, 0, 8)
    )
    answer = manage.admit(manager, manage.unused(manager), (4, 2, 5))
    assert answer == Admission((4, 2, 5), Room((0, 3), (4, 2, 5)))


@pytest.mark.parametrize(
    ("needs", "group", "law", "missing"),
    [
        ((8, 1, 5), "full", "pool", 1),  # 8 + 3 of 10
        ((5, 2, 5), "state", "pool", 1),
        ((0, 4, 0), "state", "quota", 1),
        ((0, 0, 9), "keys", "quota", 1),
        ((3, 3, 8), "state", "pool", 2),
    ],
)
def test_a_shortage_names_the_group_the_law_and_what_lacks(needs, group, law, missing):
    manager = manager_of(
        10, 8, full=(0, 1, 0, 10), state=(0, 3, 0, 3), keys=(1, 1, 0, 8)
    )
    answer = manage.admit(manager, manage.unused(manager), needs)
    assert isinstance(answer, Shortage)
    assert (answer.group, answer.law, answer.missing) == (group, law, missing)
    assert group in answer.reason or "asked of pool" in answer.reason


def test_what_is_kept_for_a_floor_is_kept_until_it_is_filled():
    manager = manager_of(10, full=(0, 1, 0, 10), window=(0, 1, 4, 10))
    start = manage.unused(manager)
    short = manage.admit(manager, start, (7, 0))
    assert isinstance(short, Shortage) and short.missing == 1
    assert "4 kept for floors, 10 free" in short.reason
    both = manage.admit(manager, start, (6, 4))
    assert isinstance(both, Admission) and both.room.free == (0,)
    # A window above its floor draws from the common part like anybody.
    above = manage.admit(manager, start, (4, 6))
    assert isinstance(above, Admission)
    more = manage.admit(manager, Room((1,), (5, 4)), (0, 1))
    assert isinstance(more, Admission)


def test_a_group_that_asks_for_nothing_is_not_held_up_by_another():
    # Pool 0 is below its floors already; a request of pool 1 alone is no matter of it.
    manager = manager_of(
        4, 4, full=(0, 1, 0, 4), window=(0, 1, 3, 4), keys=(1, 1, 0, 4)
    )
    room = Room((1, 4), (3, 0, 0))
    assert isinstance(manage.admit(manager, room, (0, 0, 4)), Admission)
    assert isinstance(manage.admit(manager, room, (0, 1, 0)), Admission)
    assert isinstance(manage.admit(manager, room, (1, 0, 0)), Shortage)


def test_asking_for_nothing_is_granted():
    manager = manager_of(4, full=(0, 1, 0, 4), window=(0, 1, 2, 4))
    room = Room((0,), (4, 0))
    assert manage.admit(manager, room, (0, 0)) == Admission((0, 0), room)


@pytest.mark.parametrize("wrong", [(1,), (1, 1, 1), (1, -1)])
def test_counts_of_another_number_are_refused(wrong):
    manager = manager_of(4, full=(0, 1, 0, 4), window=(0, 1, 2, 4))
    for verb in (manage.admit, manage.give_back):
        with pytest.raises(errors.ConfigError, match="for 2 groups"):
            verb(manager, manage.unused(manager), wrong)


def test_a_claim_is_given_back_once():
    manager = manager_of(4, full=(0, 1, 0, 4))
    answer = manage.admit(manager, manage.unused(manager), (3,))
    assert manage.give_back(manager, answer.room, (3,)) == manage.unused(manager)
    with pytest.raises(errors.InvalidId, match="giving back 4 vpages of full"):
        manage.give_back(manager, answer.room, (4,))


class TestTakingFromALedger:
    """A failure on the way leaves the books as they were, page for page."""

    needs = (3, 2, 4)

    def books(self) -> Ledger:
        return Ledger(16, num_vpages=(16, 16, 16))

    def verbs(self, ledger: Ledger, fails_at: int | None, calls: list):
        def take(group, count):
            calls.append(("take", group))
            if group == fails_at:
                return None
            return ledger.handout(group, [count], count)[0]

        def give_back(group, vpages):
            calls.append(("give back", group))
            ledger.release(group, vpages[::-1])

        return take, give_back

    def test_everything_is_taken_when_nothing_fails(self):
        ledger = self.books()
        taken = manage.take_all(self.needs, *self.verbs(ledger, None, []))
        assert [len(vpages) for vpages in taken] == [3, 2, 4]
        assert ledger.num_free == 16 - 9

    @pytest.mark.parametrize("fails_at", [0, 1, 2])
    def test_what_was_taken_before_a_failure_goes_back(self, fails_at):
        ledger, calls = self.books(), []
        before = ledger.free.tolist(), [g.vfree.tolist() for g in ledger.groups]
        assert manage.take_all(self.needs, *self.verbs(ledger, fails_at, calls)) is None
        after = ledger.free.tolist(), [g.vfree.tolist() for g in ledger.groups]
        assert ledger.num_free == 16 and after == before
        undone = [group for verb, group in calls if verb == "give back"]
        assert undone == list(reversed(range(fails_at)))

    def test_what_was_taken_before_an_error_goes_back(self):
        ledger, calls = self.books(), []
        take, give_back = self.verbs(ledger, None, calls)
        # 16 pages: the third handout asks for more than are left, and is refused.
        with pytest.raises(errors.OutOfPages):
            manage.take_all((8, 7, 2), take, give_back)
        assert ledger.num_free == 16
        assert [g.num_vfree for g in ledger.groups] == [16, 16, 16]

    def test_a_group_asked_for_none_is_not_called(self):
        calls = []
        taken = manage.take_all((0, 2, 0), *self.verbs(self.books(), None, calls))
        assert calls == [("take", 1)] and taken[0] is None and taken[2] is None
