"""A hybrid on token shards: full attention is spread, windows are kept whole."""

import jax
import numpy as np
import pytest

from kvmem import mesh as meshes
from kvmem.geometry import Spread, Topology, envelope, group_layers
from kvmem.model import parallel
from kvmem.pool.table import GroupTable

PAGE, SEQS, NUM_PAGES = 4, 3, 40


def tables_of(spreads):
    """Pages for 24 tokens of three texts, no page of two."""
    free = np.random.default_rng(6).permutation(NUM_PAGES).astype(np.int32)
    tables = []
    for spread in spreads:
        width = -(-24 // (PAGE * spread.shards))
        taken, free = free[: SEQS * width], free[SEQS * width :]
        first = np.zeros(SEQS, np.int32)
        tables.append(GroupTable(taken.reshape(SEQS, width), first))
    return tuple(tables)


@pytest.mark.parametrize(
    "where", ["mesh", pytest.param("stacked", marks=pytest.mark.long)]
)
def test_logits_beside_windows_kept_whole_equal_dense(where, model_of, texts, dense_of):
    model, topology = model_of("gpt_oss"), Topology(1, 2, 2)
    groups = group_layers(model.spec.layer_specs("float32"), PAGE)
    spreads = tuple(Spread.of(group, topology) for group in groups)
    assert [spread.is_whole for spread in spreads] == [False, True]
    mesh = meshes.make(topology) if where == "mesh" else None
    envelopes = tuple(envelope.build(group, topology, 0) for group in groups)
    step = jax.jit(parallel.make_step(envelopes, mesh, spreads), donate_argnums=1)
    weights = parallel.load(model.spec, model.params, topology, mesh, model.dtype)
    pages = np.full((2, NUM_PAGES, envelopes[0].nbytes), 0xFF, np.uint8)
    pages = jax.device_put(pages, parallel.page_sharding(mesh))
    tables, found = tables_of(spreads), []
    for begin, end in ((0, 13), (13, 24)):
        tokens = np.full((SEQS, 13), 258, np.int32)
        tokens[:, : end - begin] = texts[:, begin:end]
        starts, num_new = np.full(SEQS, begin), np.full(SEQS, end - begin)
        args = (tokens, starts.astype(np.int32), num_new.astype(np.int32), tables)
        pages, logits = step(weights, pages, *args)
        found.append(np.asarray(logits))
    dense = dense_of("gpt_oss")[:, [12, 23]]
    np.testing.assert_allclose(np.stack(found, 1)[..., :259], dense, atol=2e-4)
    held = np.asarray(pages)[:, np.asarray(tables[1].pages).ravel()]
    np.testing.assert_array_equal(held[0], held[1])  # of the window, slot = position
