"""What a step answers: logits of the last new tokens, and the rows before the norm."""

import jax
import numpy as np
import pytest

from kvmem import mesh as meshes
from kvmem.geometry import Topology, envelope, group_layers
from kvmem.model import parallel
from kvmem.model.decoder import Decoder
from kvmem.model.ops import at_last
from kvmem.pool.table import GroupTable

TEXT = np.array([[5, 6, 7, 8, 9, 3, 1]], np.int32)
WHERE = ["one rank", "stacked", "mesh"]


@pytest.fixture(scope="module")
def model(decoder_spec, decoder_params):
    spec = decoder_spec(heads=8, kv_heads=8, head_dim=4, mlp=51)
    return spec, decoder_params(spec)


@pytest.fixture(scope="module")
def dense(model):
    return np.asarray(jax.jit(Decoder.from_params(*model).dense)(TEXT))[0]


def answers(model, where, **asked):
    """Read five tokens, then two rows of the rest: two tokens and none."""
    spec, params = model
    tp = 1 if where == "one rank" else 2
    mesh = meshes.make(Topology(tp)) if where == "mesh" else None
    (group,) = group_layers(spec.layer_specs(), 4)
    env = envelope.build(group, Topology(tp), 0)
    weights = parallel.load(spec, params, Topology(tp), mesh)
    pages = np.full((tp, 9, env.nbytes), 0xFF, np.uint8)
    pages = jax.device_put(pages, parallel.page_sharding(mesh))
    step = jax.jit(
        parallel.make_step((env,), mesh),
        static_argnames=("num_logits", "num_features"),
        donate_argnums=1,
    )
    tables = (GroupTable(np.array([[3, 1], [9, 9]], np.int32), np.zeros(2, np.int32)),)
    tokens = np.zeros((2, 5), np.int32)
    tokens[0] = TEXT[0, :5]
    args = tokens, np.zeros(2, np.int32), np.array([5, 0], np.int32), tables
    pages, *_ = step(weights, pages, *args, **asked)
    tokens[0, :2] = TEXT[0, 5:]
    args = tokens, np.array([5, 0], np.int32), np.array([2, 0], np.int32), tables
    _, *rest = step(weights, pages, *args, **asked)
    return [np.asarray(each) for each in rest]


@pytest.mark.parametrize("where", WHERE)
def test_the_last_tokens_have_the_logits_of_a_dense_pass(model, dense, where):
    (got,) = answers(model, where, num_logits=3)
    assert got.shape[:2] == (2, 3)
    got = got[:, :, : dense.shape[1]]
    np.testing.assert_allclose(got[0, 1:], dense[5:], atol=1e-4)
    # where fewer are new, token 0 of them stands in front
    np.testing.assert_array_equal(got[0, 0], got[0, 1])
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("where", WHERE)
def test_features_are_the_rows_that_the_last_norm_reads(model, dense, where):
    logits, features = answers(model, where, num_features=2)
    spec, params = model
    assert (logits.ndim, features.shape) == (2, (2, 2, spec.hidden))
    head = params["model.embed_tokens.weight" if spec.tie_embeddings else "lm_head"]
    x = features[0]
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps)
    normed = normed * params["model.norm.weight"][None]
    np.testing.assert_allclose(normed @ head.T, dense[5:], atol=1e-4)
    np.testing.assert_allclose(logits[0, : spec.vocab], dense[-1], atol=1e-4)


def test_one_token_alone_is_answered_without_an_axis(model, dense):
    (got,) = answers(model, "one rank")
    np.testing.assert_allclose(got[0, : dense.shape[1]], dense[-1], atol=1e-4)


def test_the_last_rows_end_with_the_last_new_one():
    rows = np.arange(10).reshape(2, 5, 1)
    got = at_last(rows, np.array([4, 1], np.int32), 2)
    assert np.asarray(got)[..., 0].tolist() == [[2, 3], [5, 5]]
