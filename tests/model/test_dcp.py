"""Token shards: ranks that keep different tokens give the logits of one."""

import jax
import numpy as np
import pytest

from kvmem import mesh as meshes
from kvmem.geometry import Spread, Topology, envelope, group_layers
from kvmem.model import parallel
from kvmem.model.decoder import Decoder
from kvmem.pool.table import GroupTable

PAGE, STEPS = 4, 9
TEXT = np.random.default_rng(4).integers(0, 67, (2, 9 + STEPS)).astype(np.int32)
LENGTHS = np.array([9, 2], np.int32)  # the second leaves ranks without a token
GRID = [(1, 2, 1), (2, 2, 2), (1, 4, 4), (2, 4, 1), (4, 2, 2)]


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
    dense = np.asarray(Decoder.from_params(spec, params).dense(TEXT))
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


@pytest.mark.parametrize(("tp", "dcp", "interleave"), [(1, 4, 2), (2, 2, 1)])
def test_ranks_stacked_on_one_device_give_the_logits_of_dense(
    tp, dcp, interleave, small
):
    spec, params, dense = small
    found = Run(spec, params, Topology(tp, dcp, interleave)).logits()
    np.testing.assert_allclose(found[..., :67], dense, atol=1e-4)
