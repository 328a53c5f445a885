"""Prompts: one or many, texts or whole token ids, and nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem.serve.prompts import as_prompts, as_token_ids, one_each


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("a text", 1),
        ([1, 2], 1),
        ((1, 2), 1),
        (np.array([1, 2]), 1),
        (["a", "b"], 2),
        ([[1, 2], "b"], 2),
        ([np.array([1]), np.array([2, 3])], 2),
        (np.array([[1, 2], [3, 4]]), 2),
        ([], 0),
        (iter(["a", "b"]), 2),
    ],
)
def test_one_prompt_or_many(given, count):
    assert len(as_prompts(given)) == count


@pytest.mark.parametrize("given", [None, 5, b"text", {1: 2}, {1, 2}, np.int64(3)])
def test_what_is_no_prompt_is_refused(given):
    with pytest.raises(errors.ConfigError, match="a text, or a row of whole token ids"):
        as_prompts(given)


@pytest.mark.parametrize(
    "given",
    [
        [1.7, 2.9],
        np.array([1.0]),
        ["1", "2"],
        [5, "a"],
        [True, False],
        [[1], [2, 3]],
        np.array([[1]]),
        5,
        None,
        b"ab",
        {3: 4},
    ],
)
def test_ids_are_never_rounded_or_guessed(given):
    with pytest.raises(errors.ConfigError, match="a text, or a row of whole token ids"):
        as_token_ids(given, 100)


@pytest.mark.parametrize(
    "given", [[1, 2], (1, 2), np.array([1, 2]), np.uint8([1, 2]), jnp.array([1, 2])]
)
def test_whole_numbers_of_any_width_are_ids(given):
    assert as_token_ids(given, 100) == (1, 2)
    assert as_token_ids([], 100) == ()


def test_ids_outside_the_vocabulary_are_named():
    with pytest.raises(errors.InvalidId, match=r"\[100, -1\]"):
        as_token_ids([5, 100, -1], 100)


def test_one_value_serves_all_or_each_has_its_own():
    assert one_each(3, int, 2) == [3, 3]
    assert one_each([3, 4], int, 2) == [3, 4]
    for wrong in ([3], [3, 4, 5], {3: 4, 5: 6}, ["a", "b"], None):
        with pytest.raises(errors.ConfigError, match="for 2 prompts"):
            one_each(wrong, int, 2)
