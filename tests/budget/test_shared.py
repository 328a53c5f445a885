"""A buffer shared by bytes: figures of SGLang's unified memory."""

import pytest

from kvmem import budget, errors
from kvmem.budget import shared
from kvmem.budget.shared import SubPool

LARGE = [
    SubPool("full", 27_648, 100_000, page_size=64),
    SubPool("state", 56_171_520, 20),
]


def small(full, states):
    return [SubPool("full", 64, full), SubPool("state", 160, states)]


def test_each_sub_pool_may_reach_over_the_whole_buffer():
    found = budget.shared_bytes(LARGE)
    assert found.nbytes == 3_888_230_400
    assert found.max_slots[0] == 140_633
    assert found.floor_nbytes == 56_171_520  # a state counts once, never a page of it
    assert (found.min_slots[0], found.min_pages[0]) == (2_032, 32)
    assert found.tail_nbytes == 56_171_520


@pytest.mark.parametrize(
    ("slots", "nbytes", "most", "least"),
    [((64, 16), 6_656, (104, 41), (3, 1)), ((8, 8), 1_792, (28, 11), (3, 1))],
)
def test_small_buffers_by_hand(slots, nbytes, most, least):
    found = budget.shared_bytes(small(*slots))
    assert (found.nbytes, found.max_slots, found.min_slots) == (nbytes, most, least)


def test_a_page_of_tokens_may_be_the_larger_floor():
    found = budget.shared_bytes([SubPool("full", 64, 90, 8), SubPool("state", 160, 9)])
    assert (found.floor_nbytes, found.min_slots) == (512, (8, 4))


def test_what_one_sub_pool_takes_the_other_cannot():
    found = budget.shared_bytes(small(8, 8))
    before, after = found.available((0, 0)), found.available((0, 3))
    assert before == ((1_792 - 160) // 64, (1_792 - 160) // 160)
    assert after == ((1_792 - 4 * 160) // 64, before[1] - 3)
    assert found.available((17, 3)) == (1, 0)
    assert found.available((28, 10)) == (0, 0)


def test_a_draft_has_a_row_for_every_id_and_not_for_every_token():
    found = budget.shared_bytes(LARGE)
    assert shared.draft_rows(found, page_size=64) == 140_672
    assert shared.draft_rows(found) - 100_000 == 40_632  # ids out of bounds otherwise
    assert shared.draft_rows(found, dcp=8) == 140_632 * 8


def test_a_state_costs_the_tokens_whose_bytes_it_takes():
    full, state = LARGE
    sizes = (state.entry_nbytes, full.entry_nbytes)
    assert shared.state_cost_tokens(*sizes) == 2_032
    assert shared.state_cost_tokens(*sizes, dcp=8) == 16_254
    assert shared.evicted_tokens(1, *sizes, gap_nbytes=21_200_000) == 1_265
    assert shared.evicted_tokens(1, *sizes, gap_nbytes=56_171_520) == 0
    # no fewer than the least that makes room for the last missing state
    for missing in (1, 2, 5):
        for dcp in (1, 8):
            gap = state.entry_nbytes - 1  # all but one byte of a state is free
            bound = -(-((missing - 1) * sizes[0] + 1) * dcp // sizes[1])
            assert shared.evicted_tokens(missing, *sizes, gap, dcp) == bound


def test_a_buffer_that_is_all_floor_is_refused():
    with pytest.raises(errors.IncompatiblePlan, match="the first 160 B are no one's"):
        budget.shared_bytes(small(0, 1))
    with pytest.raises(errors.ConfigError, match="Use one of sglang"):
        budget.shared_bytes(small(8, 8), rules="kvmem")
    with pytest.raises(errors.ConfigError, match="at least one sub-pool"):
        budget.shared_bytes([])
