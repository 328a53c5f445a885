"""What two histories have in common: as many as can be, and the first of equal ways."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem.session import common, marks

WORDS = st.lists(st.sampled_from("abc"), max_size=9)


def is_in(row, old) -> bool:
    left = iter(old)
    return all(each in left for each in row)


def first_of_the_longest(old, new) -> set[int]:
    """Try all, the longest first; of those the one whose last places are least."""
    for num in range(len(new), -1, -1):
        found = [
            places
            for places in itertools.combinations(range(len(new)), num)
            if is_in([new[i] for i in places], old)
        ]
        if found:
            return set(min(found, key=lambda places: places[::-1]))
    return set()


@given(WORDS, WORDS)
def test_the_longest_row_that_both_hold_is_matched_and_as_early_as_it_can(old, new):
    assert common.matched(old, new) == first_of_the_longest(old, new)


@pytest.mark.parametrize(
    ("old", "new", "places"),
    [
        ("", "ab", set()),
        ("ab", "", set()),
        ("abc", "xbcb", {1, 2}),
        ("ab", "ba", {0}),
        ("aa", "xaaa", {1, 2}),
    ],
)
def test_what_is_said_again_is_matched_as_often_as_it_was_said(old, new, places):
    assert common.matched(old, new) == places


@pytest.mark.parametrize("kinds", [2, 20, 4000])
def test_a_trimmed_history_of_thousands_is_compared_at_once(kinds):
    before = [f"{(i * i * i + 7 * i) % kinds}:" for i in range(4000)]
    after = [*before[7:2000], "edited:", *before[2001:], "new:"]
    start = time.process_time()
    missing = marks.unsent(before, after, before)
    assert time.process_time() - start < 0.5
    assert missing == [1993, len(after) - 1]
