"""kvmem's own rules: each row refuses a plan, and here is what it keeps from happening.

The names of these tests stand in the rows.
"""

import ast
import dataclasses

import numpy as np
import pytest

from kvmem import budget, errors
from kvmem import pool as kvpool
from kvmem.geometry import LayerSpec, Lifecycle, Spread, Topology, group_layers, kinds
from kvmem.speculative import (
    HOMES,
    RULES,
    SpecPlan,
    capacity,
    check,
    draft_pool,
    draft_term,
    require,
    rules_kvmem,
    verdicts,
)

ALGORITHMS = rules_kvmem.ALGORITHMS
KINDS = ("dense", "window", "state", "window_state", "compressed")


def gates(plan):
    return [each.gate for each in check(plan)]


def draft(page_size=4):
    layer = LayerSpec("d", 0, kv_heads=2, head_dim=8, dtype="bfloat16")
    return group_layers([layer], page_size, domain="draft")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool_kind", ["unified", "split"])
def test_a_linear_chain_runs_on_any_pool_for_any_model(algorithm, kind, pool_kind):
    for topk in (None, 1):
        plan = SpecPlan(algorithm, topk, pool_kind=pool_kind, model_kind=kind, dcp=2)
        shared = HOMES[algorithm] == "shared" and pool_kind == "split"
        assert gates(plan) == ["layers in the target's pool"] * shared
        refused = [each for each in verdicts(plan) if each.said == "refused"]
        assert len(refused) == shared


def test_layers_in_the_targets_pool_have_no_pool_of_their_own():
    """Pages of two sizes are two pools, and an engine builds one."""
    assert set(rules_kvmem.SHARED) == {a for a in HOMES if HOMES[a] == "shared"}
    (broken,) = check(SpecPlan("mtp", pool_kind="split"))
    assert '"dspark"' in str(broken)
    assert check(SpecPlan("dspark", pool_kind="split")) == ()
    target = group_layers(
        [
            LayerSpec(f"l.{i}", i, kv_heads=2, head_dim=8, dtype="bfloat16")
            for i in (0, 1)
        ],
        4,
    )
    limits = [budget.limit("memory", 1 << 16)]
    solved = budget.solve((*target, *draft()), Topology(), limits, kind="split")
    assert len(solved.pools) == 2
    with pytest.raises(errors.IncompatiblePlan, match="pages of one size"):
        kvpool.from_budget(solved, Topology())


@pytest.mark.parametrize("topk", [2, 4, 8])
def test_trees_run_on_split_pools_of_full_attention(topk):
    assert check(SpecPlan("frozen_kv", topk, pool_kind="split")) == ()


def test_an_algorithm_of_another_stack_has_no_draft_term_here():
    assert gates(SpecPlan("eagle")) == ["known algorithm"]
    assert "mtp" in str(check(SpecPlan("mtp3"))[0])
    with pytest.raises(errors.ConfigError, match="draft term of 'eagle'"):
        draft_term(SpecPlan("eagle"), draft(), Topology())
    assert set(HOMES) == set(ALGORITHMS)


def test_without_an_algorithm_nothing_is_drafted():
    assert check(SpecPlan()) == ()
    for facts in ({"topk": 1}, {"steps": 3}, {"draft_tokens": 3}):
        plan = SpecPlan(None, **facts)
        assert plan.num_drafted == 0  # so the width would be ignored
        assert gates(plan) == ["widths without a draft"]


def test_a_unified_pool_moves_pages_and_no_rows():
    """Compaction takes a page elsewhere; what stood in its slot 3 still does."""
    plan = SpecPlan("frozen_kv", 4, pool_kind="unified")
    assert gates(plan) == ["chain on a unified pool"]
    assert "linear draft chain only" in str(check(plan)[0])

    pool = kvpool.init(4, 16, 1, num_vpages=(4,))
    pool, _, _ = kvpool.handout(pool, 0, [2], 2)
    rows = np.arange(64, dtype=np.uint8).reshape(1, 4, 16) + 1
    pool = dataclasses.replace(pool, pages=pool.pages + rows)
    before = int(kvpool.translate(pool, 0, [1])[0])
    pool, _ = kvpool.release(pool, 0, [0])
    pool, moved = kvpool.compact(pool)
    after = int(kvpool.translate(pool, 0, [1])[0])
    assert int(moved) == 1 and after != before
    np.testing.assert_array_equal(np.asarray(pool.pages)[0, after], rows[0, before])


@pytest.mark.parametrize(
    "algorithm", [name for name in ALGORITHMS if HOMES[name] != "nothing"]
)
def test_a_draft_with_pages_has_one_row_a_position(algorithm):
    """Two branches of one position would want one row of the draft."""
    plan = SpecPlan(algorithm, 2, pool_kind="split")
    shared = ["layers in the target's pool"] * (HOMES[algorithm] == "shared")
    assert gates(plan) == [*shared, "trees by algorithm"]
    if HOMES[algorithm] != "shared":
        chain = dataclasses.replace(plan, topk=None)
        pool = draft_pool(chain, draft(), num_vpages=3, topology=Topology())
        assert pool.pages * 4 == 12  # of 12 positions, whatever topk


@pytest.mark.case("SPC-06")
def test_a_state_and_a_window_know_one_branch():
    for kind in ("state", "window", "window_state"):
        plan = SpecPlan("frozen_kv", 2, pool_kind="split", model_kind=kind)
        assert gates(plan) == ["trees over full attention"]
    # A window lets go of a page by position: rows of a second branch, written behind
    # the first, push pages out that the accepted one still reads.
    window = Lifecycle("window", 8)
    accepted, all_rows = 12, 12 + 2 * 4
    assert len(window.stale(all_rows, 4)) > len(window.stale(accepted, 4))
    # And a state is one record, whatever the number of tokens.
    net = kinds.kda("s", 0, heads=2, head_dim=8, conv_kernel=4)
    (group,) = group_layers([net], 4)
    assert group.pages_for(accepted) == group.pages_for(all_rows) == 1


def test_an_accepted_row_would_cross_ranks():
    plan = SpecPlan("frozen_kv", 2, pool_kind="split", dcp=2)
    assert gates(plan) == ["trees on one token shard"]
    spread = Spread(dcp=2)
    written, accepted = 13, 10  # the first row of the second branch, and its place
    assert spread.owner(written) != spread.owner(accepted)
    assert Spread().owner(written) == Spread().owner(accepted)


def test_a_chain_proposes_one_token_a_step():
    for algorithm in ("mtp", "two_engine", "dspark", "frozen_kv"):
        plan = SpecPlan(algorithm, steps=3, draft_tokens=4)
        assert gates(plan) == ["length of a chain"]
        assert check(SpecPlan(algorithm, steps=4, draft_tokens=4)) == ()
        assert SpecPlan(algorithm, steps=3).num_drafted == 3


def test_one_pass_proposes_all_tokens():
    for algorithm in ("ngram", "dflash"):
        assert gates(SpecPlan(algorithm, steps=2)) == ["one pass"]
        plan = SpecPlan(algorithm, steps=1, draft_tokens=6)
        assert check(plan) == () and plan.num_drafted == 6
        assert SpecPlan(algorithm, draft_tokens=6).num_verified == 7


def test_a_tree_is_chains_of_one_length():
    tree = SpecPlan("frozen_kv", 3, steps=2, pool_kind="split")
    assert tree.num_drafted == 6
    for tokens, refused in ((6, False), (5, True), (3, True), (7, True)):
        plan = dataclasses.replace(tree, draft_tokens=tokens)
        assert gates(plan) == (["size of a tree"] if refused else [])
    uneven = SpecPlan("frozen_kv", 3, draft_tokens=8, pool_kind="split")
    assert gates(uneven) == ["size of a tree"]
    assert "it is 6" in str(check(dataclasses.replace(tree, draft_tokens=5))[0])
    assert "it is 12" in str(check(uneven)[0])  # four steps, where none are named
    left_out = dataclasses.replace(uneven, draft_tokens=None)
    assert left_out.num_drafted == 12
    assert check(dataclasses.replace(uneven, draft_tokens=6)) == ()  # of two each


def test_a_draft_longer_than_every_text_never_runs():
    plan = SpecPlan("ngram", draft_tokens=16, max_length=16)
    assert gates(plan) == ["room for a draft"]
    shorter = dataclasses.replace(plan, draft_tokens=14)
    assert check(shorter) == ()
    for each in (plan, shorter):  # never the planned sixteen
        found = capacity.proposable(each.num_drafted, 1, longest=each.max_length)
        assert found == 14


def test_facts_that_are_not_read_are_named(plan_of):
    plan = plan_of(algorithm="mtp", draft="triton", pp=2)
    (broken,) = check(plan)
    assert broken.gate == "facts that are not read"
    assert "backends.draft, server.pp" in str(broken)
    assert "server.pp" not in str(check(plan_of(algorithm="mtp", dp=2))[0])


def test_all_violations_come_back_together(plan_of):
    plan = plan_of(
        algorithm="mtp", topk=2, steps=3, draft_tokens=7, model_kind="state", pp=2
    )
    found = check(plan)
    assert [each.gate for each in found] == [
        "chain on a unified pool",
        "trees by algorithm",
        "trees over full attention",
        "size of a tree",
        "facts that are not read",
    ]
    with pytest.raises(errors.IncompatiblePlan) as refused:
        require(plan)
    for each in found:
        assert str(each) in str(refused.value)
        assert "(rules of kvmem)" in str(each)


def test_every_row_names_a_test_that_is_there(repo_root):
    for gate in RULES["kvmem"]:
        path, _, name = gate.test.partition("::")
        tree = ast.parse((repo_root / path).read_text())
        functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        assert name in functions, gate.name


def test_each_row_says_something_that_no_other_one_does():
    """Without any row some plan would pass that its test refuses."""
    names = [gate.name for gate in RULES["kvmem"]]
    assert len(set(names)) == len(names)
    assert len({gate.test for gate in RULES["kvmem"]}) == len(names)
