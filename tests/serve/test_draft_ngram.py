"""Prompt look-up: what followed the last tokens when they stood in the text before."""

import pytest

from kvmem import errors
from kvmem.serve.draft import NGram
from kvmem.serve.draft.ngram import continuation


@pytest.mark.parametrize(
    ("tokens", "most", "follows"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, (4, 5)),  # three tokens stood before
        ([1, 2, 3, 4, 5, 1, 2, 3], 4, (4, 5, 1, 2)),
        ([7, 2, 3, 4, 9, 2, 3], 2, (4, 9)),  # two did, three did not
        ([3, 8, 5, 3], 3, (8, 5, 3)),  # one did
        ([5, 1, 5, 2, 5], 1, (2,)),  # the latest place, where enough follows it
        ([5, 1, 9, 5, 2, 5], 3, (1, 9, 5)),  # or an earlier one
        ([6, 6, 6], 2, (6,)),  # as far as a text repeats itself
        ([1, 2, 3], 4, ()),
        ([1], 4, ()),
    ],
)
def test_the_longest_match_is_continued(tokens, most, follows):
    assert continuation(tokens, range(3, 0, -1), most) == follows


def test_fewer_tokens_than_the_fewest_match_propose_nothing(new_sequence):
    proposer = NGram(4, min_match=2, max_match=2).start(None)
    once = new_sequence([3, 8, 5, 3])
    twice = new_sequence([3, 8, 5, 3, 8])
    found = proposer.propose([once, twice], [4, 2])
    assert found.tokens == ((), (5, 3))
    assert (found.probs, dict(found.faults)) == (None, {})


def test_a_wrong_proposal_asks_a_longer_match_of_the_next(new_sequence):
    proposer = NGram(2, min_match=1, max_match=2).start(None)
    sequence = new_sequence([3, 8, 5, 3])  # one token stood before, two did not
    assert proposer.propose([sequence], [2]).tokens == ((8, 5),)
    proposer.accepted(sequence, 0)
    assert proposer.propose([sequence], [2]).tokens == ((),)
    proposer.accepted(sequence, 0)  # a longer match than the longest is never asked
    sequence.tokens.append(8)
    assert proposer.propose([sequence], [2]).tokens == ((5, 3),)
    proposer.accepted(sequence, 1)
    sequence.tokens.append(3)
    assert proposer.propose([sequence], [2]).tokens == ((8, 3),)
    proposer.accepted(sequence, 0)
    proposer.forget(sequence)
    assert proposer.propose([sequence], [2]).tokens == ((8, 3),)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"draft_tokens": 0}, "draft_tokens = 0"),
        ({"min_match": 3, "max_match": 2}, "Raise max_match"),
    ],
)
def test_widths_that_mean_nothing_are_refused(facts, words):
    with pytest.raises(errors.ConfigError, match=words):
        NGram(**facts)
