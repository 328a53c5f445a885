"""The indexer and the latent attention that reads what it selects, together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.geometry import Topology, envelope, group_layers, kinds
from kvmem.model.mixers import indexer, latent, scaled

HEADS, WIDTH = 3, 8  # query heads; nope, rope and value elements
BY_TOKEN = ("keys", "index_q", "weights", "latents", "ropes", "nope", "rope")


@pytest.fixture(scope="module")
def envs():
    """The envelopes of latents and of their indexers, cut to one pool's pages."""
    sizes = dict(rank=128, rope_dim=WIDTH, scale=0.3, fp8=True)
    layers = [kinds.latent("m0", 0, **sizes), kinds.indexer("i0", 0, dim=128)]
    groups = group_layers(layers, 4)
    whole = [envelope.build(group, Topology(), 0) for group in groups]
    return tuple(envelope.cut(env, whole[0].nbytes) for env in whole)


def make_text(seqs, length, seed=0):
    rng = np.random.default_rng(seed)
    shapes = dict(
        keys=(seqs, length, 128),
        index_q=(seqs, length, 2, 128),
        weights=(seqs, length, 2),
        latents=(seqs, length, 128),
        ropes=(seqs, length, WIDTH),
        nope=(seqs, length, HEADS, WIDTH),
        rope=(seqs, length, HEADS, WIDTH),
        w_uk=(HEADS, WIDTH, 128),
        w_uv=(HEADS, WIDTH, 128),
    )
    made = {n: rng.standard_normal(shape) for n, shape in shapes.items()}
    small = {"w_uk": 0.2, "w_uv": 0.2}
    return {n: (x * small.get(n, 1.0)).astype(np.float32) for n, x in made.items()}


def queries(text, positions):
    heads = (text["w_uk"], text["w_uv"])
    return latent.Queries(text["nope"], text["rope"], positions, *heads)


@functools.partial(jax.jit, static_argnums=(1, 3), donate_argnums=0)
def layer(pages, envs, text, k, tabs, starts, num_new):
    """Both kinds of rows are written, then both are read."""
    new = (starts, num_new)
    pages = indexer.write_keys(pages, envs[1], "i0", text["keys"], tabs[1], *new)
    rows = (text["latents"], text["ropes"])
    pages = latent.write_rows(pages, envs[0], "m0", *rows, tabs[0], *new)
    end, args = starts + num_new, (text["index_q"], text["weights"], tabs[1])
    scored = indexer.scores(pages, envs[1], "i0", *args, end)
    steps = jnp.arange(text["keys"].shape[1], dtype=jnp.int32)
    positions = starts[:, None] + steps[None]
    at = tabs[1].places(envs[1].page_size)
    chosen = indexer.select(scored, at, positions, end, k)
    args = (queries(text, positions), tabs[0], end, 0.3)
    return pages, latent.attend_written(pages, envs[0], "m0", *args, selected=chosen)


@functools.partial(jax.jit, static_argnums=1)
def dense(text, k):
    """The layer without a cache, of rows rounded as the pages round them."""
    keys = scaled.rounded(text["keys"], "float8_e4m3fn", 1)
    latents = scaled.rounded(text["latents"], "float8_e4m3fn", 1)
    ropes = scaled.rounded(text["ropes"], "bfloat16")
    seqs, length = keys.shape[:2]
    scored = indexer.dense_scores(text["index_q"], text["weights"], keys)
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (seqs, length))
    ends = jnp.full(seqs, length, jnp.int32)
    chosen = indexer.select(scored, places, places, ends, k)
    args = (queries(text, places), latents, ropes, 0.3)
    return latent.dense(*args, selected=chosen)


@pytest.mark.parametrize("k", [3, pytest.param(8, marks=pytest.mark.long)])
def test_a_sparse_layer_gives_in_every_cut_what_it_gives_without_a_cache(k, envs, lay):
    text = make_text(2, 10)
    tabs = (lay.table([[5, 2, 9], [0, 7, 3]]), lay.table([[1, 4, 8], [6, 11, 10]]))
    expected = dense(text, k)
    for chunks in [(10,), (4, 4, 2), (1,) * 10, (5, 1, 4), (3, 7)]:
        pages, at, outs = lay.poisoned(12, envs[0].nbytes), 0, []
        width = 1 if max(chunks) == 1 else 10
        for chunk in chunks:
            new = {n: lay.padded(text[n][:, at : at + chunk], width) for n in BY_TOKEN}
            args = (lay.ints(at, at), lay.ints(chunk, chunk))
            pages, out = layer(pages, envs, text | new, k, tabs, *args)
            outs.append(np.asarray(out)[:, :chunk])
            at += chunk
        out = np.concatenate(outs, 1)
        np.testing.assert_allclose(out, expected, atol=3e-5, err_msg=str(chunks))


@pytest.mark.parametrize("length", [1, pytest.param(16, marks=pytest.mark.long)])
def test_a_sparse_layer_copies_no_pool(length, envs, lay, pool_copies):
    pages, text = lay.poisoned(8192, envs[0].nbytes), make_text(4, length)
    tabs = [lay.table(np.arange(32).reshape(4, 8) + 32 * i) for i in (0, 1)]
    ends = (lay.ints(*[3] * 4), lay.ints(*[length] * 4))
    compiled = layer.lower(pages, envs, text, 3, tuple(tabs), *ends).compile()
    assert pool_copies(compiled, pages, spare_nbytes=1024 * 1024) == []
