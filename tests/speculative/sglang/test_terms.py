"""Published figures of what SGLang charges and builds for drafts, where it errs too."""

import pytest

from kvmem import errors
from kvmem.speculative import SpecPlan, sglang

GIB = 1 << 30
TARGET = 65_536  # 32 layers of 4 heads of 128, two bytes an element


@pytest.mark.parametrize(
    ("heads", "draft", "total", "error"),
    [(4, 10_240, 75_776, 0.0), (8, 20_480, 86_016, -11.9), (2, 5_120, 70_656, 7.2)],
)
def test_a_draft_of_another_shape_is_priced_wrong_by_layers(heads, draft, total, error):
    assert sglang.draft_cell(heads, 128, 5) == draft
    exact = TARGET + draft
    by_layers = sglang.layer_ratio_cell(TARGET, layers=32, draft_layers=5)
    assert (exact, by_layers) == (total, 75_776)
    assert round(100 * (by_layers / exact - 1), 1) == error


@pytest.mark.parametrize(
    ("dcp", "draft", "rows"),
    [(1, 10_240, 141_699), (2, 20_480, 124_830), (4, 40_960, 100_824)]
    + [(8, 81_920, 72_817)],
)
def test_the_draft_term_grows_with_dcp(dcp, draft, rows):
    assert sglang.draft_cell(4, 128, 5, dcp=dcp) == draft == dcp * 10_240
    assert 10 * GIB // (TARGET + draft) == rows


def test_without_the_factor_twice_the_memory_would_be_allotted():
    rows = 10 * GIB // (TARGET + sglang.draft_cell(4, 128, 5))
    needed = rows * (TARGET + sglang.draft_cell(4, 128, 5, dcp=8))
    assert round(needed / GIB, 2) == 19.46


@pytest.mark.parametrize(
    ("dcp", "cell"), [(1, 1_033), (2, 1_066), (4, 1_133), (8, 1_266)]
)
def test_the_layer_ratio_with_dcp(dcp, cell):
    assert sglang.layer_ratio_cell(1_000, layers=60, draft_layers=2, dcp=dcp) == cell
    assert (
        sglang.layer_ratio_cell(1_000, layers=60, draft_layers=None, dcp=dcp) == 1_000
    )


@pytest.mark.parametrize("dcp", [2, 4, 8, 16])
def test_rows_are_scaled_once(dcp):
    assert sglang.replicated_rows(10**6, 1) == 10**6
    assert sglang.replicated_rows(10**6, dcp) == dcp * 10**6
    assert sglang.replicated_rows(dcp * 10**6, dcp, scaled_by=dcp) == dcp * 10**6
    with pytest.raises(errors.ConfigError, match="scaled by 3 with DCP"):
        sglang.replicated_rows(10**6, dcp, scaled_by=3)


def test_rows_that_were_not_scaled_by_that_are_refused():
    with pytest.raises(errors.ConfigError, match="scaled by 4 with DCP 8"):
        sglang.replicated_rows(10**6, 8, scaled_by=4)
    with pytest.raises(errors.ConfigError, match="7 rows scaled by 4"):
        sglang.replicated_rows(7, 4, scaled_by=4)


@pytest.mark.parametrize(("tp", "dcp"), [(8, 4), (8, 2), (2, 2), (1, 1)])
@pytest.mark.parametrize("heads", [1, 8, 16])
def test_a_draft_pool_divides_its_heads_by_all_ranks(tp, dcp, heads):
    shape = sglang.draft_pool_shape(256, 64, heads=heads, head_dim=128, tp=tp, dcp=dcp)
    assert shape == (320 * dcp, max(1, heads // tp), 128)


def test_a_draft_pool_that_ran_out_of_memory():
    shape = sglang.draft_pool_shape(493_312, 64, heads=8, head_dim=128, tp=8, dcp=4)
    assert shape == (1_973_504, 1, 128)
    cell = sglang.draft_cell(1, 128, 6)
    total = 2 * 6 * 2 * shape[0] * shape[1] * shape[2]  # k and v, layers, two bytes
    assert (cell, total) == (3_072, 6_062_604_288)
    assert total == (493_312 + 64) * cell * 4
    whole = sglang.draft_pool_shape(493_312, 64, heads=8, head_dim=128, tp=1, dcp=4)
    tensor = 2 * whole[0] * whole[1] * whole[2]
    assert tensor == 4_041_736_192
    assert -(-tensor // (2 << 20)) * (2 << 20) == 4_043_309_056


@pytest.mark.parametrize(
    ("algorithm", "cell", "rows"),
    [
        ("eagle", 75_776, 1_000),
        ("eagle3", 75_776, 1_000),
        ("mtp", 75_776, 1_000),
        ("standalone", 75_776, 1_000),
        ("frozen_kv_mtp", 75_776, 64),  # charged like the others, and owns nothing
        ("dflash", TARGET + 4 * 20_480, 4_000),
        ("dspark", TARGET + 4 * 20_480, 4_000),
        ("ngram", TARGET, 0),
        (None, TARGET, 0),
    ],
)
def test_what_each_algorithm_is_charged_and_what_is_built(algorithm, cell, rows):
    plan = SpecPlan(algorithm, dcp=4)
    found = sglang.token_cell(
        plan, TARGET, layers=32, draft_layers=5, draft_nbytes=20_480
    )
    assert (found, sglang.draft_pool_rows(plan, 1_000)) == (cell, rows)


def test_a_block_draft_of_unknown_geometry_is_priced_by_layers_on_every_shard():
    plan = SpecPlan("dflash", dcp=4)
    found = sglang.token_cell(plan, TARGET, layers=32, draft_layers=5)
    assert found == TARGET + TARGET * 5 * 4 // 32


def test_compressed_rows_are_charged_one_layer_more():
    for algorithm, cell in ((None, 61_000), ("mtp", 62_000), ("ngram", 62_000)):
        plan = SpecPlan(algorithm, model_kind="compressed")
        found = sglang.token_cell(plan, 61_000, layers=61, draft_layers=1)
        assert found == cell


def test_heads_are_divided_by_the_ranks_that_attend():
    """SGLang #38202 divided by all of TP: an eighth of what eight replicas take."""
    ranks = sglang.attention_ranks(tp=8, dp=8)
    heads = sglang.local_heads(8, ranks)
    assert (ranks, heads) == (1, 8)
    assert sglang.draft_cell(heads, 64, 5) == 10_240
    assert sglang.draft_cell(sglang.local_heads(8, 8), 64, 5) == 1_280
    assert sglang.local_heads(8, 16) == 1  # one head on two ranks
    assert sglang.local_heads(8, 8, dcp=2) == 2  # a DCP group holds the same heads
