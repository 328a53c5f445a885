"""Writers: one a byte, balanced for a single page; and every law has a breaker."""

import dataclasses
import re
import sys

import pytest

from kvmem import canonical, errors
from kvmem.canonical import elect
from kvmem.canonical import plan as plan_function
from kvmem.canonical.units import check_tiling
from kvmem.geometry import Topology

plan_module = sys.modules[plan_function.__module__]  # `plan` there is its verb

TOPOLOGIES = [Topology(t) for t in (1, 2, 4, 8, 12, 16, 20)] + [
    Topology(8, 2),
    Topology(12, 2, 2),
]


def bytes_by_rank(plan):
    return [sum(run.total_nbytes for run in runs) for runs in plan.writers()]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("widths", [(16, None), (12, 4), (9, 16)], ids=str)
def test_holders_share_the_writing_to_within_one_field(
    build, topology, page_size, widths
):
    if topology.dcp > 1 and page_size % topology.interleave:
        pytest.skip("an interleave longer than the page is refused")
    dim, v_dim = widths
    group = build.group(3, 4, dim=dim, v_head_dim=v_dim, page_size=page_size)
    plan = canonical.plan(group, topology)
    written = bytes_by_rank(plan)
    assert sum(written) == plan.page_tokens * plan.record_nbytes
    for head in range(4):
        holders = topology.holders(group.fields[0], head)
        for shard in range(topology.dcp):
            share = [written[r] for r in holders if topology.dcp_index(r) == shard]
            assert max(share) - min(share) <= max(f.head_nbytes for f in group.fields)


def test_three_holders_of_a_demo_page_write_a_third_each(build):
    group = build.group(30, 3, dim=64, page_size=16)
    assert bytes_by_rank(canonical.plan(group, Topology(9))) == [81_920] * 9


def test_the_same_facts_elect_the_same_writers(build):
    canonical.plan.cache_clear()
    first = canonical.plan(build.group(), Topology(16))
    canonical.plan.cache_clear()
    assert canonical.plan(build.group(), Topology(16)) == first


def test_ranks_that_share_heads_are_named_as_replicas(build):
    assert canonical.plan(build.group(heads=2), Topology(2)).replicated == ()
    plan = canonical.plan(build.group(heads=2), Topology(4))
    assert plan.replicated == (0, 1, 2, 3)


@pytest.fixture
def sound(build):
    return canonical.plan(build.group(dim=8), Topology(4), "split_hnd")


def refused(plan, held):
    with pytest.raises(errors.IncompatiblePlan) as refusal:
        dataclasses.replace(plan, held=held)
    return str(refusal.value)


def replaced(lists, rank, runs):
    return (*lists[:rank], tuple(runs), *lists[rank + 1 :])


def objections(plan, writers):
    """Return what is wrong with an election, whoever made it."""
    envelopes = [plan.envelope(rank) for rank in range(plan.topology.ranks)]
    sizes = plan.record_nbytes, plan.page_tokens
    return "; ".join(check_tiling(envelopes, plan.runs, writers, *sizes))


@pytest.mark.case("LAY-14")
@pytest.mark.parametrize("side", ["local_offset", "canonical_offset"])
def test_a_run_shifted_by_four_bytes_is_refused(sound, side):
    assert canonical.check(sound) == ()
    first, *rest = sound.held[1]
    moved = dataclasses.replace(first, **{side: getattr(first, side) + 4})
    message = refused(sound, replaced(sound.held, 1, [moved, *rest]))
    assert "left out" in message
    assert "covered twice" in message


@pytest.mark.case("LAY-14")
def test_writers_cover_each_byte_of_a_page_exactly_once(build):
    plan = canonical.plan(
        build.group(heads=8, dim=8, dtype="float8_e4m3fn"), Topology(4)
    )
    covered = [0] * (plan.page_tokens * plan.record_nbytes)
    assert len(covered) == 4 * 8 * 2 * 8
    for runs in plan.writers():
        for run in runs:
            for _, first, nbytes in run.fragments():
                for byte in range(first, first + nbytes):
                    covered[byte] += 1
    assert set(covered) == {1}


@pytest.mark.case("LAY-14")
def test_a_writer_that_is_missing_leaves_a_gap(sound):
    assert objections(sound, sound.writers()) == ""
    message = objections(sound, replaced(sound.writers(), 2, []))
    assert re.search(r"512 bytes of the writers' canonical page are left out", message)
    assert "are left out" in refused(sound, replaced(sound.held, 2, []))


@pytest.mark.case("LAY-14")
def test_two_writers_of_one_byte_are_refused(build):
    plan = canonical.plan(build.group(heads=2), Topology(4))
    message = objections(plan, replaced(plan.writers(), 1, plan.runs[1]))
    assert "covered twice" in message
    message = refused(plan, replaced(plan.held, 1, plan.held[1] + plan.held[2]))
    assert "covered twice" in message


def test_a_writer_of_bytes_that_it_does_not_hold_is_named(build):
    plan = canonical.plan(build.group(heads=2), Topology(2))
    message = objections(plan, plan.writers()[::-1])
    for rank in range(2):
        assert f"rank {rank} is elected for bytes that it does not hold" in message


def test_an_election_of_any_turn_is_checked_when_it_is_made(build, monkeypatch):
    plan = canonical.plan(build.group(1, 1, page_size=1), Topology(5))
    assert plan.period == 5

    def nobody(held, turn):
        return [()] * len(held) if turn.page == 3 else elect.elect(held, turn)

    monkeypatch.setattr(plan_module, "elect", nobody)
    plan_module._writers.cache_clear()
    assert plan.writers(canonical.Turn(2, 4))
    with pytest.raises(errors.IncompatiblePlan, match="are left out"):
        plan.writers(canonical.Turn(3, 4))


def test_a_local_byte_that_no_run_fills_is_refused(sound):
    message = refused(sound, replaced(sound.held, 0, sound.held[0][1:]))
    assert "of the page of rank 0 are left out, first byte 0" in message


def test_padding_belongs_to_no_run(build):
    plan = canonical.plan(build.group(heads=1, dim=1), Topology(1), "split_hnd")
    assert plan.page_nbytes > plan.page_tokens * plan.record_nbytes
    first, *rest = plan.held[0]
    moved = dataclasses.replace(first, local_offset=first.local_offset + 4)
    message = refused(plan, ((moved, *rest),))
    assert "padding that is written, first byte 4" in message


def test_a_run_beyond_the_page_is_refused(sound):
    *rest, last = sound.held[3]
    moved = dataclasses.replace(last, local_offset=last.local_offset + 64)
    message = refused(sound, replaced(sound.held, 3, [*rest, moved]))
    assert "the page of rank 3 has no byte" in message


def test_a_rank_without_a_list_of_runs_is_refused(sound):
    assert "3 lists of runs for 4 ranks" in refused(sound, sound.held[:3])


def test_every_objection_is_said_at_once(sound):
    message = refused(sound, tuple(runs[1:] for runs in sound.held))
    assert all(f"the page of rank {rank}" in message for rank in range(4))
