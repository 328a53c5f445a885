"""Who may evict what: as little as needed, no floor broken, no quota passed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem import errors, manage
from kvmem.budget import PoolPages
from kvmem.manage import Admission, Evictions, Manager, Quota, Room, Shortage

STATE_NBYTES, TOKEN_NBYTES = 56_171_520, 27_648  # Kimi-K3 on TP 8


def hybrid(pages: int, extents: int, floor: int = 0) -> Manager:
    """One pool of attention pages and states of so many of them."""
    return Manager(
        "grouped",
        (
            Quota("target/full", 0, 1, floor, 0.5, pages),
            Quota("target/state", 0, extents, 0, 0.5, pages // extents),
        ),
        (PoolPages(TOKEN_NBYTES, pages, (), (), ()),),
    )


@pytest.mark.parametrize(
    ("nbytes", "dcp", "tokens"),
    [
        (STATE_NBYTES - 21_200_000, 1, 1_265),  # a gap of 21.2 MB beside a state slot
        (STATE_NBYTES, 1, 2_032),
        (STATE_NBYTES, 8, 16_254),
        (1, 1, 1),
        (0, 1, 0),
        (2 * STATE_NBYTES + 1, 1, 4_064),  # three slots lack at least two and a byte
    ],
)
def test_a_state_costs_thousands_of_cached_tokens(nbytes, dcp, tokens):
    assert manage.least_tokens(nbytes, TOKEN_NBYTES, dcp) == tokens


def test_a_state_that_lacks_pages_takes_those_of_cached_attention():
    # Pages of one token: a state is 2,032 of them, and 21.2 MB are 766 whole ones.
    manager = hybrid(10_000, 2_032)
    room = Room((766,), (10_000 - 766, 0))
    assert isinstance(manage.admit(manager, room, (0, 1)), Shortage)
    found = manage.evictions(manager, room, (0, 1), (9_000, 0))
    assert found.counts == (1_266, 0)  # the lower bound, and the page a gap ends in
    assert found.admission.room == Room((0,), (10_000 - 2_032, 1))


def test_it_waits_where_even_everything_would_not_do():
    manager = hybrid(10_000, 2_032)
    room = Room((766,), (10_000 - 766, 0))
    short = manage.evictions(manager, room, (0, 1), (1_265, 0))
    assert isinstance(short, Shortage) and short.missing == 1


def test_what_fits_evicts_nothing():
    manager = hybrid(100, 8)
    found = manage.evictions(manager, Room((20,), (80, 0)), (2, 2), (50, 0))
    assert found.counts == (0, 0) and isinstance(found.admission, Admission)


def test_who_asks_gives_first_then_who_has_most():
    manager = hybrid(100, 8)
    room = Room((0,), (60, 5))
    assert manage.evictions(manager, room, (0, 1), (60, 5)).counts == (0, 1)
    assert manage.evictions(manager, room, (3, 0), (60, 5)).counts == (3, 0)
    assert manage.evictions(manager, room, (0, 2), (60, 1)).counts == (8, 1)
    assert manage.evictions(manager, room, (3, 1), (60, 5)).counts == (11, 0)


def test_an_order_of_ones_own_is_kept():
    manager = hybrid(100, 8)
    room = Room((0,), (60, 5))
    found = manage.evictions(manager, room, (3, 0), (60, 5), order=(1, 0))
    assert found.counts == (0, 1)
    found = manage.evictions(manager, room, (0, 1), (60, 5), order=(0,))
    assert found.counts == (8, 0)
    short = manage.evictions(manager, room, (0, 1), (7, 5), order=(0,))
    assert isinstance(short, Shortage)


def test_what_a_whole_state_frees_spares_the_pages_before_it():
    # Three pages are cached and five lack: a state must go, and then no page need.
    manager = hybrid(100, 8)
    room = Room((0,), (60, 5))
    assert manage.evictions(manager, room, (5, 0), (3, 5)).counts == (0, 1)


def test_a_group_is_evicted_down_to_its_floor_and_no_further():
    manager = hybrid(100, 8, floor=58)
    room = Room((0,), (60, 5))
    short = manage.evictions(manager, room, (0, 1), (60, 0))
    assert isinstance(short, Shortage) and short.missing == 6
    assert manage.evictions(manager, room, (2, 0), (60, 0)).counts == (2, 0)


def test_a_group_over_its_quota_can_only_give_up_its_own(members):
    manager = manage.static_split(members(), 64 * 786_432)
    room = Room((10,), (32, 22))
    short = manage.evictions(manager, room, (3, 0), (0, 22))
    assert isinstance(short, Shortage) and short.law == "quota"
    assert manage.evictions(manager, room, (3, 0), (5, 22)).counts == (3, 0)
    free = manage.grouped(members(), 64 * 786_432)
    assert manage.evictions(free, room, (3, 0), (0, 22)).counts == (0, 0)


@pytest.mark.parametrize(
    ("evictable", "beyond"),
    [
        ((40, 5), (0, 0)),  # 40 pages each: half and half
        ((39, 5), (0, 0)),  # a page is no whole state too many
        ((20, 5), (0, 1)),  # 60 pages are cached, 30 of them are due: four states
        ((64, 2), (24, 0)),
        ((0, 5), (0, 2)),
        ((60, 0), (30, 0)),
        ((0, 0), (0, 0)),
    ],
)
def test_cached_pages_beyond_a_share_are_those_the_others_have_no_text_for(
    evictable, beyond
):
    manager = hybrid(100, 8)
    assert manage.beyond_shares(manager, evictable) == beyond


def test_nobody_is_beyond_a_share_of_everything():
    manager = manage.as_built("any", "ab", PoolPages(64, 80, (0, 1), (80, 10), (1, 8)))
    assert [quota.share for quota in manager.quotas] == [1.0, 1.0]
    assert manage.beyond_shares(manager, (80, 0)) == (0, 0)
    assert manage.beyond_shares(manager, (0, 10)) == (0, 0)


def test_a_pool_as_it_was_built_grants_the_ids_that_it_has():
    pool = PoolPages(64, 100, (0, 1), (60, 5), (1, 8))
    manager = manage.as_built("static_split", ("full", "state"), pool)
    assert manager.objections() == () and manager.pools == (pool,)
    everything = manage.admit(manager, manage.unused(manager), (60, 5))
    assert isinstance(everything, Admission)
    for needs in ((61, 0), (0, 6)):
        short = manage.admit(manager, manage.unused(manager), needs)
        assert (short.law, short.missing) == ("quota", 1)


def test_all_that_is_cached_is_the_most_that_can_be_had():
    manager = hybrid(100, 8)
    room = Room((3,), (57, 5))
    assert isinstance(manage.granted_at_most(manager, room, (0, 1), (5, 0)), Admission)
    short = manage.granted_at_most(manager, room, (0, 1), (4, 0))
    assert (short.law, short.missing) == ("pool", 1)
    with pytest.raises(errors.InvalidId):
        manage.granted_at_most(manager, room, (0, 1), (58, 0))


def test_more_evictable_than_held_is_refused():
    with pytest.raises(errors.InvalidId, match="of target/state too"):
        manage.evictions(hybrid(100, 8), Room((0,), (60, 5)), (1, 0), (60, 6))


@settings(max_examples=150)
@given(
    st.integers(1, 9),
    st.integers(0, 6),
    st.tuples(st.integers(0, 40), st.integers(0, 6), st.integers(0, 20)),
    st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(0, 12)),
    st.data(),
)
def test_evictions_are_enough_and_none_is_superfluous(
    extents, floor, held, needs, data
):
    pages = 80
    manager = Manager(
        "grouped",
        (
            Quota("a", 0, 1, floor, 0.4, pages),
            Quota("b", 0, extents, 0, 0.4, pages // extents),
            Quota("c", 1, 1, 0, 0.2, 20),
        ),
        (PoolPages(64, pages, (), (), ()), PoolPages(96, 20, (), (), ())),
    )
    free = pages - held[0] - held[1] * extents
    if free < 0:
        return
    room = Room((free, 20 - held[2]), held)
    evictable = tuple(data.draw(st.integers(0, count)) for count in held)
    found = manage.evictions(manager, room, needs, evictable)
    if isinstance(found, Shortage):
        everything = manage.give_back(manager, room, evictable)
        assert manage.admit(manager, everything, needs) == found
        return
    assert isinstance(found, Evictions)
    assert all(n <= most for n, most in zip(found.counts, evictable, strict=True))
    after = manage.give_back(manager, room, found.counts)
    assert manage.admit(manager, after, needs) == found.admission
    for group, count in enumerate(found.counts):
        if count:
            fewer = [*found.counts]
            fewer[group] -= 1
            left = manage.give_back(manager, room, fewer)
            assert isinstance(manage.admit(manager, left, needs), Shortage)
