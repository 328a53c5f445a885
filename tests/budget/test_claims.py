"""No plan claims more than the whole, whatever the model and the topology."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem import budget, errors
from kvmem.geometry import LayerSpec, Term, Topology, group_layers, kinds

GIB = 1 << 30
COUNTS = st.sampled_from([0, 1, 2, 5])


@st.composite
def models(draw):
    """Draw the layers of a model of any mix of lifecycles, at least one with pages."""
    heads = draw(st.sampled_from([2, 4, 8]))
    dim = draw(st.sampled_from([4, 16, 24]))
    layers = []

    def add(make, count):
        for _ in range(count):
            layers.append(make(f"l{len(layers)}", len(layers)))

    def rows(window, sinks=0):
        return lambda name, index: LayerSpec(
            name,
            index,
            kv_heads=heads,
            head_dim=dim,
            dtype="bfloat16",
            window=window,
            sinks=sinks,
        )

    add(rows(None), draw(COUNTS))
    add(rows(draw(st.sampled_from([5, 64]))), draw(COUNTS))
    add(rows(16, sinks=4), draw(COUNTS))
    for _ in range(draw(COUNTS)):
        index = len(layers)
        layers.append(kinds.latent(f"m{index}", index, rank=128, rope_dim=8, scale=0.1))
        layers.append(kinds.indexer(f"i{index}", index, dim=128))
    if not layers:
        add(rows(None), 1)
    add(
        lambda name, index: kinds.kda(
            name, index, heads=heads, head_dim=4, conv_kernel=4
        ),
        draw(COUNTS),
    )
    return layers


PLANS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["unified", "split"]),
        "sequences": st.integers(1, 9),
        "snapshots": st.integers(0, 3),
        "max_length": st.sampled_from([None, 7, 100]),
        "step": st.sampled_from([1, 16]),
        "window_ratio": st.sampled_from([None, 0.1, 0.8, 1.0]),
        "max_pages": st.sampled_from([None, 50]),
    }
)


@settings(max_examples=100)
@given(
    layers=models(),
    draft=st.sampled_from([None, "own pool", "shared"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    dcp=st.sampled_from([1, 2, 3]),
    page_size=st.sampled_from([1, 4, 16]),
    nbytes=st.integers(0, 1 << 22),
    workspace=st.sampled_from([0, 12_345]),
    host=st.integers(0, 1 << 24),
    plan=PLANS,
)
def test_the_claims_of_every_owner_are_at_most_the_whole(
    layers, draft, tp, dcp, page_size, nbytes, workspace, host, plan
):
    topology = Topology(tp, dcp)
    groups = group_layers(layers, page_size)
    draft_layers = [LayerSpec("d", 0, kv_heads=8, head_dim=6, dtype="bfloat16")]
    drafts = group_layers(draft_layers, page_size, domain="draft")
    if draft == "shared":
        groups = (*groups, *drafts)
    if draft == "own pool":
        plan = plan | {"draft": drafts}
    if all(group.lifecycle.kind != "window" for group in groups):
        plan = plan | {"window_ratio": None}
    fixed = [Term("workspace", "step", 0, workspace)]
    try:
        solved = budget.solve(
            groups, topology, [budget.limit("memory", nbytes)], fixed=fixed, **plan
        )
    except (errors.OutOfPages, errors.IncompatiblePlan) as refused:
        assert "Give at least" in str(refused) or "pages of" in str(refused)
        return
    check_whole(solved, topology, nbytes, workspace)
    check_machine(solved, topology, host)


def check_whole(solved, topology, nbytes, workspace):
    """Count what would be allocated on a rank, from nothing but pools and groups."""
    pools = sum(pool.pages * pool.page_nbytes for pool in solved.pools)
    behind = solved.draft_pages * solved.draft_page_nbytes
    assert pools + behind + workspace == solved.used_nbytes <= nbytes
    for index, pool in enumerate(solved.pools):
        inside = [group for group in solved.groups if group.pool == index]
        assert sum(group.pages * group.extents for group in inside) <= pool.pages
        for group, extent in zip(inside, pool.extents, strict=True):
            assert group.extents == extent
            assert group.payload_nbytes <= extent * pool.page_nbytes
        held = zip(pool.num_vpages, pool.extents, strict=True)
        assert all(count * extent <= pool.pages for count, extent in held)
    if behind:
        lead = solved.pools[solved.groups[0].pool]
        assert solved.draft_pages >= lead.num_vpages[0] * topology.dcp


def check_machine(solved, topology, host):
    """The host tier has its own claim, and shares the machine with the pools."""
    pools = solved.used_nbytes * topology.ranks
    term = budget.host_term(host, topology, solved, pools + host)
    assert term.fixed_bytes * topology.ranks >= host
    if host:
        with pytest.raises(errors.IncompatiblePlan, match="host tier"):
            budget.host_term(host, topology, solved, pools + host - 1)


def test_the_count_of_the_whole_sees_a_page_too_many(hybrid):
    limits = [budget.limit("memory", GIB)]
    solved = budget.solve(hybrid(), Topology(), limits, sequences=2)
    check_whole(solved, Topology(), GIB, 0)
    pool = dataclasses.replace(solved.pools[0], pages=solved.pools[0].pages + 1_000_000)
    with pytest.raises(AssertionError):
        more = dataclasses.replace(solved, pools=(pool,))
        check_whole(more, Topology(), GIB, 0)
