"""Ranks of a hybrid together give the logits of one, whatever they split or repeat."""

import jax
import numpy as np
import pytest

from kvmem import mesh as meshes
from kvmem.errors import IncompatiblePlan
from kvmem.geometry import Topology
from kvmem.model import parallel
from kvmem.model.hybrid.partition import HybridPartition

FAMILIES = ["gpt_oss", "gemma3 shared", "deepseek_v32", "qwen3_next"]


def logits_of(run, texts):
    """Read the texts in two unequal parts: logits after each, [2, 3, V]."""
    found, cuts = [], np.array([5, 14, 23])
    for begin, end in (([0, 0, 0], cuts), (cuts, [24, 24, 24])):
        tokens = np.full((3, 24), 258, np.int32)
        for row, (a, b) in enumerate(zip(begin, end, strict=True)):
            tokens[row, : b - a] = texts[row, a:b]
        found.append(run.read(tokens, np.array(end) - begin))
    return np.stack(found)


@pytest.mark.cover(1)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_stacked_on_one_device_equal_dense(family, tp, texts, texts_of, dense_of):
    found = logits_of(texts_of(family, tp=tp), texts)
    dense = dense_of(family)
    for row, cut in enumerate((5, 14, 23)):
        np.testing.assert_allclose(
            found[:, row, :259], dense[row, [cut - 1, 23]], atol=2e-4
        )
    assert (found[:, :, 259:] == -np.inf).all()  # rows that pad the vocabulary


@pytest.mark.parametrize("family,tp", [("qwen3_next", 4), ("deepseek_v32", 2)])
def test_ranks_on_a_mesh_equal_dense(family, tp, texts, texts_of, dense_of):
    mesh = meshes.make(Topology(tp))
    found = logits_of(texts_of(family, tp=tp, mesh=mesh), texts)
    dense = dense_of(family)
    for row, cut in enumerate((5, 14, 23)):
        np.testing.assert_allclose(
            found[:, row, :259], dense[row, [cut - 1, 23]], atol=2e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seqs", [1, 3])
def test_a_decode_step_copies_no_pool(family, seqs, texts_of, pool_copies):
    run = texts_of(family, seqs=seqs)
    size = run.pages.shape[-1]
    pages = jax.device_put(np.zeros((1, 4096, size), np.uint8))
    ones = np.ones((seqs, 1), np.int32)
    lengths, run.lengths = run.lengths + 9, run.lengths + 9
    tables = tuple(run._table(at, lengths + 1, 1) for at in range(len(run.groups)))
    step = jax.jit(parallel.make_step(run.envelopes), donate_argnums=1)
    args = (run.weights, pages, ones, lengths, ones[:, 0], tables)
    compiled = step.lower(*args).compile()
    assert pool_copies(compiled, pages, spare_nbytes=2**20) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_ranks_split_adds_up_to_the_model(family, model_of):
    model = model_of(family)
    for tp in (1, 2, 4):
        partition = HybridPartition(model.spec, Topology(tp))
        ranks = [partition.rank_params(model.params, rank) for rank in range(tp)]
        for name, weight in model.spec.weights().items():
            shapes = {own[name].shape for own in ranks}
            assert shapes == {partition.shapes()[name]}, name
            if weight.axis is None:
                whole = ranks[0][name]
                assert all((own[name] == whole).all() for own in ranks), name
            else:
                parts = [own[name] for own in ranks]
                if weight.heads is not None and tp > weight.heads:
                    parts = parts[:: tp // weight.heads]  # replicas follow each other
                joined = np.concatenate(parts, axis=weight.axis)
                whole = joined.take(range(weight.shape[weight.axis]), weight.axis)
            np.testing.assert_array_equal(whole, model.params[name], name)
        assert partition.num_elements == sum(a.size for a in ranks[0].values())


def test_weights_know_what_is_split(model_of):
    model = model_of("deepseek_v32")
    weights = parallel.load(model.spec, model.params, Topology(2))
    partition = HybridPartition(model.spec, Topology(2))
    assert weights.rank_nbytes == 4 * partition.num_elements
    assert not partition.is_split("model.layers.0.mixer.indexer.wk.weight")
    assert partition.is_split("model.layers.0.mixer.q_b_proj.weight")
    assert {p.name for p in partition.paddings} == {"vocab"}  # 259 of 260; 50 is even


def test_heads_that_no_rank_can_hold_whole_are_refused(model_of):
    spec = model_of("gpt_oss").spec
    with pytest.raises(IncompatiblePlan, match="4 heads on TP 3.*Use TP 1, 2, 4"):
        HybridPartition(spec, Topology(3))
    with pytest.raises(IncompatiblePlan, match="token shards"):
        HybridPartition(spec, Topology(2, dcp=2))
