"""Attention where layers have arrays of their own: the same outputs, or a refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers
from kvmem.model import attention, parallel
from kvmem.model.page_rows import read_plan, write_plan

HEADS, DIM, PAGE, PAGES = 2, 8, 4, 6
attend = jax.jit(attention.attend, static_argnames=("envelope", "layer"))


@pytest.fixture(scope="module")
def group():
    layers = [
        LayerSpec(f"l{i}", i, kv_heads=HEADS, head_dim=DIM, v_head_dim=4)
        for i in range(3)
    ]
    return group_layers(layers, PAGE)[0]


@pytest.mark.parametrize("order", envelope.ORDERS)
def test_a_layers_own_array_gives_the_outputs_of_the_shared_one(group, order):
    whole = envelope.build(group, Topology(), 0, order)
    apart = envelope.build(group, Topology(), 0, envelope.apart(order, "layer"))
    shared = jnp.full((PAGES, whole.nbytes), 0xFF, jnp.uint8)
    own = jnp.full((PAGES, apart.planes[1].page_stride), 0xFF, jnp.uint8)
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 1, 7, HEADS, DIM), np.float32)
    v = rng.standard_normal((1, 7, HEADS, 4), np.float32)
    table = jnp.asarray([[4, 1, PAGES]], jnp.int32)
    rest = (q, k, v, table, jnp.zeros(1, jnp.int32), jnp.full(1, 7, jnp.int32))
    _, expected = attend(shared, whole, "l1", *rest)
    pages, found = attend(own, apart, "l1", *rest)
    assert np.array_equal(found, expected)
    untouched = [page for page in range(PAGES) if page not in (4, 1)]
    assert (np.asarray(pages)[untouched] == 0xFF).all()


def test_keys_and_values_in_two_arrays_are_refused(group):
    built = envelope.build(group, Topology(), 0, "layer field | head token")
    for plan in (read_plan, write_plan):
        with pytest.raises(errors.IncompatiblePlan, match="share a page of one array"):
            plan(built, "l1", "k")
    regions = envelope.build(group, Topology(), 0, "field | layer | token head", 6)
    with pytest.raises(errors.IncompatiblePlan, match="share a page of one array"):
        read_plan(regions, "l1", "v")
    slab = envelope.build(group, Topology(), 0, " | layer | token head field", 6)
    assert read_plan(slab, "l0", "k").heads == HEADS
    with pytest.raises(errors.IncompatiblePlan, match="share a page of one array"):
        read_plan(slab, "l1", "k")  # its pages begin behind those of l0


def test_a_step_over_several_arrays_is_refused(group):
    built = envelope.build(group, Topology(), 0, envelope.apart("head_major", "layer"))
    with pytest.raises(errors.IncompatiblePlan, match="pool is one array") as refusal:
        parallel.make_step((built,))
    assert "Use an order without a bar" in str(refusal.value)
