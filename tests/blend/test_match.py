"""Texts found again: every occurrence at every offset, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem import errors
from kvmem.blend import Library, Run, match

C = 4


def library(*texts, chunk=C):
    made = Library(chunk)
    for number, tokens in enumerate(texts):
        assert made.add(tokens, f"kept {number}") == number
    return made


def covered(runs):
    return [place for run in runs for place in range(run.start, run.stop)]


def test_the_rolling_hash_of_a_window_is_its_own_polynomial():
    ids = np.random.default_rng(0).integers(0, 49_152, 50).astype(np.int32)
    base = int(match._BASE)

    def polynomial(window):
        return sum((int(t) + 1) * base**j for j, t in enumerate(window)) % 2**64

    found = match.rolling(ids, C).tolist()
    assert found == [polynomial(ids[at : at + C]) for at in range(47)]
    assert match.rolling(ids[:3], C).size == 0


@given(st.data())
def test_every_chunk_is_found_at_every_place_where_it_stands(data):
    letters = st.lists(st.integers(0, 2), min_size=C, max_size=12)
    texts = data.draw(st.lists(letters, min_size=1, max_size=4))
    query = data.draw(st.lists(st.integers(0, 2), max_size=30))
    expected = {
        Run(at, at + C, number, offset)
        for number, tokens in enumerate(texts)
        for offset in range(0, len(tokens) - C + 1, C)
        for at in range(len(query) - C + 1)
        if query[at : at + C] == tokens[offset : offset + C]
    }
    made = library(*texts)
    found = made.occurrences(query)
    assert set(found) == expected and len(found) == len(expected)
    runs = made.find(query)
    assert covered(runs) == sorted(set(covered(runs))), "runs overlap or go back"
    for run in runs:
        own = texts[run.text][run.offset : run.offset + run.num_tokens]
        assert query[run.start : run.stop] == own
    starts = {run.start for run in found}
    assert starts <= {
        at for at in starts if set(range(at, at + C)) & set(covered(runs))
    }


@pytest.mark.parametrize("at", [0, 1, 5, 17])
def test_a_text_is_found_whole_at_any_offset(at):
    document = list(range(100, 123))
    runs = library(document).find([*range(at), *document, 7, 8])
    assert runs == (Run(at, at + 23, 0, 0),)
    assert runs[0].delta == at
    assert runs[0].is_prefix == (at == 0)


def test_a_run_of_nearly_two_chunks_is_found_wherever_it_was_cut_from():
    document = list(range(100, 140))
    made = library(document)
    for first in range(40 - (2 * C - 1)):
        piece = document[first : first + 2 * C - 1]
        assert made.find([1, 2, *piece, 3]) == (Run(2, 2 + len(piece), 0, first),)


def test_a_text_that_stands_twice_is_found_twice():
    document = list(range(50, 60))
    runs = library(document).find([*document, 1, *document, *document])
    assert runs == (Run(0, 10, 0, 0), Run(11, 21, 0, 0), Run(21, 31, 0, 0))


def test_the_longest_run_is_taken_and_the_earliest_of_equals():
    short, longer = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]
    assert library(short, longer).find([9, *longer]) == (Run(1, 7, 1, 0),)
    assert library(short, short).find([9, *short]) == (Run(1, 5, 0, 0),)


@given(st.data())
def test_any_run_of_two_chunks_less_one_is_found_whole_whatever_stands_beside_it(data):
    """Texts share beginnings and ends, and one run must not hide the next."""
    letters = st.lists(st.integers(0, 2), min_size=C, max_size=14)
    texts = data.draw(st.lists(letters, min_size=1, max_size=3))
    query = []
    for _ in range(data.draw(st.integers(1, 5))):
        whole = data.draw(st.sampled_from(texts))
        cut = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, 14))
        query += [*whole[slice(*cut)], *data.draw(st.lists(st.just(3), max_size=2))]
    held = set(covered(library(*texts).find(query)))
    for tokens in texts:
        for at in range(len(query) - 2 * C + 2):
            for offset in range(len(tokens) - 2 * C + 2):
                stop = 2 * C - 1
                if query[at : at + stop] == tokens[offset : offset + stop]:
                    assert held >= set(range(at, at + stop))


def test_a_run_that_ends_inside_of_another_ones_chunk_does_not_hide_it():
    first, second = [1, 1, 1, 1, 2], [2, 2, 3, 4, 5, 6, 7]
    found = library(first, second).find([1, 1, 1, 1, *second])
    assert covered(found) == list(range(11))
    assert {run.text for run in found} == {0, 1}


def test_a_text_that_begins_both_is_taken_before_a_longer_one_that_does_not():
    """What begins the prompt as it was registered is exact; the longer one is not."""
    document, rest = list(range(10, 18)), [30, 31, 32, 33]
    made = library([1, 2, 3, 4, *document, *rest], document)
    found = made.find([*document, *rest, 9])
    assert found == (Run(0, 8, 1, 0), Run(8, 12, 0, 12)) and found[0].is_prefix


def test_a_text_of_one_token_over_and_over_is_looked_up_in_good_time():
    made = library([7] * 1_000, [7] * 900, chunk=32)
    assert made.find([7] * 1_500)[0] == Run(0, 1_000, 0, 0)


def test_tokens_before_the_first_are_not_looked_up_nor_grown_into():
    document = list(range(50, 62))
    assert library(document).find([*document, 3], first=4) == (Run(4, 12, 0, 4),)


def test_equal_hashes_of_different_chunks_are_no_hit(monkeypatch):
    def same(ids, width):
        return np.zeros(max(0, len(ids) - width + 1), np.uint64)

    monkeypatch.setattr(match, "rolling", same)
    made = library([1, 2, 3, 4], [5, 6, 7, 8])
    assert made.find([5, 6, 7, 8]) == (Run(0, 4, 1, 0),)
    assert made.find([5, 6, 7, 9]) == ()
    monkeypatch.setattr(match, "_digest", lambda ids: b"equal")
    made = library([1, 2, 3, 4], [5, 6, 7, 8])
    assert made.find([1, 2, 3, 4]) == (Run(0, 4, 0, 0),)
    assert made.find([5, 6, 7, 9]) == ()


def test_thousands_of_texts_are_registered_and_all_are_found():
    rng = np.random.default_rng(1)
    texts = rng.integers(0, 40_000, (3_000, 2 * C))
    made = library(*texts)
    assert len(made) == 3_000
    for number in (0, 1_234, 2_999):
        assert made.find([7, *texts[number]])[0].text == number


def test_a_forgotten_text_is_found_no_more_and_others_are():
    shared, own = [1, 2, 3, 4], [5, 6, 7, 8]
    made = library([*shared, *own], shared)
    made.forget(0)
    assert made.find([*shared, *own]) == (Run(0, 4, 1, 0),)
    assert made.add(own, None) == 2, "a number is never given twice"
    with pytest.raises(errors.InvalidId, match="text 0"):
        made.forget(0)
    made.forget(1)
    made.forget(2)
    assert not made._places


def test_a_text_shorter_than_a_chunk_is_refused():
    with pytest.raises(errors.ConfigError, match="3 tokens to be found again"):
        library([1, 2, 3])


def test_a_registered_text_does_not_change_with_its_callers_array():
    tokens = np.arange(8, dtype=np.int32)
    made = library(tokens)
    tokens[:] = 0
    assert made.find(np.arange(8)) == (Run(0, 8, 0, 0),)
