"""Branches: tokens of a tree have the logits of their own chain read alone."""

import functools

import jax
import numpy as np
import pytest

from kvmem import mesh as meshes
from kvmem.geometry import Topology, envelope, group_layers
from kvmem.model import parallel
from kvmem.model.branches import Branches
from kvmem.model.decoder import Decoder
from kvmem.pool.table import GroupTable

TEXT = [5, 6, 7, 8, 9]  # its last token is fed with the tree
CHAINS = [[11, 12], [21, 22], [31, 32]]


@pytest.mark.parametrize("tp", [1, 2])
def test_each_chain_is_read_as_if_it_stood_alone_behind_the_text(
    decoder_spec, decoder_params, tp
):
    spec = decoder_spec(heads=8, kv_heads=8, head_dim=4)
    params, topology = decoder_params(spec), Topology(tp)
    mesh = meshes.make(topology) if tp > 1 else None
    (group,) = group_layers(spec.layer_specs(), 4)
    env = envelope.build(group, topology, 0)
    weights = parallel.load(spec, params, topology, mesh)
    pages = np.full((tp, 9, env.nbytes), 0xFF, np.uint8)
    pages = jax.device_put(pages, parallel.page_sharding(mesh))
    run = functools.partial(parallel.make_step((env,), mesh), num_logits=7)
    step = jax.jit(run, donate_argnums=1)
    tables = (GroupTable(np.array([[3, 1, 4]], np.int32), np.zeros(1, np.int32)),)

    def read(pages, tokens, start, branches):
        padded = np.zeros((1, 7), np.int32)
        padded[0, : len(tokens)] = tokens
        at, count = np.int32([start]), np.int32([len(tokens)])
        return step(weights, pages, padded, at, count, tables, branches=branches)

    place = np.arange(7, dtype=np.int32)[None]
    plain = Branches(place, 0 * place, 0 * place)
    pages, _ = read(pages, TEXT[:-1], 0, plain)
    tree = Branches(
        np.int32([[4, 5, 6, 5, 6, 5, 6]]),
        np.int32([[5] * 7]),
        np.int32([[5, 5, 5, 7, 7, 9, 9]]),
    )
    _, got = read(pages, [TEXT[-1], *sum(CHAINS, [])], 4, tree)
    got = np.asarray(got)[0, :, : spec.vocab]
    dense = jax.jit(Decoder.from_params(spec, params).dense)
    for at, chain in enumerate(CHAINS):
        want = np.asarray(dense(np.array([[*TEXT, *chain]], np.int32)))[0]
        np.testing.assert_allclose(got[0], want[4], atol=1e-4)
        np.testing.assert_allclose(got[1 + 2 * at : 3 + 2 * at], want[5:], atol=1e-4)
