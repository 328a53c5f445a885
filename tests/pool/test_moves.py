"""Page moves: the pages that are told, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.pool import moves


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_move_fills_the_pages_of_its_list_and_no_other(count, shake):
    before = shake(2, 6, 48)
    sources, destinations = np.int32([5, 1, 4, 9]), np.int32([0, 3, 2, 9])
    expected = before.copy()
    expected[:, destinations[:count]] = before[:, sources[:count]]
    move = jax.jit(moves.move, donate_argnums=0)
    after = move(jnp.array(before), sources, destinations, np.int32(count))
    assert np.array_equal(np.asarray(after), expected)


@pytest.mark.parametrize(("start", "count"), [(0, 0), (1, 1), (1, 3), (0, 4)])
def test_zero_clears_the_slice_of_the_stack_and_no_other_page(start, count, shake):
    before = np.maximum(shake(3, 6, 48), 1)
    stack = np.int32([5, 0, 3, 1])
    expected = before.copy()
    expected[:, stack[start : start + count]] = 0
    zero = jax.jit(moves.zero, donate_argnums=0)
    after = zero(jnp.array(before), stack, np.int32(start), np.int32(count))
    assert np.array_equal(np.asarray(after), expected)
