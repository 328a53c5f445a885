"""Budgets: golden numbers of draft terms, limits that bind, and the sum of claims."""

import pytest

from kvmem import budget, errors
from kvmem.geometry import LayerSpec, Topology, group_layers

GIB = 1 << 30


def layers(count, heads, dim=128, dtype="bfloat16"):
    return [
        LayerSpec(f"layers.{i}", i, kv_heads=heads, head_dim=dim, dtype=dtype)
        for i in range(count)
    ]


def target(page_size=1, count=32, heads=4):
    return group_layers(layers(count, heads), page_size)


def draft(page_size=1, count=5, heads=4):
    (group,) = group_layers(layers(count, heads), page_size, domain="draft")
    return group


def per_row(solved, owner):
    return sum(t.bytes_per_token for t in solved.terms if t.owner == owner)


@pytest.mark.parametrize(
    ("heads", "draft_bytes", "total"),
    [(4, 10_240, 75_776), (8, 20_480, 86_016), (2, 5_120, 70_656)],
)
def test_the_draft_is_priced_by_its_own_geometry(heads, draft_bytes, total):
    # SGLang #34234: scaling the target by the ratio of layers says 75,776 for all
    # three.
    solved = budget.solve(
        target(), Topology(), [budget.limit("memory", GIB)], draft=draft(heads=heads)
    )
    assert per_row(solved, "target") == 65_536
    assert per_row(solved, "draft") == draft_bytes
    assert solved.used_nbytes == total * solved.groups[0].pages


@pytest.mark.parametrize(
    ("dcp", "draft_bytes", "total", "rows"),
    [
        (1, 10_240, 75_776, 141_699),
        (2, 20_480, 86_016, 124_830),
        (4, 40_960, 106_496, 100_824),
        (8, 81_920, 147_456, 72_817),
    ],
)
def test_the_draft_term_grows_with_dcp_and_the_target_term_does_not(
    dcp, draft_bytes, total, rows
):
    solved = budget.solve(
        target(),
        Topology(dcp=dcp),
        [budget.limit("memory", 10 * GIB)],
        draft=draft(),
    )
    (group,) = solved.groups
    assert per_row(solved, "target") == 65_536
    assert per_row(solved, "draft") == draft_bytes
    assert per_row(solved, "target") + per_row(solved, "draft") == total
    assert group.pages == rows
    assert group.tokens == rows * dcp
    assert solved.draft_pages == rows * dcp
    assert solved.used_nbytes <= 10 * GIB < solved.used_nbytes + total


def test_draft_rows_cover_the_whole_virtual_range():
    solved = budget.solve(
        target(16),
        Topology(dcp=4),
        [budget.limit("memory", GIB)],
        draft=draft(16),
    )
    (group,) = solved.groups
    highest_virtual_slot = group.pages * group.page_size * 4 - 1
    assert solved.draft_pages * 16 - 1 >= highest_virtual_slot


@pytest.mark.case("BUD-01")
def test_target_and_draft_share_one_budget():
    solved = budget.solve(
        target(16, count=32, heads=8),
        Topology(),
        [budget.limit("memory", 1_000_000_000)],
        draft=draft(16, count=2, heads=8),
    )
    (group,) = solved.groups
    assert per_row(solved, "target") == 131_072
    assert per_row(solved, "draft") == 8_192
    assert (group.pages, group.tokens, solved.draft_pages) == (448, 7_168, 448)
    assert solved.used_nbytes == 998_244_352
    target_only = budget.solve(
        target(16, count=32, heads=8),
        Topology(),
        [budget.limit("memory", 1_000_000_000)],
    )
    assert target_only.groups[0].pages == 476
    spent = 476 * 16 * (131_072 + 8_192)
    assert spent == 1_060_634_624 > 1_000_000_000


@pytest.mark.case("BUD-04")
def test_a_total_is_divided_and_a_figure_a_rank_is_multiplied():
    topology = Topology(tp=4)
    total = budget.total_limit("host", 50 * GIB, topology)
    assert total.nbytes == 13_421_772_800
    assert f"{50 * GIB:,}" in total.reason
    with pytest.raises(errors.IncompatiblePlan, match="x 4 = 214,748,364,800 B"):
        budget.rank_limit("host", 50 * GIB, topology, machine_nbytes=128 * GIB)
    fits = budget.rank_limit("host", 32 * GIB, topology, machine_nbytes=128 * GIB)
    assert fits.nbytes == 32 * GIB


@pytest.mark.case("BUD-11")
@pytest.mark.parametrize(
    ("cap", "nbytes", "name"),
    [(20, 20 * GIB, "memory"), (50, 36 * GIB, "fraction")],
)
def test_the_smaller_of_two_limits_wins_and_is_named(cap, nbytes, name):
    limits = [
        budget.fraction_limit("fraction", 40 * GIB, 0.9),
        budget.limit("memory", cap * GIB),
    ]
    solved = budget.solve(target(16), Topology(), limits)
    assert solved.pool_nbytes == nbytes
    assert solved.binding_limit == name
    assert 0 <= solved.left_nbytes < solved.groups[0].page_nbytes


def test_a_cap_in_pages_binds_only_when_it_is_the_smaller():
    limits = [budget.limit("memory", 100 * 16 * 65_536)]
    few = budget.solve(target(16), Topology(), limits, max_pages=7)
    many = budget.solve(target(16), Topology(), limits, max_pages=700)
    assert (few.groups[0].pages, few.binding_limit) == (7, "max_pages")
    assert (many.groups[0].pages, many.binding_limit) == (100, "memory")


def test_padding_is_a_claim_of_its_own():
    (group,) = group_layers(layers(2, heads=3, dim=4, dtype="bfloat16"), 8)
    solved = budget.solve(
        (group,), Topology(), [budget.limit("memory", 1 << 20)], order="head_major"
    )
    assert group.record_nbytes == 2 * 2 * 3 * 8
    assert [(t.name, t.bytes_per_token) for t in solved.terms] == [
        ("target kv", 96),
        ("target padding", 96),
    ]
    pages = solved.groups[0].pages
    assert sum(t.at(pages * 8) for t in solved.terms) == solved.used_nbytes


def test_replicated_heads_are_paid_for_on_every_rank():
    (group,) = group_layers(layers(30, heads=3, dim=64, dtype="float32"), 16)
    one = budget.solve((group,), Topology(1), [budget.limit("memory", GIB)])
    nine = budget.solve((group,), Topology(9), [budget.limit("memory", GIB)])
    assert one.groups[0].page_nbytes == 3 * nine.groups[0].page_nbytes
    assert nine.terms[0].replicas == 3


def test_a_budget_below_one_page_says_how_much_a_page_takes():
    with pytest.raises(errors.OutOfPages, match="takes 1,048,576 B on a rank"):
        budget.solve(target(16), Topology(), [budget.limit("memory", 1_000_000)])


def test_a_device_without_room_after_its_weights_is_refused():
    left = budget.device_limit("device_memory", 80 * GIB, 16 * GIB, 2 * GIB)
    assert left.nbytes == 62 * GIB
    with pytest.raises(errors.OutOfPages, match="leaves -1,073,741,824 B"):
        budget.device_limit("device_memory", 16 * GIB, 16 * GIB, GIB)


def test_a_draft_group_in_the_target_role_is_refused():
    with pytest.raises(errors.ConfigError, match="at least one target group"):
        budget.solve((draft(),), Topology(), [budget.limit("memory", GIB)])
    with pytest.raises(errors.ConfigError, match="draft pages follow the target's"):
        budget.solve(
            target(16), Topology(), [budget.limit("memory", GIB)], draft=draft(8)
        )
    with pytest.raises(errors.ConfigError, match="lies in"):
        budget.fraction_limit("fraction", GIB, 1.5)


@pytest.mark.case("BUD-04")
def test_a_host_tier_is_one_for_all_ranks_and_fits_beside_their_pools():
    topology = Topology(tp=4)
    solved = budget.solve(target(16), topology, [budget.limit("memory", GIB)])
    pools = 4 * solved.used_nbytes
    term = budget.host_term(50 * GIB + 1, topology, solved)
    assert term.fixed_bytes == 13_421_772_801  # rounded up: no claim is lost
    fits = budget.host_term(3 * GIB, topology, solved, pools + 3 * GIB)
    assert fits.fixed_bytes == 3 * GIB // 4
    with pytest.raises(errors.IncompatiblePlan, match=f"at most {3 * GIB - 1:,} B"):
        budget.host_term(3 * GIB, topology, solved, pools + 3 * GIB - 1)
