"""Elections of batches: one writer a byte, holders alike to within one field."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem import canonical
from kvmem.canonical.elect import Turn, elect, period, sharers
from kvmem.canonical.runs import CopyRun
from kvmem.geometry import Topology


def rows(counts, ranks):
    """Return rows of each width, {width: count}, held alike by every rank."""
    runs, start = [], 0
    for nbytes, count in counts.items():
        runs.append(CopyRun(start, nbytes, start, nbytes, nbytes, count))
        start += nbytes * count
    return [tuple(runs)] * ranks


def written(held, pages):
    """Return the bytes that each rank writes of a batch, by turns."""
    turns = [Turn(page, pages) for page in range(pages)]
    each = [
        [sum(r.total_nbytes for r in runs) for runs in elect(held, t)] for t in turns
    ]
    return [sum(of_rank) for of_rank in zip(*each, strict=True)]


@settings(max_examples=60)
@given(
    counts=st.dictionaries(
        st.integers(1, 40), st.integers(1, 23), min_size=1, max_size=4
    ),
    ranks=st.integers(1, 9),
    pages=st.integers(1, 25),
)
def test_a_batch_is_shared_to_within_one_row_of_the_widest(counts, ranks, pages):
    shares = written(rows(counts, ranks), pages)
    assert sum(shares) == pages * sum(w * n for w, n in counts.items())
    assert max(shares) - min(shares) <= max(counts)


@settings(max_examples=60)
@given(
    counts=st.dictionaries(
        st.integers(1, 40), st.integers(1, 23), min_size=1, max_size=4
    ),
    ranks=st.integers(1, 9),
    page=st.integers(0, 30),
    pages=st.integers(31, 60),
)
def test_an_election_repeats_after_its_period(counts, ranks, page, pages):
    held = rows(counts, ranks)
    every = period(held)
    first = elect(held, Turn(page, pages))
    assert elect(held, Turn(page % every, pages)) == first
    assert elect(held, Turn(page, (pages - 1) % every + 1)) == first
    assert ranks % every == 0


@settings(max_examples=60)
@given(
    counts=st.dictionaries(
        st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=4
    ),
    ranks=st.integers(1, 9),
    pages=st.integers(1, 9),
)
def test_each_row_has_one_writer_in_every_turn(counts, ranks, pages):
    held = rows(counts, ranks)
    everything = sorted(f for run in held[0] for f in run.fragments())
    for page in range(pages):
        elected = elect(held, Turn(page, pages))
        assert sorted(f for runs in elected for r in runs for f in r.fragments()) == (
            everything
        )


@pytest.mark.parametrize(
    "counts, ranks, expected",
    [
        ({8: 6}, 3, 1),
        ({8: 5}, 3, 3),
        ({8: 6, 4: 3}, 9, 3),
        ({8: 4}, 6, 3),
        ({8: 1}, 1, 1),
    ],
)
def test_pages_that_divide_evenly_are_dealt_alike(counts, ranks, expected):
    assert period(rows(counts, ranks)) == expected


TOPOLOGIES = [Topology(t) for t in (4, 8, 12, 20)] + [
    Topology(12, 2),
    Topology(20, 2, 2),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("page_size", [2, 6])
@pytest.mark.parametrize("widths", [(12, 4), (9, 16), (16, None)], ids=str)
def test_holders_of_a_plan_share_a_batch_to_within_one_field(
    build, topology, page_size, widths
):
    group = build.group(3, 4, dim=widths[0], v_head_dim=widths[1], page_size=page_size)
    plan = canonical.plan(group, topology)
    largest = max(field.head_nbytes for field in group.fields)
    for pages in (1, 2, 5, 14):
        share = [0] * topology.ranks
        turns = plan.turns(pages)
        for page in range(pages):
            for rank, runs in enumerate(plan.writers(turns[page % len(turns)])):
                share[rank] += sum(run.total_nbytes for run in runs)
        assert sum(share) == pages * plan.page_tokens * plan.record_nbytes
        for head, shard in itertools.product(range(4), range(topology.dcp)):
            holders = topology.holders(group.fields[0], head)
            alike = [share[r] for r in holders if topology.dcp_index(r) == shard]
            assert max(alike) - min(alike) <= largest


def test_a_demo_page_is_dealt_alike_to_three_holders(build):
    group = build.group(30, 3, dim=64, page_size=16)
    assert canonical.plan(group, Topology(9)).period == 1


def test_sharers_are_the_ranks_whose_rows_another_holds():
    held = rows({8: 2}, 2)
    alone = (CopyRun(0, 8, 64, 8, 8, 2),)
    assert sharers([*held, alone]) == (0, 1)
    assert sharers([held[0]]) == ()
