"""Logits of several new tokens, of every kind of hybrid."""

import functools

import jax
import numpy as np
import pytest

from kvmem import geometry
from kvmem.geometry import Topology
from kvmem.model import parallel
from kvmem.pool.table import GroupTable
from kvmem.serve.step import envelopes

PAGE = 4


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v32", "qwen3_next"])
def test_the_last_tokens_of_a_hybrid_have_the_logits_of_a_dense_pass(
    model_of, texts, dense_of, family
):
    model, want = model_of(family), dense_of(family)
    groups = geometry.group_layers(model.spec.layer_specs("float32"), PAGE)
    made = envelopes(groups, Topology(), "head_major")
    tables, page = [], iter(range(60))
    for group, env in zip(groups, made, strict=True):
        width = env.extents if group.is_state else 6
        pages = [[next(page) for _ in range(width)] for _ in texts]
        tables.append(GroupTable(np.array(pages, np.int32), np.zeros(3, np.int32)))
    nbytes = max(env.nbytes // env.extents for env in made)
    pages = np.full((1, 60, nbytes), 0xFF, np.uint8)
    run = functools.partial(parallel.make_step(made), num_logits=3, num_features=2)
    step = jax.jit(run, donate_argnums=1)
    weights = parallel.load(model.spec, model.params)
    at = np.zeros(3, np.int32)
    for count in (4, 3, 4, 4):
        new = np.zeros((3, 4), np.int32)
        new[:, :count] = texts[:, at[0] : at[0] + count]
        counts = np.full(3, count, np.int32)
        pages, logits, features = step(weights, pages, new, at, counts, tuple(tables))
        at = at + count
        got = np.asarray(logits)[..., : model.spec.vocab]
        np.testing.assert_allclose(got, want[:, at[0] - 3 : at[0]], atol=2e-4)
    assert features.shape == (3, 2, model.spec.hidden)
