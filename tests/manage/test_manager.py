"""Both managers keep one law: what they grant is what they were given, or less."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem import errors, manage
from kvmem.budget import PoolPages
from kvmem.geometry import Lifecycle
from kvmem.manage import Manager, Room

FACTORIES = {"grouped": manage.grouped, "static_split": manage.static_split}
LIVES = [Lifecycle("full"), Lifecycle("state")]
LIVES += [Lifecycle("window", w, s) for w, s in ((11, 0), (64, 4), (128, 0), (100, 40))]


@st.composite
def topologies(draw) -> list[tuple]:
    """Arguments of `bare`: any lifecycles in one or two domains, in up to 3 pools."""
    made, sizes = [], []
    for domain in draw(st.sampled_from([("target",), ("target", "draft")])):
        lives = draw(st.lists(st.sampled_from(LIVES), min_size=1, unique=True))
        for life in lives:
            extents = draw(st.integers(1, 7)) if life.kind == "state" else 1
            size = draw(st.sampled_from([4_096, 4_112, 65_536]))
            sizes = list(dict.fromkeys([*sizes, size]))
            made.append((life, size, extents, sizes.index(size), domain))
    return made


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
class TestEveryManager:
    @settings(max_examples=60)
    @given(
        topology=topologies(),
        nbytes=st.integers(1, 1 << 28),
        floor=st.integers(1, 5),
        data=st.data(),
    )
    def test_never_takes_more_than_it_was_given(
        self, factory, bare, topology, nbytes, floor, data
    ):
        members = [bare(*row) for row in topology]
        weight = st.floats(1e-3, 1e3)
        shares = data.draw(
            st.none() | st.tuples(*[weight for _ in members]), label="shares"
        )
        floors = (floor,) * len(members)
        try:
            manager = factory(members, nbytes, shares=shares, floors=floors)
        except errors.OutOfPages:
            return
        assert manager.nbytes <= nbytes
        assert manager.objections() == ()
        assert all(quota.floor >= floor for quota in manager.quotas)
        assert sum(q.share for q in manager.quotas) == pytest.approx(1)
        drawn = zip(manager.quotas, members, strict=True)
        for quota, member in drawn:
            pool = manager.pools[quota.pool]
            assert (quota.group, pool.page_nbytes, quota.extents) == (
                manage.key_of(member.group),
                member.page_nbytes,
                member.extents,
            )

    @settings(max_examples=40)
    @given(topology=topologies(), data=st.data())
    def test_grants_whole_claims_and_gets_them_back(
        self, factory, bare, topology, data
    ):
        members = [bare(*row) for row in topology]
        manager = factory(members, 64 << 20, floors=(2,) * len(members))
        start = room = manage.unused(manager)
        claims = []
        counts = st.tuples(*[st.integers(0, 40) for _ in members])
        for needs in data.draw(st.lists(counts, min_size=1, max_size=30)):
            answer = manage.admit(manager, room, needs)
            if isinstance(answer, manage.Shortage):
                assert answer.missing > 0 and answer.reason
                continue
            assert answer.claims == needs
            room = answer.room
            claims.append(needs)
            assert_sound(manager, room)
        for needs in claims:
            room = manage.give_back(manager, room, needs)
        assert room == start

    def test_a_floor_is_there_whatever_the_others_take(self, factory, members):
        manager = factory(members(), 64 << 20, floors=(3, 7))
        room = manage.unused(manager)
        while isinstance(
            answer := manage.admit(manager, room, (1, 0)), manage.Admission
        ):
            room = answer.room
        full = manager.index("target/full")
        assert full == 0 and room.held[0] > 3
        assert isinstance(manage.admit(manager, room, (0, 7)), manage.Admission)

    def test_what_gets_too_little_is_refused_with_numbers(self, factory, members):
        with pytest.raises(errors.OutOfPages, match=r"floor|needs 64"):
            factory(members(), 64 << 20, floors=(64, 64))

    def test_two_groups_of_one_key_are_refused(self, factory, members):
        twice = members() + members()
        with pytest.raises(errors.ConfigError, match="target/full.*more than once"):
            factory(twice, 1 << 30)
        with pytest.raises(errors.ConfigError, match="manager of 0 groups"):
            factory((), 1 << 30)

    def test_members_of_two_plans_are_no_one_plan(self, factory, members, mix):
        draft = members(mix(full=1, windowed=0, domain="draft"))
        with pytest.raises(errors.ConfigError, match="in one call of members_of"):
            factory(members() + draft, 1 << 30)

    def test_shares_of_another_number_are_refused(self, factory, members):
        for wrong in ((1,), (1, 0), (1, -1), (1, 1, 1)):
            with pytest.raises(errors.ConfigError, match="every group has a share"):
                factory(members(), 1 << 30, shares=wrong)

    def test_both_domains_stand_in_one_manager(self, factory, members, mix):
        both = members(mix(), mix(full=1, windowed=0, domain="draft"))
        manager = factory(both, 1 << 30)
        assert [quota.group for quota in manager.quotas] == [
            "target/full",
            "target/window128",
            "draft/full",
        ]
        assert manager.nbytes <= 1 << 30
        with pytest.raises(errors.InvalidId, match="draft/full"):
            manager.index("draft/window128")


def assert_sound(manager: Manager, room: Room) -> None:
    for index, pool in enumerate(manager.pools):
        rows = zip(manager.quotas, room.held, strict=True)
        mine = [(q, held) for q, held in rows if q.pool == index]
        taken = sum(held * q.extents for q, held in mine)
        assert room.free[index] + taken == pool.pages
        kept = sum(max(0, q.floor - held) * q.extents for q, held in mine)
        assert kept <= room.free[index]
        assert all(held <= q.pages for q, held in mine)


def test_groups_with_pages_of_one_size_share_one_free_list(members):
    manager = manage.grouped(members(), 64 * 786_432)
    assert [(pool.page_nbytes, pool.pages) for pool in manager.pools] == [(786_432, 64)]
    full, window = manager.quotas
    assert (full.pool, window.pool, full.pages, window.pages) == (0, 0, 64, 64)
    taken = manage.admit(manager, manage.unused(manager), (50, 14))
    assert isinstance(taken, manage.Admission) and taken.room.free == (0,)
    room = manage.give_back(manager, taken.room, (0, 9))  # the window moved on
    grown = manage.admit(manager, room, (9, 0))
    assert isinstance(grown, manage.Admission) and grown.room.held == (59, 5)


def test_pages_of_other_sizes_have_pools_of_their_own(members):
    stage = members(full=4, windowed=5)
    manager = manage.grouped(stage, 1 << 30)
    assert [pool.page_nbytes for pool in manager.pools] == [262_144, 327_680]
    assert [quota.pool for quota in manager.quotas] == [0, 1]
    shares = [quota.share for quota in manager.quotas]
    assert [round(100 * share, 1) for share in shares] == [91.2, 8.8]


def test_states_of_a_unified_pool_take_several_of_its_pages(members):
    mixed = members(unified=True, states=6, kv_heads=1, head_dim=16, page_size=16)
    full, window, state = mixed
    assert full.page_nbytes == window.page_nbytes == state.page_nbytes == 12_288
    assert (full.extents, window.extents, state.extents) == (1, 1, 3)
    manager = manage.grouped(mixed, 100 * 12_288)
    assert [quota.pages for quota in manager.quotas] == [100, 100, 33]
    assert manager.pools == (
        PoolPages(12_288, 100, (0, 1, 2), (100, 100, 33), (1, 1, 3)),
    )
    halves = manage.static_split(mixed, 100 * 12_288, shares=(5, 2, 3))
    assert halves.pools[0].num_vpages == (50, 20, 10)
    assert halves.pools[0].pages == 50 + 20 + 10 * 3
    taken = manage.admit(manager, manage.unused(manager), (2, 1, 4))
    assert isinstance(taken, manage.Admission) and taken.room.free == (100 - 15,)
    kept = manage.grouped(mixed, 62 * 12_288, floors=(1, 1, 20))
    assert kept.pools[0].pages == 1 + 1 + 20 * 3
    with pytest.raises(errors.OutOfPages, match=r"target/state 62 pages"):
        manage.grouped(mixed, 61 * 12_288, floors=(1, 1, 20))


def test_a_static_split_lets_nobody_have_what_another_leaves(members):
    manager = manage.static_split(members(), 64 * 786_432, shares=(3, 1))
    assert [quota.pages for quota in manager.quotas] == [48, 16]
    short = manage.admit(manager, manage.unused(manager), (49, 0))
    assert isinstance(short, manage.Shortage)
    assert (short.group, short.law, short.missing) == ("target/full", "quota", 1)


def test_a_static_split_is_equal_and_exact_unless_said_otherwise(members):
    manager = manage.static_split(members(), 8 * 786_432 - 2)
    assert [quota.pages for quota in manager.quotas] == [3, 3]
    for thirds in ((1 / 3, 2 / 3), (1, 2), (0.1, 0.2)):
        manager = manage.static_split(members(), 9 * 786_432, shares=thirds)
        assert [quota.pages for quota in manager.quotas] == [3, 6]
        assert manager.quotas[0].share == pytest.approx(1 / 3)
    # Normalised first, 3 of 5 parts would be a byte short of three pages.
    manager = manage.static_split(members(), 5 * 786_432, shares=(3, 2))
    assert [quota.pages for quota in manager.quotas] == [3, 2]


def test_what_a_batch_needs_is_what_it_holds_at_its_last_token(members):
    made = members()
    assert manage.need(made, [2_049]) == (65, 5)
    assert manage.need(made, [8_192, 2_049, 1]) == (256 + 65 + 1, 4 + 5 + 1)
    assert manage.need(made, [0]) == (0, 0)


def test_a_window_of_128_holds_four_or_five_pages_of_32(members):
    made = members()
    held = [manage.need(made, [length])[1] for length in range(160, 4_096)]
    assert set(held) == {4, 5}
    assert [manage.need(made, [length])[1] for length in (159, 160, 161)] == [5, 4, 5]
    assert manage.peak(made, [4_096]) == (128, 5)
    assert manage.peak(made, [4_096, 40], step=256) == (128 + 2, 13 + 2)


def test_a_state_is_one_page_whatever_the_length(members):
    made = members(states=2)
    assert manage.need(made, [1, 10_000])[2] == 2
    assert manage.peak(made, [10_000], step=512)[2] == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(floor=70), "floors of 71 in 64 pages"),
        (dict(pages=65), "65 vpages of 1 in pool 0"),
        (dict(extents=2), "64 vpages of 2 in pool 0 of 64"),
        (dict(pages=2, floor=3), "a floor of 3 above its 2"),
        (dict(floor=-1), "a floor of -1"),
    ],
)
def test_quotas_that_cannot_be_are_seen(members, change, complaint):
    manager = manage.grouped(members(), 64 * 786_432)
    assert manager.objections() == ()
    broken = dataclasses.replace(manager.quotas[0], **change)
    manager = dataclasses.replace(manager, quotas=(broken, *manager.quotas[1:]))
    assert complaint in "; ".join(manager.objections())


@pytest.mark.case("BUD-03")
def test_a_fixed_cost_is_paid_first_and_never_scaled(bare):
    # 40 KiB a token for the target; a windowed draft of 3 MiB whatever the length.
    target = bare(Lifecycle("full"), 16 * 40_960)
    draft = bare(Lifecycle("window", 96), 3 << 17, 1, 1, "draft")
    fixed = manage.rows_floor([draft], 1, 1 << 20, step=16)
    assert fixed[0] * draft.page_nbytes == 3 << 20
    typical = manage.Batch((manage.Row(1 << 20, 1 << 20),))
    both, floors = (target, draft), (1, *fixed)
    manager = manage.grouped(both, 100 << 20, typical=typical, floors=floors)
    assert [pool.pages for pool in manager.pools] == [155, 8]
    with pytest.raises(errors.OutOfPages, match=r"3,145,728 B.*target/full 1"):
        manage.grouped(both, 3 << 20, typical=typical, floors=floors)
