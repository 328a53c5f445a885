import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.errors import IncompatiblePlan
from kvmem.geometry import (
    LayerSpec,
    Topology,
    envelope,
    group_layers,
    kinds,
    np_dtype,
)
from kvmem.model.mixers import rows

ORDERS = [*envelope.ORDERS, "head token layer field"]


def fp8_latents(lay, order="head_major", page_size=4):
    sizes = dict(rank=256, rope_dim=8, scale=1.0, fp8=True)
    layers = [kinds.latent(f"l{i}", i, **sizes) for i in range(2)]
    return lay.page_of(layers, page_size, order)


def states(lay, nbytes=None):
    sizes = dict(key_heads=2, value_heads=4, key_dim=6, value_dim=5, conv_kernel=4)
    layers = [kinds.gated_delta(f"l{i}", i, **sizes) for i in range(2)]
    return lay.page_of(layers, nbytes=nbytes)


def by_the_law(pages, env, layer, name, ids):
    """[N, T, H, D] sliced out by `entry.address`, byte by byte."""
    entries = env.entries_of(layer, name)
    dtype = np_dtype(entries[0].field.dtype)
    found = []
    for vpage in ids:
        for slot in range(env.page_size):
            row = [
                pages[vpage[e.extent], e.address(slot) : e.address(slot) + e.nbytes]
                for e in entries
            ]
            found.append(np.concatenate(row).view(dtype))
    heads = sum(entry.nheads for entry in entries)
    return np.stack(found).reshape(len(ids), env.page_size, heads, -1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["latent", "scale", "rope"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_read_gives_the_bytes_that_the_address_law_names(order, name, page_size, lay):
    env = fp8_latents(lay, order, page_size)
    pages = np.random.default_rng(1).integers(0, 256, (5, env.nbytes), np.uint8)
    ids = lay.ints([3], [0], [4])
    got = rows.read(jnp.asarray(pages), rows.plan_of(env, "l1", name), ids)
    expected = by_the_law(pages, env, "l1", name, ids)
    assert np.asarray(got).tobytes() == expected.tobytes()
    slots = lay.ints(page_size - 1, 0, page_size // 2)
    one = rows.read_slots(jnp.asarray(pages), rows.plan_of(env, "l1", name), ids, slots)
    assert np.asarray(one).tobytes() == expected[np.arange(3), slots].tobytes()


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_several_heads_are_read_head_by_head(order, lay):
    layers = [LayerSpec(f"l{i}", i, kv_heads=3, head_dim=6) for i in range(2)]
    env = lay.page_of(layers, 4, order)
    pages = np.random.default_rng(1).integers(0, 256, (5, env.nbytes), np.uint8)
    plan, ids = rows.plan_of(env, "l1", "v"), lay.ints([[3], [1]], [[0], [4]])
    got = np.asarray(rows.read(jnp.asarray(pages), plan, ids))
    assert got.shape == (2, 2, 4, 3, 6)
    expected = by_the_law(pages, env, "l1", "v", ids.reshape(4, 1))
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("nbytes", [None, 512])
@pytest.mark.parametrize("name", ["conv_q", "conv_v", "ssm"])
def test_a_state_is_read_out_of_its_extents(nbytes, name, lay):
    env = states(lay, nbytes)
    assert (env.extents > 1) == (nbytes is not None)
    extents = env.extents
    pages = np.random.default_rng(1).integers(
        0, 256, (3 * extents, env.nbytes), np.uint8
    )
    pages = pages[:, : env.nbytes // extents]
    ids = np.random.default_rng(2).permutation(3 * extents).reshape(3, extents)
    ids = ids.astype(np.int32)
    got = rows.read(jnp.asarray(pages), rows.plan_of(env, "l1", name), ids)
    expected = by_the_law(pages, env, "l1", name, ids)
    assert np.asarray(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize("nbytes", [None, 512])
def test_a_write_changes_the_bytes_of_its_slots_alone(nbytes, lay):
    env = states(lay, nbytes)
    plan, extents = rows.plan_of(env, "l1", "ssm"), env.extents
    shape = (3 * extents, env.nbytes // extents)
    before = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    ids = np.random.default_rng(2).permutation(3 * extents).reshape(3, extents)
    ids = ids.astype(np.int32)[:2]
    new = np.random.default_rng(3).standard_normal((2, 4, 30)).astype(np.float32)
    after = rows.write(jnp.asarray(before), plan, ids, lay.ints(0, 0), new)
    expected = before.copy()
    for seq, parts in enumerate(ids):
        for head, entry in enumerate(env.entries_of("l1", "ssm")):
            raw = np.frombuffer(new[seq, head].tobytes(), np.uint8)
            expected[parts[entry.extent], entry.offset :][: len(raw)] = raw
    np.testing.assert_array_equal(after, expected)


@pytest.mark.case("IDX-02")
@pytest.mark.parametrize("null", [-1, -(2**31), 3, 2**31 - 1])
def test_a_page_outside_the_pool_drops_whole_and_reads_as_zeros(null, lay):
    env = fp8_latents(lay)
    plan = rows.plan_of(env, "l1", "scale")
    before = np.random.default_rng(1).integers(0, 256, (3, env.nbytes), np.uint8)
    ids, slots = lay.ints([null], [1]), lay.ints(0, 2)
    new = np.ones((2, 1, 2), np.float32)
    after = np.asarray(rows.write(jnp.asarray(before), plan, ids, slots, new))
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert (after[1] != before[1]).sum() <= 8
    pages = jnp.asarray(after)
    np.testing.assert_array_equal(rows.read(pages, plan, ids)[0], np.zeros((4, 1, 2)))
    one = rows.read_slots(pages, plan, ids, slots)
    np.testing.assert_array_equal(one[0], np.zeros((1, 2)))
    np.testing.assert_array_equal(one[1], np.ones((1, 2)))


def test_places_count_the_slots_of_a_table_that_begins_late(lay):
    tab = lay.table([[7, 7, 7], [1, 2, 3]], first=[0, 5])
    expected = np.stack([np.arange(12), 20 + np.arange(12)])
    np.testing.assert_array_equal(tab.places(4), expected)


def test_fields_in_arrays_of_their_own_are_refused(lay):
    layers = [kinds.indexer("i0", 0, dim=128)]
    base = dict(rank=128, rope_dim=8, scale=1.0)
    groups = group_layers([*layers, kinds.latent("m0", 0, **base)], 4)
    order = envelope.apart("head_major", "field")
    env = envelope.build(groups[1], Topology(), 0, order)
    with pytest.raises(IncompatiblePlan, match="share a page of one array"):
        rows.plan_of(env, "i0", "key")


def test_a_layer_in_an_array_of_its_own_is_read_from_it(lay):
    sizes = dict(rank=256, rope_dim=8, scale=1.0, fp8=True)
    layers = [kinds.latent(f"l{i}", i, **sizes) for i in range(2)]
    (group,) = group_layers(layers, 4)
    env = envelope.build(group, Topology(), 0, envelope.apart("head_major", "layer"))
    nbytes = env.planes[1].page_stride
    pages = np.random.default_rng(1).integers(0, 256, (3, nbytes), np.uint8)
    got = rows.read(jnp.asarray(pages), rows.plan_of(env, "l1", "rope"), lay.ints([2]))
    expected = by_the_law(pages, env, "l1", "rope", lay.ints([2]))
    assert np.asarray(got).tobytes() == expected.tobytes()
