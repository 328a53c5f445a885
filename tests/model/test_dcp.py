"""Token shards: ranks that keep different tokens give the logits of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kvmem import mesh as meshes
from kvmem.errors import IncompatiblePlan
from kvmem.geometry import LayerSpec, Spread, Topology, envelope, group_layers
from kvmem.model import attention, parallel
from kvmem.model.decoder import Decoder
from kvmem.pool.table import GroupTable

PAGE, STEPS = 4, 9
TEXT = np.random.default_rng(4).integers(0, 67, (2, 9 + STEPS)).astype(np.int32)
LENGTHS = np.array([9, 2], np.int32)  # the second leaves ranks without a token
GRID = [
    (1, 2, 1),
    (2, 2, 2),
    (1, 4, 4),
    pytest.param(2, 4, 1, marks=pytest.mark.long),
    pytest.param(4, 2, 2, marks=pytest.mark.long),
]


class Run:
    """A decoder on a topology, and two sequences in its pages."""

    def __init__(self, spec, params, topology, mesh=None):
        (group,) = group_layers(spec.layer_specs(), PAGE)
        env = envelope.build(group, topology, 0)
        spread = Spread.of(group, topology)
        self.weights = parallel.load(spec, params, topology, mesh)
        step = parallel.make_step((env,), mesh, (spread,))
        self.step = jax.jit(step, donate_argnums=1)
        pages = np.full((topology.ranks, 11, env.nbytes), 0xFF, np.uint8)
        self.pages = jax.device_put(pages, parallel.page_sharding(mesh))
        columns = -(-TEXT.shape[1] // (PAGE * topology.dcp))
        table = np.array([[3, 1, 4, 7, 10], [0, 8, 2, 9, 5]], np.int32)[:, :columns]
        self.tables = (GroupTable(table, np.zeros(2, np.int32)),)

    def read(self, tokens, starts, num_new):
        args = (tokens, starts, num_new, self.tables)
        self.pages, logits = self.step(self.weights, self.pages, *args)
        return np.asarray(logits)

    def logits(self):
        """Read both texts: their prompts in one step, then token by token."""
        found = [self.read(TEXT[:, :9], LENGTHS * 0, LENGTHS)]
        for n in range(STEPS):
            at = LENGTHS + n
            tokens = np.take_along_axis(TEXT, at[:, None], 1)
            padded = np.pad(tokens, ((0, 0), (0, 8)))  # the program of the prompts
            found.append(self.read(padded, at, np.ones(2, np.int32)))
        return np.stack(found, 1)  # [2, 1 + STEPS, V]


@pytest.fixture(scope="module")
def small(decoder_spec, decoder_params):
    """Four KV heads under eight query heads."""
    spec = decoder_spec(heads=8, kv_heads=4, head_dim=4, mlp=48)
    params = decoder_params(spec)
    dense = np.asarray(jax.jit(Decoder.from_params(spec, params).dense)(TEXT))
    rows = [dense[row, n - 1 : n + STEPS] for row, n in enumerate(LENGTHS)]
    return spec, params, np.stack(rows)


@pytest.mark.parametrize(("tp", "dcp", "interleave"), GRID)
def test_ranks_on_a_mesh_give_the_logits_of_dense(tp, dcp, interleave, small):
    spec, params, dense = small
    topology = Topology(tp, dcp, interleave)
    found = Run(spec, params, topology, meshes.make(topology)).logits()
    np.testing.assert_allclose(found[..., :67], dense, atol=1e-4)
    np.testing.assert_array_equal(found[..., :67].argmax(-1), dense.argmax(-1))
    assert (found[..., 67:] == -np.inf).all()


def test_explicit_axes_serve_token_shards_as_well(small):
    spec, params, dense = small
    topology = Topology(1, 2)
    mesh = meshes.make(topology, axis_type=AxisType.Explicit)
    found = Run(spec, params, topology, mesh).logits()
    np.testing.assert_allclose(found[..., :67], dense, atol=1e-4)


@pytest.mark.parametrize(
    ("tp", "dcp", "interleave"),
    [(2, 2, 1), pytest.param(1, 4, 2, marks=pytest.mark.long)],
)
def test_ranks_stacked_on_one_device_give_the_logits_of_dense(
    tp, dcp, interleave, small
):
    spec, params, dense = small
    found = Run(spec, params, Topology(tp, dcp, interleave)).logits()
    np.testing.assert_allclose(found[..., :67], dense, atol=1e-4)


def rows_of(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.cover(1)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("interleave", [1, 4])
def test_ranks_without_a_token_in_sight_take_no_part(interleave, window):
    """Of 4 ranks a short text leaves some empty; a window leaves some out of it."""
    seqs, new, dcp = 3, 11, 4
    layer = LayerSpec("a", 0, kv_heads=2, head_dim=4, dtype="float32")
    (group,) = group_layers([layer], PAGE)
    env = envelope.build(group, Topology(), 0)
    q, k = rows_of(1, seqs, new, 4, 4), rows_of(2, seqs, new, 2, 4)
    v, sinks = rows_of(3, seqs, new, 2, 4), rows_of(4, 4)
    starts, num_new = np.zeros(seqs, np.int32), np.array([1, 11, 0], np.int32)

    def attend(pages, spread, table):
        table = GroupTable(table, starts, spread)
        args = (pages, env, "a", q, k, v, table, starts, num_new)
        return attention.attend(*args, window=window, sink_logits=sinks)

    def poisoned(ranks, num_pages):
        return jnp.full((ranks, num_pages, env.nbytes), 0xFF, jnp.uint8)

    whole = np.arange(9, dtype=np.int32).reshape(3, 3)
    _, expected = attend(poisoned(1, 9)[0], Spread(), whole)
    spread, wide = Spread(dcp, interleave), np.array([[2], [0], [1]], np.int32)
    run = jax.vmap(lambda pages: attend(pages, spread, wide), axis_name="dcp")
    pages, found = run(poisoned(dcp, 3))
    for row, count in enumerate(num_new):
        for rank in range(dcp):
            got, want = found[rank, row, :count], expected[row, :count]
            np.testing.assert_allclose(got, want, atol=2e-6)
    assert np.isfinite(found).all()
    untouched = np.asarray(pages)[:, 1] == 0xFF  # of the sequence without tokens
    assert untouched.all()


def test_a_mesh_without_the_axis_of_token_shards_is_refused(small):
    spec, params, _ = small
    mesh = meshes.make(Topology(4))
    with pytest.raises(IncompatiblePlan, match=r"\(\(2, 2\), \('tp', 'dcp'\)\)"):
        parallel.load(spec, params, Topology(2, 2), mesh)


def test_pages_of_fewer_token_shards_are_refused(small):
    spec, params, _ = small
    run = Run(spec, params, Topology(1, 2))
    run.pages = run.pages[:1]
    with pytest.raises(IncompatiblePlan, match="weights of 1 on 2 token shards"):
        run.read(TEXT[:, :9], LENGTHS * 0, LENGTHS)


@pytest.mark.parametrize("where", ["mesh", "stacked"])
def test_a_decode_step_of_token_shards_copies_no_pool(where, small, pool_copies):
    spec, params, _ = small
    topology = Topology(1, 2)
    run = Run(
        spec, params, topology, meshes.make(topology) if where == "mesh" else None
    )
    pages = np.zeros((2, 4096, run.pages.shape[-1]), np.uint8)
    pages = jax.device_put(pages, run.pages.sharding)
    ones = np.ones(2, np.int32)
    args = run.weights, pages, ones[:, None], ones, ones, run.tables
    compiled = run.step.lower(*args).compile()
    held = pages.addressable_shards[0].data
    assert pool_copies(compiled, held, spare_nbytes=2**17) == []
