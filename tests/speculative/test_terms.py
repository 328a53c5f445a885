"""Draft terms: the published figures, and that what is priced is what is built."""

import dataclasses
from fractions import Fraction

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem import budget, errors
from kvmem import pool as kvpool
from kvmem.geometry import LayerSpec, Topology, group_layers
from kvmem.speculative import (
    SpecPlan,
    capacity,
    draft_pool,
    draft_term,
    place,
    sglang,
)

GIB = 1 << 30
MIB = 1 << 20


def layers(count, heads, dim=128, **more):
    return [
        LayerSpec(f"l.{i}", i, kv_heads=heads, head_dim=dim, dtype="bfloat16", **more)
        for i in range(count)
    ]


def draft(heads=4, count=5, page_size=1, **more):
    return group_layers(layers(count, heads, **more), page_size, domain="draft")


def target(page_size=1, heads=4, count=32):
    return group_layers(layers(count, heads), page_size)


def solved(plan, draft_groups, topology):
    placed = place(plan, target(), draft_groups)
    limits = [budget.limit("memory", 10 * GIB)]
    return budget.solve(placed.joint, topology, limits, draft=placed.followers)


@pytest.mark.parametrize(
    ("heads", "nbytes", "error"),
    [(4, 10_240, 0.0), (8, 20_480, 11.9), (2, 5_120, -7.2)],
)
def test_a_draft_is_priced_by_its_own_geometry(heads, nbytes, error):
    """SGLang #34234: a draft of other heads than the target's, by layers, is wrong."""
    term = draft_term(SpecPlan("dflash"), draft(heads), Topology())
    assert term.bytes_per_token == nbytes
    assert term.bytes_per_token == sglang.draft_cell(heads, 128, 5)
    by_layers = sglang.layer_ratio_cell(65_536, layers=32, draft_layers=5)
    exact = 65_536 + nbytes
    off = {0.0: 0.0, 11.9: -11.9, -7.2: 7.2}[error]
    assert round(100 * (by_layers / exact - 1), 1) == off


@pytest.mark.parametrize("algorithm", ["dflash", "dspark", "two_engine", "mtp"])
@pytest.mark.parametrize(
    ("dcp", "nbytes", "rows"),
    [(1, 10_240, 141_699), (2, 20_480, 124_830), (4, 40_960, 100_824)]
    + [(8, 81_920, 72_817)],
)
def test_the_term_grows_with_token_shards_and_the_targets_does_not(
    algorithm, dcp, nbytes, rows
):
    plan, topology = SpecPlan(algorithm, dcp=dcp), Topology(dcp=dcp)
    term = draft_term(plan, draft(), topology)
    assert term.bytes_per_token == nbytes == dcp * 10_240
    assert term.replicas == dcp
    if algorithm != "mtp":  # in pools of its own, without the target's page size
        found = solved(plan, draft(), topology)
        assert found.groups[0].pages == rows
        assert sum(t.bytes_per_token for t in found.terms) == 65_536 + nbytes
        pool = draft_pool(plan, draft(), rows, topology)
        assert (pool.pages, pool.nbytes) == (rows * dcp, nbytes * rows)
        assert found.draft_pages == pool.pages
        assert found.draft_page_nbytes == pool.page_nbytes
        assert found.used_nbytes == 65_536 * rows + pool.nbytes <= 10 * GIB


def test_without_the_factor_twice_the_memory_would_be_allotted():
    """SGLang #33912, at DCP 8: rows of one copy, of which eight are built."""
    plan = SpecPlan("dspark", dcp=8)
    wrong = 10 * GIB // (65_536 + 10_240)
    pool = draft_pool(plan, draft(), wrong, Topology(dcp=8))
    assert wrong == 141_699
    assert round((65_536 * wrong + pool.nbytes) / GIB, 2) == 19.46


def test_a_draft_that_ran_out_of_memory_is_built_as_it_is_priced():
    """tp 8 with dcp 4 inside, 8 heads, 6 layers, 493,312 rows: one head a rank there.

    kvmem counts token shards beside head shards: the eight ranks are (2, 4), so a rank
    has four of the eight heads, as each rank of the four shards does.
    """
    topology = Topology.nested(8, 4)
    (group,) = draft(heads=8, count=6, page_size=64)
    plan = SpecPlan("dflash", tp=topology.tp, dcp=topology.dcp, page_size=64)
    term = draft_term(plan, (group,), topology)
    pages = 493_312 // 64
    pool = draft_pool(plan, (group,), pages, topology)
    assert term.at(493_312) == pool.nbytes
    assert term.bytes_per_token == sglang.draft_cell(4, 128, 6, dcp=4)
    # Over all eight ranks, as in the report: an eighth of the heads.
    eighth = dataclasses.replace(plan, tp=8)
    alone = draft_term(eighth, (group,), Topology(8, 4))
    assert alone.bytes_per_token == 4 * 3_072
    assert alone.at(493_312 + 64) == 6_062_604_288


def test_frozen_and_ngram_drafts_own_nothing_and_pay_nothing():
    for algorithm in ("frozen_kv", "ngram"):
        plan = SpecPlan(algorithm)
        assert draft_term(plan, (), Topology()) is None
        assert draft_pool(plan, (), 100, Topology()) is None
        found = solved(plan, (), Topology())
        assert [term.owner for term in found.terms] == ["target"]
        assert (
            found.groups[0].pages == solved(SpecPlan(), (), Topology()).groups[0].pages
        )
        with pytest.raises(errors.ConfigError, match="1 draft groups.*keeps nothing"):
            draft_term(plan, draft(), Topology())


@pytest.mark.parametrize("algorithm", ["mtp", "dflash", "dspark", "two_engine"])
def test_a_draft_with_rows_is_not_planned_without_its_groups(algorithm):
    with pytest.raises(errors.ConfigError, match="no draft group.*rows of its own"):
        draft_term(SpecPlan(algorithm), (), Topology())
    with pytest.raises(errors.ConfigError, match="no draft group"):
        place(SpecPlan(algorithm), target(), ())


def test_one_engine_shares_the_pools_and_the_others_have_their_own():
    groups, drafts = target(4), draft(page_size=4)
    joint = place(SpecPlan("mtp"), groups, drafts)
    assert joint == ((*groups, *drafts), ())
    assert draft_pool(SpecPlan("mtp"), drafts, 8, Topology()) is None
    for algorithm in ("two_engine", "dflash", "dspark", None):
        assert place(SpecPlan(algorithm), groups, drafts) == (groups, drafts)


@pytest.mark.parametrize("kind", ["unified", "split"])
@pytest.mark.parametrize("dcp", [1, 2])
def test_a_shared_pool_pays_the_term_and_the_rest_of_the_page(kind, dcp):
    plan, topology = SpecPlan("mtp", dcp=dcp), Topology(dcp=dcp)
    groups, drafts = target(16), draft(page_size=16)
    placed = place(plan, groups, drafts)
    limits = [budget.limit("memory", GIB)]
    found = budget.solve(placed.joint, topology, limits, kind=kind)
    term = draft_term(plan, drafts, topology)
    named = {each.name: each.bytes_per_token for each in found.terms}
    assert named["draft kv"] == term.bytes_per_token == dcp * 10_240
    padding = 0 if kind == "split" else dcp * (65_536 - 10_240)
    assert named.get("draft padding", 0) == padding


@pytest.mark.case("SPC-04")
@pytest.mark.parametrize("dcp", [1, 2, 8])
def test_the_highest_virtual_id_can_be_written_by_the_draft(dcp):
    """A pool that is read by ids has a row for each id, and not for each token asked.

    The last position's row is written in an array of the priced size, and one row
    further is dropped.
    """
    topology = Topology(dcp=dcp)
    plan = SpecPlan("dspark", dcp=dcp)
    drafts = draft(heads=1, count=1, page_size=4, dim=8)
    pool = draft_pool(plan, drafts, 5, topology)
    rows = jax.numpy.zeros(pool.pages * 4, jax.numpy.uint8)
    highest = 5 * 4 * dcp - 1
    written = rows.at[highest].set(7, mode="drop")
    assert int(written[highest]) == 7
    assert not rows.at[highest + 1].set(7, mode="drop").any()


@pytest.mark.parametrize("algorithm", ["dflash", "dspark", "two_engine"])
@pytest.mark.parametrize("topology", [Topology(), Topology(2, 2), Topology(1, 4)])
def test_the_builder_takes_the_bytes_that_the_budget_priced(algorithm, topology):
    plan = SpecPlan(algorithm, tp=topology.tp, dcp=topology.dcp)
    drafts = draft(heads=2, count=2, page_size=8, dim=16)
    placed = place(plan, target(8, heads=2, count=2), drafts)
    limits = [budget.limit("memory", 2 * MIB)]
    found = budget.solve(placed.joint, topology, limits, draft=placed.followers)
    size = draft_pool(plan, drafts, found.pools[0].num_vpages[0], topology)
    made = kvpool.init(size.pages, size.page_nbytes, topology.ranks)
    assert made.pages.shape == (topology.ranks, found.draft_pages, size.page_nbytes)
    target_pool = kvpool.from_budget(found, topology)
    taken = (made.pages.nbytes + target_pool.pages.nbytes) // topology.ranks
    assert taken == found.used_nbytes <= 2 * MIB


@pytest.mark.case("BUD-02")
def test_two_managers_of_one_budget_have_equally_many_pages():
    groups = group_layers(layers(16, 1, dim=1_024), 32)
    drafts = group_layers(layers(4, 1, dim=1_024), 32, domain="draft")
    plan = SpecPlan("two_engine", page_size=32)
    placed = place(plan, groups, drafts)
    limits = [budget.limit("memory", 8 * GIB)]
    found = budget.solve(placed.joint, Topology(), limits, draft=placed.followers)
    pool = draft_pool(plan, drafts, found.groups[0].pages, Topology())
    assert found.groups[0].pages == pool.pages == 3_276
    assert found.groups[0].tokens == 104_832
    assert found.pools[0].nbytes + pool.nbytes == 8_587_837_440


@pytest.mark.case("BUD-10")
def test_a_workspace_that_does_not_fit_is_refused_before_anything_is_built():
    plan = SpecPlan("ngram", draft_tokens=8, max_batch=32)
    term = capacity.workspace_term(plan, row_nbytes=2 * MIB)
    asked = [
        budget.Claim("pools", "target", 600 * MIB, "fewer pages"),
        budget.Claim(term.name, term.owner, term.fixed_bytes, "fewer sequences"),
    ]
    with pytest.raises(errors.IncompatiblePlan, match="can shrink: fewer sequences"):
        budget.require_room("device memory", 1_024 * MIB, asked)
    limits = [budget.limit("device_memory", 1_024 * MIB)]
    found = budget.solve(target(16), Topology(), limits, fixed=[term])
    assert found.used_nbytes <= 1_024 * MIB
    assert found.fixed_nbytes == 576 * MIB
    with pytest.raises(errors.OutOfPages, match="603,979,776 B owed"):
        budget.solve(
            target(16), Topology(), [budget.limit("m", 500 * MIB)], fixed=[term]
        )


@settings(max_examples=60)
@given(
    algorithm=st.sampled_from(["dflash", "dspark", "two_engine"]),
    heads=st.sampled_from([1, 2, 4, 8]),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    count=st.integers(1, 4),
    tp=st.sampled_from([1, 2, 4, 8]),
    dcp=st.sampled_from([1, 2, 3, 4]),
    page_size=st.sampled_from([1, 3, 4, 16]),
    order=st.sampled_from(["head_major", "token_major", "slot_major"]),
    window=st.sampled_from([None, 8]),
)
def test_the_term_the_pool_and_the_budget_agree(
    algorithm, heads, dims, count, tp, dcp, page_size, order, window
):
    topology = Topology(tp, dcp)
    plan = SpecPlan(algorithm, tp=tp, dcp=dcp, page_size=page_size)
    head_dim, v_head_dim = dims
    shape = {"v_head_dim": v_head_dim, "window": window}
    drafts = draft(heads, count, page_size, dim=head_dim, **shape)
    groups = target(page_size, heads=8, count=2)
    limits = [budget.limit("memory", MIB)]
    found = budget.solve(groups, topology, limits, order=order, draft=drafts)
    term = draft_term(plan, drafts, topology, order)
    pages = found.pools[0].pages
    pool = draft_pool(plan, drafts, pages, topology, order)
    assert term.at(pages * page_size) == pool.nbytes
    assert (found.draft_pages, found.draft_page_nbytes) == pool
    own = [each for each in found.terms if each.owner == "draft"]
    assert sum(Fraction(each.bytes_per_token) for each in own) == term.bytes_per_token
    # Monotone in token shards, and the target pays the same whatever the draft.
    wider = draft_term(plan, drafts, Topology(tp, dcp + 1), order)
    assert wider.bytes_per_token * dcp == term.bytes_per_token * (dcp + 1)
    alone = budget.solve(groups, topology, limits, order=order)
    assert [t for t in found.terms if t.owner == "target"] == list(alone.terms)
