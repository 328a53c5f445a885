"""Sizes of copies: divisors that a copy can move, and refusals with both numbers."""

import jax
import numpy as np
import pytest

from pallas_kernels import limits, lists


@pytest.mark.parametrize(
    ("page_nbytes", "chunk"),
    [
        (4_497_408, 31_232),
        (515_328, 23_424),
        (589_824, 32_768),
        (37_440, 18_720),
        (8_448, 8_448),
        (65_536, 32_768),
        (48, 48),
        (16 * 65_537, 16),
    ],
)
def test_a_chunk_is_the_largest_part_of_a_page_in_whole_lines_if_it_can(
    page_nbytes, chunk
):
    assert limits.chunk_nbytes(page_nbytes) == chunk
    assert page_nbytes % chunk == 0 and chunk % 16 == 0


def test_shared_memory_is_counted_with_its_barriers():
    assert limits.not_in_shared(232_448 - 8, barriers=1) is None
    words = "232,456 B of shared memory, 1 barriers counted: a block has 232,448 B"
    assert limits.not_in_shared(232_448, barriers=1) == words


def test_an_axis_beyond_31_bits_is_refused():
    assert limits.too_long(pages=2**31 - 1) is None
    assert "2,147,483,648 pages" in limits.too_long(pages=2**31)


def test_offsets_are_looked_at_where_they_are_known():
    assert limits.misplaced(np.array([0, 32]), 16, "a page") is None
    assert "offset 20 in a page" in limits.misplaced(np.array([0, 20]), 16, "a page")
    seen = []
    jax.jit(lambda x: seen.append(limits.misplaced(x, 16, "a page")) or x)(7)
    assert seen == [None]


@pytest.mark.parametrize("entries", [1, 3, 64, 1000])
@pytest.mark.parametrize("per_entry", [1, 3, 64])
@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_shares_cover_every_unit_once_and_their_lists_are_at_hand(
    entries, per_entry, blocks
):
    shares = lists.Shares(entries, per_entry, blocks)
    assert 0 < shares.blocks <= blocks and shares.span % 4 == 0
    length = shares.padded(np.zeros(entries, np.int32)).size
    units = 0
    for block in range(shares.blocks):
        first = block * shares.per_block
        count = min(shares.per_block, shares.units - first)
        assert count > 0
        units += count
        base = first // per_entry // 4 * 4
        assert base + shares.span <= length
        assert (first + count - 1) // per_entry - base < shares.span
    assert units == shares.units
