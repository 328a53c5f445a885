"""Token shards in a plan: equal bytes on a rank, more tokens in all."""

import pytest

from kvmem import budget
from kvmem.budget import members
from kvmem.errors import IncompatiblePlan
from kvmem.geometry import Topology

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["unified", "split"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_full_attention_holds_dcp_times_the_tokens_in_the_bytes_of_one_rank(
    gqa, kind, page_size
):
    limits = [budget.limit("memory", 5 * MIB + 17)]
    one = budget.solve(gqa(page_size), Topology(), limits, kind=kind)
    for dcp in (2, 4, 8):
        many = budget.solve(gqa(page_size), Topology(1, dcp), limits, kind=kind)
        assert many.pools == one.pools
        assert many.used_nbytes == one.used_nbytes
        assert many.groups[0].tokens == dcp * one.groups[0].tokens
        per_row = [term.bytes_per_token for term in many.terms]
        assert per_row == [term.bytes_per_token for term in one.terms]


@pytest.mark.parametrize("kind", ["unified", "split"])
@pytest.mark.parametrize("tp", [1, 2])
def test_windows_stand_whole_on_every_rank_and_are_paid_for(gqa, kind, tp):
    groups = gqa(4, full=2, windows=2, window=32)
    limits = [budget.limit("memory", 4 * MIB)]
    load = {"sequences": 2, "max_length": 1_024, "step": 8, "kind": kind}
    tokens = []
    for dcp in (1, 2, 4):
        solved = budget.solve(groups, Topology(tp, dcp), limits, **load)
        full, window = solved.groups
        assert (full.extents, window.extents) == (1, dcp)
        peak = groups[1].lifecycle.peak(1_024, 4 * dcp, 8)
        assert window.pages == 2 * peak
        assert window.tokens == window.pages * 4 * dcp
        replicas = {term.name: term.replicas for term in solved.terms}
        assert replicas["target window32 kv"] == dcp * replicas["target full kv"]
        taken = sum(g.pages * g.extents * g.page_nbytes for g in solved.groups)
        rows = full.pages * full.page_size
        assert sum(term.at(rows) for term in solved.terms) == taken
        tokens.append(full.tokens)
    assert tokens[0] < tokens[1] < tokens[2] < 4 * tokens[0]


def test_members_know_what_a_virtual_page_takes(gqa, hybrid):
    groups = (*hybrid(), *gqa(4, full=1, heads=4, domain="draft"))
    found = members.members_of(groups, Topology(2, 4, 2), "head_major", "unified")
    full, window, state, draft = found
    assert [m.parts for m in found] == [1, 4, 1, 4]
    assert [m.virtual.page_size for m in found] == [16] * 4
    assert state.extents == state.envelope.extents  # of one, whole on every rank
    for member in (window, draft):
        assert member.extents == 4
        assert member.payload_nbytes == 4 * member.envelope.payload_nbytes
        whole = member.payload_nbytes + member.padding_nbytes
        assert whole == 4 * full.page_nbytes == member.extents * member.page_nbytes


def test_an_interleave_that_cuts_a_page_is_no_plan(gqa):
    limits = [budget.limit("memory", MIB)]
    topology = Topology(dcp=2, interleave=32)
    with pytest.raises(IncompatiblePlan, match="interleave 32 on pages of 16 slots"):
        budget.solve(gqa(16), topology, limits)
