"""Requests: parameters in range, stop texts never shown, one text however it is cut."""

import numpy as np
import pytest

from kvmem import errors
from kvmem.serve.request import SamplingParams, Sequence


class Pieces:
    """A text stream that says what it is told, token by token."""

    def __init__(self, pieces, rest=""):
        self.pieces = iter(pieces)
        self.rest = rest

    def push(self, token):
        return next(self.pieces)

    def finish(self):
        return self.rest


def feed(pieces, eos_at=None, rest="", **sampling):
    """Accept one token a piece; return (text, deltas, finish reason)."""
    params = SamplingParams(**{"max_tokens": len(pieces), **sampling})
    sequence = Sequence(0, 0, (1, 2), params, Pieces(pieces, rest))
    deltas = []
    for at in range(len(pieces)):
        deltas.append(sequence.accept(7 if at == eos_at else 3, frozenset({7}), None))
        if sequence.finish_reason:
            break
    assert "".join(d.text for d in deltas) == sequence.text
    return sequence.text, deltas, sequence.finish_reason


def test_a_sample_ends_at_its_length():
    text, deltas, reason = feed(["a", "b", "c"])
    assert (text, len(deltas), reason) == ("abc", 3, "length")


def test_what_the_decoder_held_back_is_shown_at_the_end():
    text, _, reason = feed(["a", ""], rest="�")
    assert (text, reason) == ("a�", "length")


def test_an_end_of_text_ends_a_sample_unless_told_otherwise():
    assert feed(["a", "", "c"], eos_at=1)[::2] == ("a", "stop")
    assert feed(["a", "", "c"], eos_at=1, ignore_eos=True)[::2] == ("ac", "length")


@pytest.mark.parametrize("stop", ["\nUser:", ["\nUser:"], ("zz", "\nUser:")])
def test_a_stop_text_across_tokens_is_never_shown(stop):
    text, deltas, reason = feed(["Hi\n", "Us", "er", ": more", "x"], stop=stop)
    assert (text, reason, len(deltas)) == ("Hi", "stop", 4)
    assert [d.text for d in deltas] == ["Hi", "", "", ""]


def test_a_text_that_only_began_like_a_stop_text_is_shown_late():
    text, deltas, reason = feed(["a\n", "Us", "ed", "!"], stop="\nUser:")
    assert [d.text for d in deltas] == ["a", "", "\nUsed", "!"]
    assert (text, reason) == ("a\nUsed!", "length")


def test_the_first_of_two_stop_texts_cuts():
    assert feed(["one two three"], stop=("three", "two"))[0] == "one "


def test_held_back_text_comes_out_when_the_length_ends_the_sample():
    assert feed(["a", "\nUs"], stop="\nUser:")[0] == "a\nUs"


@pytest.mark.parametrize(
    ("values", "law"),
    [
        ({"max_tokens": 0}, "max_tokens >= 1"),
        ({"temperature": -1.0}, "temperature >= 0"),
        ({"temperature": float("nan")}, "temperature >= 0"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        ({"top_k": -1}, "0 <= top_k"),
        ({"top_k": 2**31}, "top_k < 2**31"),
        ({"max_tokens": 1.5}, "max_tokens is a whole number"),
        ({"max_tokens": "5"}, "max_tokens is a whole number"),
        ({"seed": None}, "seed is a whole number"),
        ({"n": 2.0}, "n is a whole number"),
        ({"logprobs": True}, "logprobs is a whole number"),
        ({"temperature": "hot"}, "temperature is a number"),
        ({"ignore_eos": "no"}, "ignore_eos is true or false"),
        ({"stop": None}, "stop is a text or texts"),
        ({"stop": (5,)}, "stop is a text or texts"),
        ({"stop_ids": ("a",)}, "stop_ids is token ids"),
        ({"stop_ids": (-1,)}, "stop_ids is token ids"),
        ({"seed": 2**32}, "0 <= seed"),
        ({"n": 0}, "n >= 1"),
        ({"stop": ""}, "no empty stop text"),
        ({"logprobs": 21}, "logprobs <= 20"),
    ],
)
def test_values_out_of_range_are_refused_together(values, law):
    with pytest.raises(errors.ConfigError) as refused:
        SamplingParams(**values)
    assert law in str(refused.value)


def test_numbers_of_numpy_and_lists_are_taken_for_what_they_are():
    params = SamplingParams(max_tokens=np.int64(3), temperature=1, stop_ids=[2])
    assert (params.max_tokens, params.temperature, params.stop_ids) == (3, 1.0, (2,))
    assert hash(params) == hash(SamplingParams(3, 1.0, stop_ids=(2,)))


def test_every_broken_law_is_named_at_once():
    with pytest.raises(errors.ConfigError, match="max_tokens.*top_p"):
        SamplingParams(max_tokens=0, top_p=2.0)
