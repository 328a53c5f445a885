"""Budgets of several lifecycles: fixed costs first, windows bounded, states parted."""

import dataclasses

import pytest

from kvmem import budget, errors
from kvmem.geometry import LayerSpec, Term, Topology, group_layers

MIB = 1 << 20
GIB = 1 << 30


def rows(count, nbytes, **more):
    """Return `count` layers that keep `nbytes` of a token each."""
    dim = nbytes // 4  # a key and a value of two bytes an element
    return [
        LayerSpec(f"layers.{i}", i, kv_heads=1, head_dim=dim, dtype="bfloat16", **more)
        for i in range(count)
    ]


@pytest.mark.case("BUD-02")
def test_target_and_draft_together_claim_no_more_than_the_whole():
    target = group_layers(rows(16, 4_096), 32)
    (draft,) = group_layers(rows(4, 4_096), 32, domain="draft")
    limits = [budget.limit("memory", 8 * GIB)]
    solved = budget.solve(target, Topology(), limits, draft=draft)
    assert solved.groups[0].pages == solved.draft_pages == 3_276
    assert solved.groups[0].tokens == 104_832
    assert solved.used_nbytes == 8_587_837_440


@pytest.mark.case("BUD-03")
def test_a_fixed_cost_is_paid_before_the_first_page():
    target = group_layers(rows(10, 4_096), 16)
    window = Term("draft window", "draft", 0, fixed_bytes=3 * MIB)
    limits = [budget.limit("memory", 100 * MIB)]
    solved = budget.solve(target, Topology(), limits, fixed=[window])
    (group,) = solved.groups
    assert (group.pages, group.tokens) == (155, 2_480)
    assert solved.used_nbytes == 155 * 16 * 40_960 + 3 * MIB
    assert solved.terms[-1] == window
    with pytest.raises(
        errors.OutOfPages, match="target cannot get one page.*3,145,728"
    ):
        budget.solve(
            target, Topology(), [budget.limit("memory", 3 * MIB)], fixed=[window]
        )


@pytest.mark.case("BUD-06")
def test_layers_that_read_anothers_cache_cost_nothing():
    own = rows(20, 2_048)
    shared = [
        dataclasses.replace(own[0], name=f"layers.{i}", index=i, shares="layers.19")
        for i in range(20, 35)
    ]
    groups = group_layers([*own, *shared], 16)
    limits = [budget.limit("memory", GIB)]
    solved = budget.solve(groups, Topology(), limits)
    assert sum(term.bytes_per_token for term in solved.terms) == 40_960
    assert GIB // 40_960 == 26_214
    assert (solved.groups[0].pages, solved.groups[0].layers) == (1_638, 20)


@pytest.mark.case("BUD-07")
@pytest.mark.parametrize("kind", ["unified", "split"])
@pytest.mark.parametrize("nbytes", [2 * MIB, 5 * MIB, 40 * MIB, GIB])
def test_a_window_is_never_given_more_than_its_sequences_read(kind, nbytes):
    full, windowed = rows(4, 1_024), rows(6, 1_024, window=1_024)
    layers = [
        *full,
        *(
            dataclasses.replace(x, name=f"w{x.index}", index=9 + x.index)
            for x in windowed
        ),
    ]
    groups = group_layers(layers, 16)
    load = {"kind": kind, "sequences": 32, "max_length": 128}
    limits = [budget.limit("memory", nbytes)]
    solved = budget.solve(groups, Topology(), limits, **load)
    assert solved.groups[1].pages == min(solved.groups[0].pages, 32 * 8)
    plain = group_layers([dataclasses.replace(x, window=None) for x in layers], 16)
    alone = budget.solve(plain, Topology(), limits)
    if kind == "split":  # a unified page of six layers wastes a third of four
        assert solved.groups[0].tokens >= alone.groups[0].tokens
    never_ends = group_layers(layers, 16, max_length=128)
    assert [group.name for group in never_ends] == ["full"]
    assert budget.solve(never_ends, Topology(), limits) == alone


@pytest.mark.case("BUD-10")
def test_a_workspace_beside_the_pools_is_planned_or_refused():
    asked = [
        budget.Claim("pools", "target", 600 * MIB, "fewer pages"),
        budget.Claim("verify workspace", "draft", 32 * 9 * 2 * MIB, "fewer sequences"),
    ]
    with pytest.raises(errors.IncompatiblePlan) as refused:
        budget.require_room("device memory", 1_024 * MIB, asked)
    for part in (
        f"{600 * MIB:,} B of pools (target)",
        f"{576 * MIB:,} B of verify workspace (draft)",
        f"{1_176 * MIB:,} > {1_024 * MIB:,} B of device memory",
        "pools can shrink: fewer pages",
        "verify workspace can shrink: fewer sequences",
    ):
        assert part in str(refused.value), part
    assert budget.require_room("device memory", 1_176 * MIB, asked) == 0


@pytest.mark.case("CFG-05")
def test_the_rank_with_the_least_memory_decides_and_is_named():
    topology = Topology(tp=2)
    groups = group_layers(rows(2, 4_096), 16)
    groups = group_layers(
        [dataclasses.replace(x, kv_heads=2) for x in groups[0].layers], 16
    )
    limits = budget.uneven_limits("memory_by_rank", [24 * GIB, 3 * GIB], topology)
    solved = budget.solve(groups, topology, limits)
    assert (solved.limiting_rank, solved.pool_nbytes) == (1, 3 * GIB)
    assert solved.binding_limit == "memory_by_rank"
    capped = budget.solve(groups, topology, limits, max_pages=7)
    assert (capped.limiting_rank, capped.binding_limit) == (None, "max_pages")
    equal = budget.uneven_limits("memory_by_rank", [3 * GIB, 3 * GIB], topology)
    assert budget.solve(groups, topology, equal).limiting_rank is None
    with pytest.raises(errors.OutOfPages, match=r"rank 1"):
        small = budget.uneven_limits("memory_by_rank", [24 * GIB, 3], topology)
        budget.solve(groups, topology, small)
    with pytest.raises(errors.ConfigError, match="3 figures for 2 ranks"):
        budget.uneven_limits("memory_by_rank", [1, 2, 3], topology)


def test_a_state_lies_in_several_pages_of_the_one_pool(hybrid):
    limits = [budget.limit("memory", 400_000)]
    solved = budget.solve(hybrid(), Topology(), limits, sequences=3, snapshots=2)
    full, window, state = solved.groups
    (pool,) = solved.pools
    assert pool.page_nbytes == full.page_nbytes == 2 * 4 * 256
    assert (state.extents, state.pages, state.tokens) == (pool.extents[2], 5, 0)
    assert state.extents * pool.page_nbytes >= state.payload_nbytes > pool.page_nbytes
    assert pool.num_vpages == (pool.pages, pool.pages, pool.pages // state.extents)
    assert full.pages + window.pages + 5 * state.extents <= pool.pages
    assert full.pages + window.pages + 5 * state.extents + 2 > pool.pages
    assert pool.nbytes == solved.used_nbytes <= 400_000


def test_what_states_owe_is_said_when_no_page_is_left(hybrid):
    limits = [budget.limit("memory", 400_000)]
    with pytest.raises(errors.OutOfPages, match="owed before the first") as refused:
        budget.solve(hybrid(), Topology(), limits, sequences=100)
    least = int(
        str(refused.value).split("at least ")[1].split(" B")[0].replace(",", "")
    )
    enough = [budget.limit("memory", least)]
    solved = budget.solve(hybrid(), Topology(), enough, sequences=100)
    assert solved.groups[0].pages == 1
    with pytest.raises(errors.OutOfPages):
        less = [budget.limit("memory", least - 1)]
        budget.solve(hybrid(), Topology(), less, sequences=100)


def test_index_keys_have_as_many_pages_as_their_latents(hybrid):
    groups = hybrid(16, windows=0, states=0, indexers=True)
    limits = [budget.limit("memory", MIB)]
    split = budget.solve(groups, Topology(), limits, kind="split")
    assert [group.name for group in split.groups] == ["full", "indexer"]
    assert split.groups[0].pages == split.groups[1].pages
    assert [pool.num_vpages for pool in split.pools] == [(split.groups[0].pages,)] * 2
    unified = budget.solve(groups, Topology(), limits)
    (padding,) = unified.paddings
    assert padding.group == "indexer" and padding.share > 0.125
    least, most = padding.page_sizes
    assert 16 < least <= most
    for size, fits in ((least - 1, False), (least, True), (most, True)):
        indexer = dataclasses.replace(groups[1], page_size=size)
        sized = budget.solve((groups[0], indexer), Topology(), limits)
        wasted = [each.group for each in sized.paddings]
        assert ("indexer" not in wasted) == fits, size
        assert sized.pools[0].page_nbytes == unified.pools[0].page_nbytes
    assert split.paddings == ()


def test_a_state_that_wastes_its_pages_names_sizes_that_do_not(hybrid):
    groups = hybrid(4, windows=0, states=3)
    limits = [budget.limit("memory", 16 * MIB)]
    solved = budget.solve(groups, Topology(), limits, sequences=1)
    (padding,) = solved.paddings
    assert padding.group == "state" and padding.page_sizes
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        again = hybrid(size, windows=0, states=3)
        try:
            sized = budget.solve(again, Topology(), limits, sequences=1)
        except errors.IncompatiblePlan:
            assert size not in padding.page_sizes
            continue
        assert (sized.paddings == ()) == (size in padding.page_sizes), size


def test_groups_of_a_draft_may_share_the_pools_of_the_target(gqa):
    target, draft = gqa(16, full=4), gqa(16, full=2, domain="draft")
    for kind in ("unified", "split"):
        solved = budget.solve(
            (*target, *draft),
            Topology(dcp=2),
            [budget.limit("memory", 10 * MIB)],
            kind=kind,
        )
        pages, drafts = (group.pages for group in solved.groups)
        assert drafts == pages  # and every token of one on each of two ranks
        assert [group.extents for group in solved.groups] == [1, 2]
        assert [group.tokens for group in solved.groups] == [pages * 32] * 2
        assert (solved.draft_pages, len(solved.pools)) == (0, 1 + (kind == "split"))
        names = [term.name for term in solved.terms if "padding" not in term.name]
        assert names == ["target kv", "draft kv"]


def test_claims_of_a_plan_are_what_its_pages_take(hybrid):
    for kind in ("unified", "split"):
        limits = [budget.limit("memory", 3 * MIB)]
        load = {"sequences": 4, "max_length": 100}
        solved = budget.solve(hybrid(), Topology(), limits, kind=kind, **load)
        rows_ = solved.groups[0].pages * 4
        taken = sum(g.pages * g.extents * g.page_nbytes for g in solved.groups)
        assert sum(term.at(rows_) for term in solved.terms) == taken
        assert solved.groups[1].pages == 4 * 3  # a window of 8 straddles 3 pages of 4
        assert solved.groups[2].pages == 4


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({}, "states without the number of sequences"),
        ({"sequences": 0}, "sequences = 0"),
        ({"sequences": 1, "step": 0}, "step = 0"),
        ({"sequences": 1, "window_ratio": 1.5}, "window_ratio = 1.5"),
    ],
)
def test_counts_that_mean_nothing_are_refused(hybrid, change, phrase):
    with pytest.raises(errors.ConfigError, match=phrase):
        budget.solve(hybrid(), Topology(), [budget.limit("memory", MIB)], **change)


def test_groups_of_one_name_are_refused(gqa):
    with pytest.raises(errors.ConfigError, match="target full more than once"):
        budget.solve((*gqa(), *gqa()), Topology(), [budget.limit("memory", MIB)])


def test_pages_whose_offsets_would_wrap_are_refused(gqa):
    groups = gqa(1 << 15)  # 32,768 B a token
    limits = [budget.limit("memory", 1 << 40)]
    assert budget.solve(groups, Topology(), limits).pools[0].page_nbytes == 1 << 30
    with pytest.raises(errors.IncompatiblePlan, match="offset wraps at 2,147,483,648"):
        budget.solve(gqa(1 << 16), Topology(), limits)


def test_the_page_from_which_a_flat_address_wraps_is_known(gqa):
    limits = [budget.limit("memory", 4 * GIB)]
    (pool,) = budget.solve(gqa(16), Topology(), limits).pools
    assert pool.first_wrapping * pool.page_nbytes >= 1 << 31
    assert (pool.first_wrapping - 1) * pool.page_nbytes < 1 << 31
    small = [budget.limit("memory", 2 * GIB)]
    assert budget.solve(gqa(16), Topology(), small).pools[0].first_wrapping is None
    assert budget.solve(gqa(16), Topology(), small).largest_id == 4_095


def test_what_one_more_row_would_take_is_known(gqa):
    target, (draft,) = gqa(16, full=4), gqa(16, full=2, domain="draft")
    limits = [budget.limit("memory", MIB)]
    page, behind = 16 * 4 * 1_024, 16 * 2 * 1_024
    unified = budget.solve(target, Topology(dcp=2), limits, draft=draft)
    assert unified.step_nbytes == page + 2 * behind
    windowed = gqa(16, full=4, windows=2)
    split = budget.solve(windowed, Topology(), limits, kind="split", window_ratio=0.5)
    rows_ = [budget.limit("memory", split.used_nbytes + split.step_nbytes)]
    more = budget.solve(windowed, Topology(), rows_, kind="split", window_ratio=0.5)
    assert more.groups[0].pages == split.groups[0].pages + 1
    assert page < split.step_nbytes < split.used_nbytes


def test_a_claim_says_on_how_many_ranks_its_bytes_stand(hybrid, gqa):
    limits = [budget.limit("memory", 4 * MIB)]
    groups = (*hybrid(), *gqa(4, full=1, heads=4, domain="draft"))
    solved = budget.solve(groups, Topology(8, 3), limits, sequences=1)
    held = {t.name: t.replicas for t in solved.terms if "padding" not in t.name}
    assert held == {
        "target full kv": 2,  # four heads on eight ranks, a third of the tokens each
        "target window8 kv": 2 * 3,  # a window is read where the text is read
        "target state": 2 * 3,  # its four key heads twice, and on every token shard
        "draft kv": 2 * 3,
    }


def test_every_group_of_a_draft_follows_the_target_and_is_named(gqa, hybrid):
    drafts = [
        dataclasses.replace(group, domain="draft")
        for group in hybrid(4, full=1, windows=0, states=0, indexers=True)
    ]
    limits = [budget.limit("memory", MIB)]
    solved = budget.solve(gqa(4), Topology(dcp=2), limits, draft=drafts)
    latent, key = (128 + 16) * 2, 128 + 4
    assert [(t.name, t.bytes_per_token) for t in solved.terms] == [
        ("target kv", 32 * 1_024),
        ("draft full kv", 2 * latent),
        ("draft indexer kv", 2 * key),
    ]
    assert solved.draft_page_nbytes == 4 * (latent + key)
    assert solved.draft_pages == 2 * solved.groups[0].pages
    with pytest.raises(errors.ConfigError, match="a state follows none"):
        states = hybrid(4, full=0, windows=0, states=1)
        states = [dataclasses.replace(each, domain="draft") for each in states]
        budget.solve(gqa(4), Topology(), limits, draft=states)


def test_a_window_of_token_shards_reads_pages_of_all_of_them(gqa):
    groups = gqa(4, full=2, windows=2, window=32)
    limits = [budget.limit("memory", 4 * MIB)]
    load = {"sequences": 3, "max_length": 4_096, "step": 8}
    for dcp in (1, 2, 4):
        solved = budget.solve(groups, Topology(dcp=dcp), limits, **load)
        span = -(-(32 + 8 - 2) // (4 * dcp)) + 1  # pages that a moving window touches
        assert (solved.groups[1].pages, solved.groups[1].extents) == (3 * span, dcp)
    shared = gqa(4, full=1, windows=1, window=32, domain="draft")
    solved = budget.solve((*groups, *shared), Topology(dcp=4), limits, **load)
    assert [g.pages for g in solved.groups[1::2]] == [3 * 4] * 2


@pytest.mark.parametrize("kind", ["unified", "split"])
@pytest.mark.parametrize("ratio", [0.5, 1e-3, 1e-300])
@pytest.mark.parametrize("max_pages", [None, 2, 30])
def test_no_ratio_leaves_a_window_less_than_one_sequence_reads(
    gqa, kind, ratio, max_pages
):
    windowed = gqa(8, full=1, windows=5, window=32)
    limits = [budget.limit("memory", 8 * MIB)]
    more = dict(kind=kind, max_pages=max_pages, max_length=512, step=8)
    solved = budget.solve(
        windowed, Topology(), limits, window_ratio=ratio, sequences=4, **more
    )
    full, window = solved.groups
    (life,) = (g.lifecycle for g in windowed if g.lifecycle.kind == "window")
    assert window.pages >= min(full.pages, life.peak(512, 8, 8)) > 0
    for pool, pages in enumerate(solved.pools):
        counted = sum(g.pages * g.extents for g in solved.groups if g.pool == pool)
        assert counted <= pages.pages
    rows_ = full.pages * 8
    claimed = sum(t.bytes_per_token * rows_ + t.fixed_bytes for t in solved.terms)
    held = sum(g.pages * g.extents * g.page_nbytes for g in solved.groups)
    assert held <= claimed <= solved.pool_nbytes


def test_a_floor_that_does_not_fit_is_refused_with_numbers(gqa):
    windowed = gqa(8, full=1, windows=5, window=32)
    with pytest.raises(errors.OutOfPages, match="a cap of 1 pages.*takes"):
        limits = [budget.limit("memory", 8 * MIB)]
        budget.solve(windowed, Topology(), limits, max_pages=1, window_ratio=1e-3)


@pytest.mark.case("BUD-07")
@pytest.mark.parametrize("nbytes", [2 * MIB, 5 * MIB, 40 * MIB])
@pytest.mark.parametrize("full", [1, 4, 10])
@pytest.mark.parametrize("window", [128, 100_000])
def test_windows_hold_what_full_attention_would_or_the_plan_says_who_does(
    gqa, nbytes, full, window
):
    limits = [budget.limit("memory", nbytes)]
    load = dict(sequences=3, max_length=500, step=8)
    windowed = gqa(16, full=full, windows=5, window=window)
    everything = (
        budget.solve(gqa(16, full=full + 5), Topology(), limits, **load)
        .groups[0]
        .tokens
    )
    split = budget.solve(windowed, Topology(), limits, kind="split", **load)
    one = budget.solve(windowed, Topology(), limits, **load)
    (apart, held) = (
        next(g.tokens for g in plan.groups if g.lifecycle == "full")
        for plan in (split, one)
    )
    assert apart >= everything
    assert one.split_tokens == (apart if apart > held else None)
    assert held >= everything or one.split_tokens >= everything
    assert one.kind == "unified" and split.split_tokens is None


def test_a_ratio_that_decides_nothing_is_refused(gqa):
    limits = [budget.limit("memory", MIB)]
    with pytest.raises(errors.ConfigError, match="kind full.*without windows"):
        budget.solve(gqa(16), Topology(), limits, window_ratio=0.5)
