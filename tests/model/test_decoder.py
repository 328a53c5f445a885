import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvmem.geometry import Rope, Topology, envelope, group_layers
from kvmem.model.decoder import Decoder
from kvmem.pool.table import GroupTable

GOLDEN_PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
GOLDEN = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32]
GOLDEN += [33, 29, 34, 34, 216, 33, 34, 42, 33, 34, 42, 37, 35, 30, 2]


def page_of(spec, page_size):
    (group,) = group_layers(spec.layer_specs(), page_size)
    return envelope.build(group, Topology(), 0)


def poisoned(num_pages, env):
    return jnp.full((num_pages, env.nbytes), 0xFF, jnp.uint8)


def ints(*values):
    return np.array(values, np.int32)


def compiled(decoder, env):
    """The decoder's paged step: (weights, pages, tokens, starts, num_new, table)."""
    graph, weights = nnx.split(decoder)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(weights, pages, *batch):
        tokens, starts, num_new, table = batch
        model = nnx.merge(graph, weights)
        tables = (GroupTable(table, jnp.zeros_like(starts)),)
        return model.paged(pages, (env,), tokens, starts, num_new, tables)

    return functools.partial(step, weights)


def dense_of(decoder, tokens):
    """The decoder's dense pass, compiled as one program."""
    graph, weights = nnx.split(decoder)
    dense = jax.jit(lambda weights, tokens: nnx.merge(graph, weights).dense(tokens))
    return np.asarray(dense(weights, tokens))


def by_hand(spec, params, tokens):
    """Logits [n, V] of one text by plain numpy, in float64: the judge of `dense`."""
    p = {name: array.astype(float) for name, array in params.items()}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps) * weight

    def rope(x):  # [n, heads, D]
        half = spec.head_dim // 2
        turn = np.arange(len(x))[:, None, None] * spec.rope.theta ** (
            -np.arange(half) / half
        )
        pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turn)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = p["model.embed_tokens.weight"][tokens]
    mask = np.where(np.tri(len(x), dtype=bool), 0.0, -np.inf)
    for i in range(spec.layers):
        at = {n.split(".", 3)[3]: a for n, a in p.items() if f"layers.{i}." in n}
        h = norm(x, at["input_layernorm.weight"])
        q, k, v = (
            (
                h @ at[f"self_attn.{name}_proj.weight"].T
                + at.get(f"self_attn.{name}_proj.bias", 0.0)
            ).reshape(len(x), -1, spec.head_dim)
            for name in "qkv"
        )
        if spec.qk_norm:
            q = norm(q, at["self_attn.q_norm.weight"])
            k = norm(k, at["self_attn.k_norm.weight"])
        q, k = rope(q), rope(k)
        heads = []
        for head in range(spec.heads):
            shared = head * spec.kv_heads // spec.heads
            scores = q[:, head] @ k[:, shared].T * spec.head_dim**-0.5 + mask
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(heads, -1) @ at["self_attn.o_proj.weight"].T
        h = norm(x, at["post_attention_layernorm.weight"])
        gate, up = (h @ at[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ at["mlp.down_proj.weight"].T
    head = p["model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"]
    return norm(x, p["model.norm.weight"]) @ head.T


@pytest.fixture(scope="module")
def small(decoder_spec, decoder_params):
    """A spec, its decoder, and texts [3, 24] with their dense logits."""
    spec = decoder_spec()
    decoder = Decoder.from_params(spec, decoder_params(spec))
    texts = np.random.default_rng(7).integers(0, spec.vocab, (3, 24)).astype(np.int32)
    return spec, decoder, texts, dense_of(decoder, texts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(qkv_bias=True, heads=6, kv_heads=2),
        dict(qk_norm=True, rope=Rope(theta=500.0)),
        dict(tie_embeddings=False, kv_heads=4),
    ],
)
def test_dense_logits_are_those_computed_by_hand(changes, decoder_spec, decoder_params):
    spec = decoder_spec(**changes)
    params = decoder_params(spec)
    tokens = np.random.default_rng(1).integers(0, spec.vocab, 9).astype(np.int32)
    logits = dense_of(Decoder.from_params(spec, params), tokens[None])
    np.testing.assert_allclose(logits[0], by_hand(spec, params, tokens), atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
def test_chunked_prefill_at_every_boundary_equals_dense(page_size, small):
    spec, decoder, texts, dense = small
    env = page_of(spec, page_size)
    step = compiled(decoder, env)
    width = -(-24 // page_size)
    order = np.random.default_rng(page_size).permutation(width + 3).astype(np.int32)
    table = order[None, :width]
    for cut in range(1, 24):
        pages = poisoned(width + 3, env)
        for start, end in ((0, cut), (cut, 24)):
            tokens = np.full((1, 23), 66, np.int32)
            tokens[0, : end - start] = texts[0, start:end]
            pages, logits = step(pages, tokens, ints(start), ints(end - start), table)
            np.testing.assert_allclose(logits[0], dense[0, end - 1], atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
def test_batches_of_random_lengths_equal_dense(page_size, small):
    spec, decoder, texts, dense = small
    env = page_of(spec, page_size)
    step = compiled(decoder, env)
    width = -(-24 // page_size)
    rng = np.random.default_rng(page_size)
    pages = poisoned(3 * width + 1, env)
    table = rng.permutation(3 * width + 1)[: 3 * width].astype(np.int32)
    table = table.reshape(3, width)
    done = np.zeros(3, np.int32)
    while (done < 24).any():
        new = np.minimum(rng.integers(0, 7, 3), 24 - done).astype(np.int32)
        tokens = np.zeros((3, 6), np.int32)
        for row in range(3):
            tokens[row, : new[row]] = texts[row, done[row] : done[row] + new[row]]
        pages, logits = step(pages, tokens, done, new, table)
        done = done + new
        for row in np.flatnonzero(new):
            np.testing.assert_allclose(
                logits[row], dense[row, done[row] - 1], atol=1e-4
            )


def test_rows_poisoned_with_nan_do_not_reach_their_batch_mates(small):
    spec, decoder, texts, dense = small
    env = page_of(spec, 8)
    step = compiled(decoder, env)
    table = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 9, 9]], np.int32)
    pages, tokens = poisoned(9, env), np.zeros((4, 12), np.int32)
    tokens[1] = texts[1, :12]
    # Rows 0 and 2 read NaN that nobody wrote as if it were their text; row 3 is unused.
    starts, num_new = ints(5, 0, 20, 0), ints(1, 12, 1, 0)
    pages, logits = step(pages, tokens, starts, num_new, table)
    assert np.isnan(logits[0]).all() and np.isnan(logits[2]).all()
    np.testing.assert_allclose(logits[1], dense[1, 11], atol=1e-4)
    assert np.isfinite(logits[3]).all()


def test_bfloat16_weights_give_nearly_the_same_logits(decoder_spec, decoder_params):
    spec = decoder_spec()
    params = decoder_params(spec)
    tokens = np.arange(9, dtype=np.int32)[None]
    half = Decoder.from_params(spec, params, dtype="bfloat16")
    assert half.layers[0].qkv[...].dtype == jnp.bfloat16
    full = dense_of(Decoder.from_params(spec, params), tokens)
    np.testing.assert_allclose(dense_of(half, tokens), full, atol=0.1)


@pytest.mark.parametrize("seqs", [1, 8])
def test_a_decode_step_copies_no_pool(seqs, small, pool_copies):
    spec, decoder, _, _ = small
    env = page_of(spec, 16)
    pages = poisoned(2048, env)
    step = compiled(decoder, env)
    table = np.arange(2 * seqs, dtype=np.int32).reshape(seqs, 2)
    args = (np.zeros((seqs, 1), np.int32), ints(*[9] * seqs), ints(*[1] * seqs), table)
    program = step.func.lower(*step.args, pages, *args).compile()
    seen = 2 * (16 * table.shape[1]) * spec.kv_heads * spec.head_dim  # one layer's KV
    activations = 4 * seqs * (2 * spec.vocab + 4 * spec.mlp + seen)
    spare = seqs * env.nbytes + activations
    assert pool_copies(program, pages, spare) == []


@pytest.mark.long
def test_smollm2_continues_as_the_reference_and_copies_no_pool(smollm2, pool_copies):
    decoder = Decoder.from_params(smollm2.spec, smollm2.params)
    env = page_of(smollm2.spec, 16)
    step = compiled(decoder, env)
    pages = poisoned(32, env)
    table = np.array([[5, 9, 7]], np.int32)
    prompt = np.array([GOLDEN_PROMPT], np.int32)
    pages, logits = step(pages, prompt, ints(0), ints(5), table)
    assert float(logits[0, 7042]) == pytest.approx(17.3713, abs=2e-3)
    out = [int(logits[0].argmax())]
    for start in range(5, 34):
        token = np.array([[out[-1]]], np.int32)
        pages, logits = step(pages, token, ints(start), ints(1), table)
        out.append(int(logits[0].argmax()))
    assert out == GOLDEN
    args = (token, ints(9), ints(1), table)
    program = step.func.lower(*step.args, pages, *args).compile()
    activations = 4 * (2 * smollm2.spec.vocab + 8 * smollm2.spec.mlp)
    assert pool_copies(program, pages, env.nbytes + activations) == []
