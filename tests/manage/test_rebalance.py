"""Pools follow the sequences that come: rarely, when idle, and shrinking first."""

import dataclasses
import math

import pytest

from kvmem import errors, manage
from kvmem.budget import PoolPages
from kvmem.manage import Knobs, Observed

MIB = 1 << 20


def after(lengths, knobs=Knobs(), seen=Observed()) -> Observed:  # noqa: B008
    for length in lengths:
        seen = manage.observe(
            seen, knobs, reused=length // 4, history=length - 1, capacity=length
        )
    return seen


@pytest.fixture(scope="module")
def stage(members):
    """Pages of two sizes: 4 full layers beside 5 windowed ones."""
    return members(full=4, windowed=5)


def test_means_are_of_squares_on_the_device_and_plain_below_it():
    seen = after([1_000, 3_000], Knobs(decay=1.0))
    assert seen.row.capacity == round(math.sqrt((1_000**2 + 3_000**2) / 2)) == 2_236
    assert seen.row.history == round(math.sqrt((999**2 + 2_999**2) / 2)) == 2_235
    assert (seen.reused_row.history, seen.reused_row.capacity) == (500, 500)


def test_what_was_seen_early_weighs_less():
    knobs = Knobs(decay=0.5)
    seen = after([1_000, 3_000], knobs)
    weighed = (0.5 * 1_000**2 + 3_000**2) / 1.5
    assert seen.row.capacity == round(math.sqrt(weighed))
    assert seen.samples == 2 and seen.weight == 1.5


def test_one_observation_is_its_own_mean_whatever_the_decay():
    for decay in (0.5, 0.9999, 1.0):
        row = after([700], Knobs(decay=decay)).row
        assert (row.history, row.capacity) == (699, 700)


def test_targets_are_looked_at_every_hundred_observations():
    knobs = Knobs()
    due = [n for n in range(0, 401) if manage.is_due(Observed(samples=n), knobs)]
    assert due == [100, 200, 300, 400]


def test_targets_follow_the_lengths_that_were_seen(stage):
    nbytes = 64 << 30
    short = manage.retarget(stage, nbytes, after([64] * 3))
    long = manage.retarget(stage, nbytes, after([32_768] * 3))
    # Two pages of each at 64 tokens: equal counts. At 32,768 it is 1,024 to 4.
    full, window = (pool.pages for pool in short.pools)
    assert abs(full - window) <= 1
    assert long.pools[0].pages / long.pools[1].pages == pytest.approx(256, rel=0.02)
    assert long.nbytes <= nbytes and short.nbytes <= nbytes


def test_a_lower_level_is_sized_by_what_is_reused(stage):
    seen = after([1_024] * 3)  # a quarter of it was reused
    lower = manage.retarget(stage, 512 * MIB, seen, level="lower")
    same = manage.grouped(
        stage,
        512 * MIB,
        typical=manage.Batch((manage.Row(256, 256),)),
    )
    assert lower == same != manage.retarget(stage, 512 * MIB, seen)
    with pytest.raises(errors.ConfigError, match="level 'host'"):
        manage.retarget(stage, 512 * MIB, seen, level="host")
    with pytest.raises(errors.ConfigError, match="after 0 observations"):
        manage.retarget(stage, 512 * MIB, Observed())


def test_floors_hold_whatever_was_seen(stage):
    target = manage.retarget(stage, 512 * MIB, after([1 << 20]), floors=(1, 640))
    assert target.pools[1].pages == 640
    assert target.quotas[1].floor == 640


class TestWhenItIsTime:
    knobs = Knobs()
    seen = Observed(samples=2_000)

    def managers(self, factor: float):
        """Two pools, the first off by the factor."""
        quotas = tuple(
            manage.Quota(name, at, 1, 1, 0.5, 100) for at, name in enumerate("ab")
        )
        pools = (PoolPages(64, 1_000, (), (), ()), PoolPages(96, 1_000, (), (), ()))
        manager = manage.Manager("grouped", quotas, pools)
        moved = (PoolPages(64, round(1_000 * factor), (), (), ()), pools[1])
        return manager, dataclasses.replace(manager, pools=moved)

    @pytest.mark.parametrize(
        ("factor", "needed"),
        [(1.0, False), (1.25, False), (1.251, True), (0.8, False), (0.799, True)],
    )
    def test_some_pool_is_off_by_more_than_the_threshold(self, factor, needed):
        pair = self.managers(factor)
        assert manage.needs_adjustment(*pair, self.seen, self.knobs, 120) is needed

    def test_enough_was_seen_and_enough_time_has_passed(self):
        pair = self.managers(2)
        few = Observed(samples=1_999)
        assert manage.needs_adjustment(*pair, self.seen, self.knobs, 120)
        assert not manage.needs_adjustment(*pair, few, self.knobs, 1e9)
        assert not manage.needs_adjustment(*pair, self.seen, self.knobs, 119.9)

    def test_all_five_numbers_are_knobs(self):
        knobs = Knobs(
            decay=0.9,
            recompute_every=7,
            min_samples=3,
            min_interval_s=1,
            threshold=1.05,
        )
        assert set(dataclasses.asdict(knobs)) == {
            f.name for f in dataclasses.fields(Knobs)
        }
        pair, seen = self.managers(1.06), after([9] * 7, knobs)
        assert seen.weight == pytest.approx((1 - 0.9**7) / 0.1)
        assert manage.is_due(seen, knobs)
        assert manage.needs_adjustment(*pair, seen, knobs, 1)
        assert not manage.needs_adjustment(*pair, seen, knobs, 0.9)
        assert not manage.needs_adjustment(*self.managers(1.05), seen, knobs, 1)
        assert not manage.needs_adjustment(*pair, after([9] * 2, knobs), knobs, 1)

    def test_pools_that_shrink_do_so_first(self, stage):
        before = manage.retarget(stage, 512 * MIB, after([64]))
        later = manage.retarget(stage, 512 * MIB, after([32_768]))
        for old, new in ((before, later), (later, before)):
            found = manage.steps(old, new, holding=0)
            assert [step.after < step.before for step in found] == [True, False]
            taken = old.nbytes
            for step in found:
                size = old.pools[step.pool].page_nbytes
                taken += (step.after - step.before) * size
                assert taken <= 512 * MIB
            assert taken == new.nbytes

    def test_nothing_moves_while_a_sequence_holds_pages(self):
        with pytest.raises(errors.Busy, match="3 sequences hold pages"):
            manage.steps(*self.managers(2), holding=3)

    def test_nothing_to_do_is_nothing(self):
        assert manage.steps(*self.managers(1), holding=0) == ()

    def test_managers_of_other_groups_have_no_way_between_them(self, stage, members):
        mine = manage.grouped(stage, 512 * MIB)
        for other in (
            manage.grouped(members(), 512 * MIB),
            manage.static_split(stage, 512 * MIB),
        ):
            with pytest.raises(errors.IncompatiblePlan, match="from grouped"):
                manage.steps(mine, other, holding=0)


def test_groups_of_one_pool_are_due_other_shares_and_no_page_moves(members):
    made = members()
    short = manage.retarget(made, 512 * MIB, after([64]))
    long = manage.retarget(made, 512 * MIB, after([32_768]))
    assert short.pools == long.pools and manage.steps(short, long, holding=0) == ()
    full, window = manage.dues(short, long)
    pages = short.pools[0].pages
    assert (full.group, full.before, window.before) == (
        "target/full",
        pages // 2,
        pages // 2,
    )
    assert (full.after, window.after) == (pages * 1024 // 1028, pages * 4 // 1028)
    assert sum(each.after for each in (full, window)) <= pages
    seen = Observed(samples=9_999)
    assert manage.needs_adjustment(short, long, seen, Knobs(), 1e9)
    assert not manage.needs_adjustment(short, short, seen, Knobs(), 1e9)
    few = Observed(samples=1_999)
    assert not manage.needs_adjustment(short, long, few, Knobs(), 1e9)


def test_a_group_with_a_pool_of_its_own_has_no_share_beside_its_pages(stage):
    short = manage.retarget(stage, 512 * MIB, after([64]))
    long = manage.retarget(stage, 512 * MIB, after([32_768]))
    assert manage.dues(short, long) == ()


def test_a_share_too_small_for_a_page_is_due_one(members):
    manager = manage.retarget(members(), 512 * MIB, after([1 << 24]))
    assert manager.due(1) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        dict(decay=0.0), dict(decay=1.1), dict(recompute_every=0), dict(min_samples=0),
        dict(threshold=0.9), dict(min_interval_s=-1.0),
    ],
)  # fmt: skip
def test_knobs_that_mean_nothing_are_refused(wrong):
    with pytest.raises(errors.ConfigError):
        Knobs(**wrong)


def test_a_sequence_reuses_at_most_what_it_has():
    for wrong in (-1, 10):
        with pytest.raises(errors.ConfigError, match="reused tokens of 9"):
            manage.observe(Observed(), Knobs(), reused=wrong, history=9, capacity=9)
