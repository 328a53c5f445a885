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


@pytest.mark.parametrize("kind", ["unified", "split"])
@pytest.mark.parametrize("shares", [None, (9, 1), (1, 9)])
def test_no_pool_is_divided_into_more_pages_than_its_cap(mix, kind, shares):
    groups = mix(full=1, windowed=5).groups()
    limits = [budget.limit("memory", 64 * MIB)]
    load = dict(sequences=4, max_length=512, max_pages=30, kind=kind)
    solved = budget.solve(groups, Topology(), limits, **load)
    members = manage.members_of(groups, Topology(), "head_major", kind)
    halves = manage.divide(solved, members, "static_split", shares)
    assert max(pool.pages for pool in halves.pools) <= 30
    assert all(group.pages for group in halves.groups)
    for pool in halves.pools:
        held = [n * k for n, k in zip(pool.num_vpages, pool.extents, strict=True)]
        assert sum(held) == pool.pages


@pytest.mark.parametrize("kind", ["unified", "split"])
@pytest.mark.parametrize("dcp", [1, 2])
@pytest.mark.parametrize("shares", [None, (9, 1), (1, 9)])
def test_a_draft_has_pages_for_the_ids_of_the_quota_it_follows(mix, kind, dcp, shares):
    topology = Topology(dcp=dcp)
    groups = mix(full=1, windowed=5).groups()
    drafts = mix(full=3, windowed=0, domain="draft").groups()
    limits = [budget.limit("memory", 64 * MIB)]
    load = dict(sequences=4, max_length=512, kind=kind, draft=drafts)
    solved = budget.solve(groups, topology, limits, **load)
    members = manage.members_of(groups, topology, "head_major", kind)
    halves = manage.divide(solved, members, "static_split", shares)
    (full,) = (group for group in halves.groups if group.lifecycle == "full")
    assert halves.draft_pages == dcp * full.pages
    assert halves.used_nbytes <= solved.used_nbytes <= 64 * MIB
    rows = full.pages * full.page_size
    claimed = sum(t.bytes_per_token * rows + t.fixed_bytes for t in halves.terms)
    assert claimed == halves.used_nbytes


def test_claims_of_a_divided_plan_are_what_its_pools_take(hybrid):
    solved, members = planned(hybrid)
    halves = manage.divide(solved, members, "static_split", (2, 1, 1))
    rows = halves.groups[0].pages * 16
    claimed = sum(t.bytes_per_token * rows + t.fixed_bytes for t in halves.terms)
    assert claimed == halves.used_nbytes
    assert [term.name for term in halves.terms] == [term.name for term in solved.terms]


@pytest.mark.parametrize("ratio", [1e-3, 1e-300])
def test_a_ratio_of_next_to_nothing_still_divides(mix, ratio):
    groups = mix(full=1, windowed=5).groups()
    limits = [budget.limit("memory", 64 * MIB)]
    solved = budget.solve(groups, Topology(), limits, window_ratio=ratio)
    members = manage.members_of(groups, Topology(), "head_major", "unified")
    halves = manage.divide(solved, members, "static_split")
    assert min(halves.pools[0].num_vpages) >= 1


@pytest.mark.parametrize("share", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_share_that_is_no_positive_number_is_refused(hybrid, share):
    solved, members = planned(hybrid)
    with pytest.raises(errors.ConfigError, match="above zero and finite"):
        manage.divide(solved, members, "static_split", (1, 1, share))


def test_shares_whose_sum_no_float_holds_divide_all_the_same(hybrid):
    solved, members = planned(hybrid)
    thirds = manage.divide(solved, members, "static_split", (1e308,) * 3)
    assert thirds == manage.divide(solved, members, "static_split", (1, 1, 1))
