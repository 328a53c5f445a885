"""A budget divided by a manager: quotas that ids keep, and bytes that do not grow."""

import pytest

from kvmem import budget, errors, manage
from kvmem.geometry import Topology
from kvmem.pool import Ledger

MIB = 1 << 20


def planned(groups, nbytes: int = 64 * MIB, kind: str = "unified"):
    solved = budget.solve(
        groups,
        Topology(),
        [budget.limit("memory", nbytes)],
        kind=kind,
        sequences=4,
        max_length=512,
    )
    return solved, manage.members_of(groups, Topology(), "head_major", kind)


@pytest.fixture(scope="module")
def hybrid(mix):
    """Full attention, a window and a state of several pages."""
    return mix(states=6, kv_heads=1, head_dim=16, page_size=16).groups()


def test_the_grouped_manager_is_the_budget_as_it_was_solved(hybrid):
    solved, members = planned(hybrid)
    assert manage.divide(solved, members, "grouped") is solved
    (pool,) = solved.pools
    assert pool.num_vpages == tuple(pool.pages // extent for extent in pool.extents)


def test_a_single_group_keeps_everything(mix):
    solved, members = planned(mix(windowed=0).groups())
    assert manage.divide(solved, members, "static_split") is solved


def test_a_static_split_leaves_each_group_the_ids_of_its_quota(hybrid):
    solved, members = planned(hybrid)
    halves = manage.divide(solved, members, "static_split", (2, 1, 1))
    (pool,) = halves.pools
    total = solved.pools[0].nbytes
    assert pool.nbytes <= total < pool.nbytes + 4 * pool.page_nbytes
    sizes = [member.envelope.nbytes for member in members]
    for count, size, share in zip(pool.num_vpages, sizes, (2, 1, 1), strict=True):
        assert 0 <= total * share / 4 - count * size < size + 1
    assert [group.pages for group in halves.groups] == list(pool.num_vpages)
    assert [group.tokens for group in halves.groups] == [
        pool.num_vpages[0] * 16, pool.num_vpages[1] * 16, 0,
    ]  # fmt: skip
    assert halves.used_nbytes <= solved.pool_nbytes


def test_a_ledger_of_the_divided_budget_refuses_what_is_over_a_quota(hybrid):
    solved, members = planned(hybrid, MIB)
    (pool,) = manage.divide(solved, members, "static_split").pools
    ledger = Ledger(pool.pages, pool.num_vpages, pool.extents)
    most = pool.num_vpages[0]
    ledger.handout(0, [most], most)
    with pytest.raises(errors.OutOfPages):
        ledger.handout(0, [1], 1)
    for group in (1, 2):  # the others still have all of theirs
        ledger.handout(group, [pool.num_vpages[group]], pool.num_vpages[group])
    assert ledger.num_free == 0


def test_a_split_budget_is_divided_pool_by_pool(mix):
    solved, members = planned(mix(full=4, windowed=5).groups(), kind="split")
    halves = manage.divide(solved, members, "static_split")
    assert [pool.page_nbytes for pool in halves.pools] == [262_144, 327_680]
    nbytes = sum(pool.nbytes for pool in solved.pools)
    for pool in halves.pools:
        assert nbytes / 2 - pool.page_nbytes < pool.nbytes <= nbytes / 2


def test_members_of_another_budget_and_unknown_managers_are_refused(hybrid, mix):
    solved, members = planned(hybrid)
    _, others = planned(mix().groups())
    for wrong in (others, members[:2], tuple(reversed(members))):
        with pytest.raises(errors.ConfigError, match="was solved for"):
            manage.divide(solved, wrong, "static_split")
    with pytest.raises(errors.ConfigError, match="manager 'auto'"):
        manage.divide(solved, members, "auto")
    with pytest.raises(errors.ConfigError, match="have no fixed shares"):
        manage.divide(solved, members, "grouped", (1, 1, 1))


def test_a_fraction_without_a_page_is_refused(hybrid):
    solved, members = planned(hybrid, MIB)
    with pytest.raises(errors.OutOfPages, match="target/state gets"):
        manage.divide(solved, members, "static_split", (1, 1, 1e-6))
