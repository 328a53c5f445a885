"""Page moves: sources are read before any write, null moves nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.pool import moves


@pytest.mark.case("ALC-11")
@pytest.mark.parametrize(
    ("sources", "destinations"),
    [([0, 1], [1, 0]), ([0, 1, 2], [1, 2, 3]), ([2, 1, 0], [3, 2, 1]), ([4], [0])],
    ids=["swap", "chain", "chain backwards", "one"],
)
def test_copies_read_every_source_first(sources, destinations, shake):
    before = shake(2, 5, 48)
    expected = before.copy()
    expected[:, destinations] = before[:, sources]
    copy = jax.jit(moves.copy, donate_argnums=0)
    after = copy(jnp.array(before), np.int32(sources), np.int32(destinations))
    assert np.array_equal(np.asarray(after), expected)


@pytest.mark.parametrize("null", [5, -1, 99])
def test_a_pair_with_a_null_end_copies_nothing(null, shake):
    before = shake(2, 5, 48)
    pairs = jnp.array([[0, null], [null, 4], [null, null]], jnp.int32)
    after = jax.jit(moves.copy)(before, pairs[:, 0], pairs[:, 1])
    assert np.array_equal(np.asarray(after), before)


def test_a_null_pair_does_not_undo_a_copy_before_it(shake):
    before = shake(1, 5, 48)
    pairs = jnp.array([[3, 0], [5, 0], [2, 5]], jnp.int32)
    after = np.asarray(jax.jit(moves.copy)(before, pairs[:, 0], pairs[:, 1]))
    assert np.array_equal(after[:, 0], before[:, 3])
    assert np.array_equal(after[:, 1:], before[:, 1:])


@pytest.mark.parametrize(("start", "count"), [(0, 0), (1, 1), (1, 3), (0, 4)])
def test_zero_clears_the_slice_of_the_stack_and_no_other_page(start, count, shake):
    before = np.maximum(shake(3, 6, 48), 1)
    stack = np.int32([5, 0, 3, 1])
    expected = before.copy()
    expected[:, stack[start : start + count]] = 0
    zero = jax.jit(moves.zero, donate_argnums=0)
    after = zero(jnp.array(before), stack, np.int32(start), np.int32(count))
    assert np.array_equal(np.asarray(after), expected)
