"""A memory divided between target and draft: every part counted once."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem import budget, errors
from kvmem.geometry import LayerSpec, Term, Topology, group_layers

GIB = 1 << 30


def owners(slope_total, slope_target, fixed_total=0, fixed_target=0):
    """Return the terms of a target and a draft; fixed costs in GiB."""
    draft = fixed_total - fixed_target
    return (
        Term("target", "target", slope_target, fixed_target * GIB),
        Term("draft", "draft", slope_total - slope_target, draft * GIB),
    )


@pytest.mark.parametrize(
    ("whole", "tier", "costs", "target", "draft"),
    [
        (10, "device", (100, 80), 8, 2),
        (20, "host", (100, 80), 16, 4),
        (10, "device", (100, 80, 5, 0), 4, 6),
        (10, "host", (100, 80, 50, 0), 8, 2),
        (10, "device", (100, 100), 10, 0),
    ],
)
def test_fixed_costs_first_and_the_rest_by_slope(whole, tier, costs, target, draft):
    parts = budget.split_affine(whole * GIB, *owners(*costs), tier=tier)
    assert parts == (target * GIB, draft * GIB)


def test_fixed_costs_beyond_the_whole_are_refused():
    with pytest.raises(errors.OutOfPages, match="device budget for target and draft"):
        budget.split_affine(GIB, *owners(100, 80, 2, 0))
    assert budget.split_affine(2 * GIB, *owners(100, 80, 2, 0)) == (0, 2 * GIB)


@pytest.mark.parametrize("slope", [500, 700, 750, 900, 950])
@pytest.mark.parametrize("whole", [15 * GIB, 30 * GIB, 10 * GIB + 1, 7])
def test_parts_add_up_to_the_whole_and_no_term_is_changed(whole, slope):
    target, draft = owners(1_000, slope)
    kept = dataclasses.replace(target), dataclasses.replace(draft)
    for tier in ("device", "host", "device"):  # neither tier sees the other
        parts = budget.split_affine(whole, target, draft, tier=tier)
        assert sum(parts) == whole
        assert parts[1] == whole * (1_000 - slope) // 1_000
    assert (target, draft) == kept


def test_without_any_cost_only_the_draft_is_bounded():
    free = Term("draft", "draft", 0)
    with pytest.raises(errors.ConfigError, match="token_bound"):
        budget.split_affine(GIB, Term("target", "target", 0), free)
    assert budget.token_bound(GIB, free) is None
    assert budget.token_bound(GIB, Term("draft", "draft", 3, GIB - 10)) == 3
    assert budget.token_bound(5, Term("draft", "draft", 3, 10)) == 0


@given(
    whole=st.integers(0, 1 << 45),
    slopes=st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)),
    fixed=st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)),
)
def test_each_owner_can_hold_the_tokens_that_the_whole_holds(whole, slopes, fixed):
    terms = [
        Term(name, name, slope, owed)
        for name, slope, owed in zip(("target", "draft"), slopes, fixed, strict=True)
    ]
    if not sum(slopes) or whole < sum(fixed):
        return
    parts = budget.split_affine(whole, *terms)
    assert sum(parts) == whole
    tokens = (whole - sum(fixed)) // sum(slopes)
    for part, term in zip(parts, terms, strict=True):
        assert part >= term.fixed_bytes
        # rounding may take one byte of the draft's last token
        assert part + 1 >= term.at(tokens)


@pytest.fixture(scope="module")
def layers():
    def make(count, heads=8, start=0, window=None):
        row = dict(kv_heads=heads, head_dim=64, dtype="bfloat16", window=window)
        return [LayerSpec(f"l{i}", i, **row) for i in range(start, start + count)]

    return make


@pytest.mark.parametrize("dcp", [1, 2])
@pytest.mark.parametrize("workspace", [0, 5 << 20])
def test_what_target_and_draft_may_take_is_what_their_pools_do(layers, dcp, workspace):
    topology, whole, size = Topology(1, dcp), 64 << 20, 16
    groups = group_layers([*layers(4), *layers(3, start=4, window=64)], size)
    draft = group_layers(layers(2), size, domain="draft")
    solved = budget.solve(
        groups,
        topology,
        [budget.limit("memory", whole)],
        draft=draft,
        kind="split",
        sequences=4,
        max_length=512,
        fixed=[Term("verify workspace", "engine", 0, workspace)] if workspace else [],
    )
    target, behind = budget.division(solved)
    assert (target.owner, behind.owner) == ("target", "draft")
    assert target.nbytes + behind.nbytes == whole - workspace
    pools = sum(pool.nbytes for pool in solved.pools)
    drafts = solved.draft_pages * solved.draft_page_nbytes
    # what is taken is whole pages; the next row of them would not fit
    for part, taken in ((target, pools), (behind, drafts)):
        assert part.nbytes - solved.step_nbytes < taken <= part.nbytes + 1
    lead = solved.groups[0]
    rows = lead.pages * lead.page_size
    assert all(rows <= part.rows + 1 <= rows + size + 1 for part in (target, behind))


def test_a_plan_without_a_draft_is_not_divided(layers):
    groups = group_layers(layers(2), 16)
    solved = budget.solve(groups, Topology(), [budget.limit("memory", GIB)])
    assert budget.division(solved) == ()
