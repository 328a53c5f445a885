import numpy as np
import pytest

from kvmem.errors import IncompatiblePlan, InvalidId
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers
from kvmem.model.page_rows import read_plan, write_plan

ORDERS = [*envelope.ORDERS, "token layer field head", "head token layer field"]


def page_of(order, page_size=4, head_dim=6, dtype="float32", tp=1, rank=0):
    layers = [
        LayerSpec(f"l{i}", i, kv_heads=4, head_dim=head_dim, v_head_dim=5, dtype=dtype)
        for i in range(3)
    ]
    (group,) = group_layers(layers, page_size)
    return envelope.build(group, Topology(tp), rank, order)


def named_bytes(env, layer, name):
    """Byte numbers [H, T, row] of a field, by the envelope's own address rule."""
    entries = env.entries_of(layer, name)
    width = entries[0].field.head_nbytes
    return np.array(
        [
            [
                np.arange(width) + entry.address(slot) + head * width
                for slot in range(env.page_size)
            ]
            for entry in entries
            for head in range(entry.nheads)
        ]
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size,dtype,tp", [(1, "float16", 1), (4, "float32", 2)])
def test_rows_read_are_the_bytes_that_the_envelope_names(order, page_size, dtype, tp):
    env = page_of(order, page_size, dtype=dtype, tp=tp)
    for layer, name in [("l0", "k"), ("l1", "v"), ("l2", "k")]:
        plan = read_plan(env, layer, name)
        numbers = np.arange(env.nbytes).reshape(-1, plan.granule)[plan.rows]
        heads, width = plan.heads, plan.head_dim * plan.dtype.itemsize
        if plan.head_first:
            got = numbers.reshape(heads, page_size, width)
        else:
            got = numbers.reshape(page_size, heads, width).transpose(1, 0, 2)
        np.testing.assert_array_equal(got, named_bytes(env, layer, name))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size,dtype,tp", [(1, "float16", 1), (4, "float32", 2)])
def test_rows_written_are_the_bytes_that_the_envelope_names(
    order, page_size, dtype, tp
):
    env = page_of(order, page_size, dtype=dtype, tp=tp)
    for layer, name in [("l0", "k"), ("l1", "v"), ("l2", "k")]:
        plan = write_plan(env, layer, name)
        numbers = np.arange(env.nbytes).reshape(-1, plan.granule)
        slots = np.arange(page_size)[None, :, None]
        rows = plan.first[:, None, None] + slots * plan.stride + np.arange(plan.width)
        got = numbers[rows].reshape(len(plan.first), page_size, -1)
        np.testing.assert_array_equal(got, named_bytes(env, layer, name))


def test_head_major_pages_are_read_in_one_row_a_head():
    layers = [LayerSpec(f"l{i}", i, kv_heads=3, head_dim=64) for i in range(2)]
    (group,) = group_layers(layers, 16)
    plan = read_plan(envelope.build(group, Topology(), 0), "l1", "v")
    assert (plan.granule, plan.rows.tolist()) == (4096, [[7], [9], [11]])
    assert plan.head_first


def test_a_scaled_dtype_is_refused_in_words():
    env = page_of("head_major", dtype="float8_e4m3fn", head_dim=16)
    with pytest.raises(IncompatiblePlan, match="float32, bfloat16, float16"):
        read_plan(env, "l0", "k")


def test_an_unknown_layer_is_refused():
    with pytest.raises(InvalidId, match="l9"):
        read_plan(page_of("head_major"), "l9", "k")
