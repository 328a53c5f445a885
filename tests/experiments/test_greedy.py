"""Greedy tokens are equal, or differ first at a tie; anything else is counted."""

import pytest

from experiments.greedy import Continuation, judge

KNOWN = Continuation((5, 6, 7), (0.5, 0.0005, 0.9))


def test_equal_sequences_are_equal():
    verdict = judge([(5, 6, 7)], [KNOWN])
    assert (verdict.equal, verdict.ties, verdict.differences) == (1, 0, ())
    assert verdict.ok


def test_what_follows_a_tie_does_not_count():
    verdict = judge([(5, 8, 1)], [KNOWN])
    assert (verdict.equal, verdict.ties, verdict.differences) == (0, 1, ())
    assert verdict.ok


@pytest.mark.parametrize("ids", [(4, 6, 7), (5, 6, 8)])
def test_a_difference_at_a_clear_margin_is_named(ids):
    verdict = judge([ids], [KNOWN])
    assert not verdict.ok and len(verdict.differences) == 1
    assert "margin 0." in str(verdict)


def test_a_margin_of_the_limit_itself_is_no_tie():
    assert not judge([(1,)], [Continuation((2,), (1e-3,))]).ok


def test_one_in_a_hundred_may_differ_and_two_may_not():
    known = [Continuation((1,), (1.0,))] * 100
    assert judge([(2,)] + [(1,)] * 99, known).ok
    assert not judge([(2,)] * 2 + [(1,)] * 98, known).ok


def test_sequences_are_compared_to_their_ends():
    with pytest.raises(ValueError, match="zip"):
        judge([(5, 6)], [KNOWN])
    with pytest.raises(ValueError, match="zip"):
        judge([], [KNOWN])
