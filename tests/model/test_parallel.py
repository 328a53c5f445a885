import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kvmem import mesh as meshes
from kvmem.errors import IncompatiblePlan
from kvmem.geometry import Topology, envelope, group_layers
from kvmem.model import parallel
from kvmem.model.decoder import Decoder
from kvmem.pool.table import GroupTable

PROMPTS = np.array([[5, 6, 7, 8, 9], [60, 2, 33, 0, 0]], np.int32)
LENGTHS = np.array([5, 3], np.int32)


def page_of(spec, tp):
    (group,) = group_layers(spec.layer_specs(), 4)
    return envelope.build(group, Topology(tp=tp), 0)


def poisoned(tp, env, mesh=None):
    pages = np.full((tp, 9, env.nbytes), 0xFF, np.uint8)
    return jax.device_put(pages, parallel.page_sharding(mesh))


def tables_of(table):
    """The tables of one group whose columns begin at page 0."""
    return (GroupTable(table, np.zeros(len(table), np.int32)),)


def greedy(spec, params, tp, mesh=None, steps=8, width=1):
    """Continue two prompts: tokens [2, steps] and the first logits.

    A step of `width` 5 is the program that read the prompts: one is compiled, not two.
    """
    env = page_of(spec, tp)
    weights = parallel.load(spec, params, Topology(tp=tp), mesh)
    step = jax.jit(parallel.make_step((env,), mesh), donate_argnums=1)
    tables = tables_of(np.array([[3, 1, 4, 7], [0, 8, 2, 9]], np.int32))
    zeros, ones = np.zeros(2, np.int32), np.ones(2, np.int32)
    args = (PROMPTS, zeros, LENGTHS, tables)
    pages, logits = step(weights, poisoned(tp, env, mesh), *args)
    first, out = np.asarray(logits), []
    for n in range(steps):
        out.append(np.asarray(logits).argmax(-1).astype(np.int32))
        tokens = np.pad(out[-1][:, None], ((0, 0), (0, width - 1)))
        args = (tokens, LENGTHS + n, ones, tables)
        pages, logits = step(weights, pages, *args)
    return np.stack(out, 1), first


@pytest.fixture(scope="module")
def eight(decoder_spec, decoder_params):
    """Eight KV heads; MLP and vocabulary that no other size divides."""
    spec = decoder_spec(heads=8, kv_heads=8, head_dim=4, mlp=51)
    params = decoder_params(spec)
    return spec, params, *greedy(spec, params, 1)


def test_one_rank_is_the_decoder_itself(eight):
    spec, params, tokens, first = eight
    dense = Decoder.from_params(spec, params).dense(PROMPTS)
    last = np.asarray(dense)[[0, 1], LENGTHS - 1]
    np.testing.assert_allclose(first, last, atol=1e-4)
    assert len(set(tokens.ravel().tolist())) > 4  # a continuation worth comparing


@pytest.mark.parametrize(
    "tp", [2, 8, *(pytest.param(tp, marks=pytest.mark.long) for tp in (1, 4))]
)
def test_ranks_on_a_mesh_give_the_tokens_of_one(tp, eight):
    spec, params, tokens, first = eight
    mesh = meshes.make(Topology(tp=tp))
    got, logits = greedy(spec, params, tp, mesh)
    np.testing.assert_array_equal(got, tokens)
    np.testing.assert_allclose(logits[:, :67], first, atol=1e-4)


@pytest.mark.parametrize(
    "tp", [4, *(pytest.param(tp, marks=pytest.mark.long) for tp in (2, 8))]
)
def test_ranks_stacked_on_one_device_give_the_tokens_of_one(tp, eight):
    spec, params, tokens, first = eight
    got, logits = greedy(spec, params, tp)
    np.testing.assert_array_equal(got, tokens)
    np.testing.assert_allclose(logits[:, :67], first, atol=1e-4)


def test_explicit_axes_and_a_mesh_of_tp_alone_serve_as_well(eight):
    spec, params, tokens, _ = eight
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,))
    found, _ = greedy(spec, params, 4, mesh, 3, width=5)
    np.testing.assert_array_equal(found, tokens[:, :3])
    mesh = meshes.make(Topology(tp=2), axis_type=AxisType.Explicit)
    found, _ = greedy(spec, params, 2, mesh, 3, width=5)
    np.testing.assert_array_equal(found, tokens[:, :3])


def test_replicated_kv_heads_give_the_tokens_of_one(decoder_spec, decoder_params):
    spec = decoder_spec(heads=8, kv_heads=2, qkv_bias=True, qk_norm=True)
    params = decoder_params(spec)
    tokens, _ = greedy(spec, params, 1, steps=4, width=5)
    for mesh in (meshes.make(Topology(tp=8)), None):
        found, _ = greedy(spec, params, 8, mesh, 4, width=5)
        np.testing.assert_array_equal(found, tokens)


def test_logits_are_shards_of_the_padded_vocabulary(eight):
    spec, params, _, _ = eight
    mesh = meshes.make(Topology(tp=4))
    env, topology = page_of(spec, 4), Topology(tp=4)
    weights = parallel.load(spec, params, topology, mesh)
    tables = tables_of(np.zeros((2, 4), np.int32))
    args = (PROMPTS, np.zeros(2, np.int32), LENGTHS, tables)
    step = jax.jit(parallel.make_step((env,), mesh), donate_argnums=1)
    _, logits = step(weights, poisoned(4, env, mesh), *args)
    assert logits.shape == (2, 68)
    assert {shard.data.shape for shard in logits.addressable_shards} == {(2, 17)}
    assert (np.asarray(logits)[:, 67:] == -np.inf).all()


@pytest.mark.parametrize("seqs", [1, 8])
@pytest.mark.parametrize("where", ["one device", "mesh", "stacked"])
@pytest.mark.cover(1)
def test_a_decode_step_of_all_ranks_copies_no_pool(where, seqs, eight, pool_copies):
    spec, params, _, _ = eight
    tp = 1 if where == "one device" else 2
    mesh = meshes.make(Topology(tp=tp)) if where == "mesh" else None
    env = page_of(spec, tp)
    weights = parallel.load(spec, params, Topology(tp=tp), mesh)
    pages = np.zeros((tp, 4096, env.nbytes), np.uint8)
    pages = jax.device_put(pages, parallel.page_sharding(mesh))
    ones = np.ones(seqs, np.int32)
    tables = tables_of(np.arange(4 * seqs, dtype=np.int32).reshape(seqs, 4))
    step = jax.jit(parallel.make_step((env,), mesh), donate_argnums=1)
    program = step.lower(weights, pages, ones[:, None], ones, ones, tables).compile()
    held = pages.addressable_shards[0].data
    assert pool_copies(program, held, spare_nbytes=2**17) == []


def test_weights_know_their_bytes_on_a_rank(eight):
    spec, params, _, _ = eight
    weights = parallel.load(spec, params, Topology(tp=2))
    graph = Decoder.from_params(spec, params, Topology(tp=2)).partition
    assert weights.rank_nbytes == 4 * graph.num_elements
    assert weights.ranks == 2


def test_a_mesh_of_another_size_is_refused(eight):
    spec, params, _, _ = eight
    with pytest.raises(IncompatiblePlan, match=r"make_mesh\(\(2,\), \('tp',\)\)"):
        parallel.load(spec, params, Topology(tp=2), meshes.make(Topology(tp=4)))


def test_pages_of_another_number_of_ranks_are_refused(eight):
    spec, params, _, _ = eight
    env = page_of(spec, 2)
    weights = parallel.load(spec, params, Topology(tp=2))
    args = (PROMPTS, jnp.zeros(2), LENGTHS, tables_of(np.zeros((2, 4), np.int32)))
    with pytest.raises(IncompatiblePlan, match="pages of 4 ranks with weights of 2"):
        parallel.make_step((env,))(weights, poisoned(4, env), *args)


def test_tables_of_another_number_of_groups_are_refused(eight):
    spec, params, _, _ = eight
    env = page_of(spec, 1)
    weights = parallel.load(spec, params)
    table = np.zeros((2, 4), np.int32)
    for tables in (table, (), tables_of(table) * 2):
        args = (PROMPTS, jnp.zeros(2), LENGTHS, tables)
        with pytest.raises(IncompatiblePlan, match="one GroupTable a group"):
            parallel.make_step((env,))(weights, poisoned(1, env), *args)
