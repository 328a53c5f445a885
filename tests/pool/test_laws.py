"""The checker and its twins: every law is broken by hand, and seen."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as kvpool


@pytest.fixture
def sound():
    """Return a pool of 6 pages, 2 groups, in use, and all tables of its holders."""
    pool = kvpool.init(6, 16, num_vpages=(5, 4))
    pool, vpages, _ = kvpool.handout(pool, 0, [2, 1], 3)
    pool, child, _ = kvpool.fork(pool, 0, vpages[0], 3)
    pool, other, _ = kvpool.handout(pool, 1, [1], 1)
    return pool, [[vpages, child], [other]]


def with_group(pool, group=0, **books):
    groups = list(pool.groups)
    groups[group] = dataclasses.replace(groups[group], **books)
    return dataclasses.replace(pool, groups=tuple(groups))


def test_a_sound_pool_breaks_no_law(sound):
    pool, holders = sound
    assert kvpool.check(pool) == ()
    assert kvpool.check(pool, holders=holders) == ()
    assert kvpool.check(kvpool.Ledger.of(pool), holders=holders) == ()


@pytest.mark.case("ALC-07")
def test_a_page_both_free_and_in_a_table_is_named(sound):
    pool, _ = sound
    books = pool.groups[0]
    vfree = books.vfree.at[books.num_vfree].set(1)
    broken = with_group(pool, vfree=vfree, num_vfree=books.num_vfree + 1)
    found = kvpool.check(broken)
    assert "virtual page 1 of group 0 is both free and in use, refs 2" in found
    assert any("num_vfree is 3 and 3 virtual pages are held" in law for law in found)


@pytest.mark.case("ALC-07")
def test_a_reference_too_many_is_named_when_the_holders_are_shown(sound):
    pool, holders = sound
    broken = with_group(pool, refs=pool.groups[0].refs.at[1].add(1))
    found = kvpool.check(broken, holders=holders)
    assert found == ("virtual page 1 of group 0 has 3 references and 2 holders",)


@pytest.mark.case("ALC-07")
@pytest.mark.parametrize("step", [1, -1])
def test_a_counter_off_by_one_is_named(step, sound):
    pool, _ = sound
    broken = dataclasses.replace(pool, num_free=pool.num_free + step)
    found = kvpool.check(broken)
    assert f"num_free is {2 + step} and 4 pages are owned, of 6 in all" in found
    books = pool.groups[0]
    found = kvpool.check(with_group(pool, num_vfree=books.num_vfree + step))
    assert any(f"num_vfree is {2 + step} and 3 virtual" in law for law in found)


def test_a_counter_outside_its_stack_is_named(sound):
    pool, _ = sound
    for count in (7, -1):
        found = kvpool.check(dataclasses.replace(pool, num_free=jnp.int32(count)))
        assert f"num_free is {count}, outside 0 to 6" in found


def test_an_id_twice_or_out_of_range_on_a_stack_is_named(sound):
    pool, _ = sound
    twice = dataclasses.replace(pool, free=pool.free.at[0].set(4))
    found = kvpool.check(twice)
    assert "free holds page 4 more than once" in found
    assert "page 5 is neither free nor owned" in found
    found = kvpool.check(dataclasses.replace(pool, free=pool.free.at[0].set(-1)))
    assert "free holds page -1, out of range" in found
    vfree = pool.groups[1].vfree.at[0].set(9)
    found = kvpool.check(with_group(pool, 1, vfree=vfree))
    assert "group 1: vfree holds page 9, out of range" in found
    assert "virtual page 3 of group 1 is neither free nor in use" in found


def test_a_physical_page_both_free_and_owned_is_named(sound):
    pool, _ = sound
    broken = dataclasses.replace(pool, free=pool.free.at[0].set(3))
    found = kvpool.check(broken)
    assert "page 3 is both free and owned by (group, vpage) (1, 0)" in found


@pytest.mark.parametrize(
    "owner", [(0, 0), (0, 4), (0, 7), (1, 1), (1, 2), (3, 2), (0, -1), (-1, 2)]
)
def test_an_owner_that_does_not_map_the_page_is_named(owner, sound):
    pool, _ = sound
    broken = dataclasses.replace(pool, p2v=pool.p2v.at[2].set(jnp.array(owner)))
    phrase = f"page 2 names owner (group, vpage) {owner}, which does not map it"
    found = kvpool.check(broken)
    assert phrase in found
    assert any("virtual page 2 of group 0 maps [2]" in law for law in found)


@pytest.mark.parametrize("page", [0, 5, -1, 99])
def test_a_map_to_a_page_of_another_is_named(page, sound):
    pool, _ = sound
    broken = with_group(pool, v2p=pool.groups[0].v2p.at[2].set(page))
    phrase = (
        f"virtual page 2 of group 0 maps [{page}], owned by another or out of range"
    )
    found = kvpool.check(broken)
    assert phrase in found
    assert "page 2 names owner (group, vpage) (0, 2), which does not map it" in found


def test_a_map_that_is_right_only_when_clipped_is_named(sound):
    pool, _ = sound
    broken = with_group(pool, v2p=pool.groups[0].v2p.at[0].set(-1))
    phrase = "virtual page 0 of group 0 maps [-1], owned by another or out of range"
    assert phrase in kvpool.check(broken)


def test_references_and_the_map_go_together(sound):
    pool, _ = sound
    refs, v2p = pool.groups[0].refs, pool.groups[0].v2p
    found = kvpool.check(with_group(pool, refs=refs.at[2].set(0)))
    assert "virtual page 2 of group 0 is mapped to [2] and held by nobody" in found
    found = kvpool.check(with_group(pool, v2p=v2p.at[2].set(pool.null_page)))
    assert "virtual page 2 of group 0 has 1 references and no page" in found
    found = kvpool.check(with_group(pool, refs=refs.at[2].set(-1)))
    assert "virtual page 2 of group 0 has -1 references" in found


def test_a_pin_needs_a_holder_and_is_never_negative(sound):
    pool, _ = sound
    pins = pool.groups[0].pins
    assert kvpool.check(with_group(pool, pins=pins.at[1].set(2))) == ()
    found = kvpool.check(with_group(pool, pins=pins.at[4].set(1)))
    assert found == ("virtual page 4 of group 0 is pinned and held by nobody",)
    found = kvpool.check(with_group(pool, pins=pins.at[1].set(-1)))
    assert found == ("virtual page 1 of group 0 has -1 pins",)


def test_a_holder_that_was_forgotten_or_lists_minus_one_is_named(sound):
    pool, holders = sound
    found = kvpool.check(pool, holders=[holders[0], [[]]])
    assert found == ("virtual page 0 of group 1 has 1 references and 0 holders",)
    found = kvpool.check(pool, holders=[[*holders[0], [-1, 5]], holders[1]])
    assert found == ("a holder of group 0 lists page -1",)


def test_many_broken_pages_are_named_in_part_and_counted(sound):
    ledger = kvpool.Ledger(40)
    ledger.groups[0].refs[:] = 1
    found = kvpool.check(ledger)
    assert "… and 32 more like it" in found


def test_a_checked_verb_answers_as_the_verb_does(sound):
    pool, _ = sound
    pool, vpages, ok = kvpool.checked(kvpool.handout)(pool, 0, [1, 1], 1)
    assert bool(ok)
    assert np.asarray(vpages).tolist() == [[3], [4]]
    pool, rejected = kvpool.checked(kvpool.release)(pool, 0, [3, 5])
    assert not np.asarray(rejected).any()
    assert kvpool.checked(kvpool.translate)(pool, 0, [4]).tolist() == [5]


def test_a_checked_verb_refuses_before_the_pool_is_donated(sound):
    pool, _ = sound
    with pytest.raises(errors.InvalidId, match="page 4 is listed 1 times and held 0"):
        kvpool.checked(kvpool.release)(pool, 0, [4])
    with pytest.raises(errors.OutOfPages, match="free are 2 of 6 physical pages"):
        kvpool.checked(kvpool.handout)(pool, 0, [3], 3)
    with pytest.raises(errors.InvalidId, match="column -1 of 1"):
        kvpool.checked(kvpool.fork)(pool, 0, [0], -1)
    assert not pool.pages.is_deleted()


def test_a_checked_verb_sees_a_pool_that_somebody_broke(sound):
    pool, _ = sound
    broken = with_group(pool, refs=pool.groups[0].refs.at[4].set(1))
    with pytest.raises(
        errors.KVMemError, match="books after retain in group 0.*no page"
    ):
        kvpool.checked(kvpool.retain)(broken, 0, [0])
