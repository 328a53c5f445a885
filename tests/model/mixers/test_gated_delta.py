import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.errors import IncompatiblePlan
from kvmem.geometry import kinds
from kvmem.model.mixers import gated_delta
from kvmem.model.mixers.gated_delta import Inputs

H, W, N, V, C = 2, 4, 6, 5, 4  # key heads, value heads, widths, taps
BY_TOKEN = ("q", "k", "v", "g", "beta")


def layers(heads=(H, W), kernel=C, **dtypes):
    sizes = dict(key_heads=heads[0], value_heads=heads[1], key_dim=N, value_dim=V)
    rest = dict(conv_kernel=kernel) | dict(conv_dtype="float32") | dtypes
    return [kinds.gated_delta(f"l{i}", i, **sizes, **rest) for i in range(2)]


def make_text(seqs=2, length=6, kernel=C, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return dict(
        q=normal(seqs, length, H, N),
        k=normal(seqs, length, H, N),
        v=normal(seqs, length, W, V),
        g=-rng.random((seqs, length, W)).astype(np.float32),
        beta=rng.random((seqs, length, W)).astype(np.float32),
        conv_q=normal(H, N, kernel),
        conv_k=normal(H, N, kernel),
        conv_v=normal(W, V, kernel),
    )


def reference(text, length=None):
    """The rule as written, in float64: outputs, the matrix and the tails after it."""
    text = {name: x.astype(float) for name, x in text.items()}
    seqs, steps = text["q"].shape[:2]
    steps = steps if length is None else length
    taps = text["conv_q"].shape[-1]
    out = np.zeros((seqs, steps, W, V))
    matrix = np.zeros((seqs, W, N, V))
    for s in range(seqs):
        for t in range(steps):
            row = {}
            for name in ("q", "k", "v"):
                total = np.zeros(text[name].shape[2:])
                for tap in range(taps):
                    at = t - (taps - 1) + tap
                    if at >= 0:
                        total += text[f"conv_{name}"][..., tap] * text[name][s, at]
                row[name] = total / (1 + np.exp(-total))
            for w in range(W):
                q, k = row["q"][w // (W // H)], row["k"][w // (W // H)]
                q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(N)
                k = k / np.sqrt(k @ k + 1e-6)
                beta, decay = text["beta"][s, t, w], np.exp(text["g"][s, t, w])
                forget = np.eye(N) - beta * np.outer(k, k)
                matrix[s, w] = decay * forget @ matrix[s, w]
                matrix[s, w] += beta * np.outer(k, row["v"][w])
                out[s, t, w] = matrix[s, w].T @ q
    tails = {}
    for name in ("q", "k", "v"):
        line = np.pad(text[name][:, :steps], ((0, 0), (taps - 1, 0), (0, 0), (0, 0)))
        tails[f"conv_{name}"] = np.moveaxis(line[:, steps:], 1, 3)
    return out, matrix, tails


@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=0)
def step(pages, env, layer, inputs, table, starts, num_new):
    return gated_delta.mix(pages, env, layer, inputs, table, starts, num_new)


def chunk_of(lay, text, begin, end, width):
    rows = {n: lay.padded(text[n][:, begin:end], width) for n in BY_TOKEN}
    return Inputs(**(text | rows))


def run(lay, pages, env, text, tab, chunks, layer="l1", width=None, at=0):
    """Feed a text in chunks, all padded to `width` with NaN."""
    outs, seqs = [], len(tab.pages)
    for chunk in chunks:
        inputs = chunk_of(lay, text, at, at + chunk, width or max(chunks))
        args = (lay.ints(*[at] * seqs), lay.ints(*[chunk] * seqs))
        pages, out = step(pages, env, layer, inputs, tab, *args)
        outs.append(np.asarray(out)[:, :chunk])
        at += chunk
    return pages, np.concatenate(outs, axis=1)


def state_in(pages, env, layer, ids):
    """The fields of a state, sliced out of its pages: {name: [S, H, elements]}."""
    found = {}
    for entry in env.entries:
        if entry.field.layer == layer:
            raw = np.asarray(pages)[ids[:, entry.extent]]
            raw = np.ascontiguousarray(
                raw[:, entry.offset : entry.offset + entry.nbytes]
            )
            rows = raw.view(np.float32).reshape(len(ids), entry.nheads, -1)
            found.setdefault(entry.field.name, []).append(rows)
    return {name: np.concatenate(rows, axis=1) for name, rows in found.items()}


@pytest.fixture
def env(lay):
    return lay.page_of(layers())


@pytest.fixture(scope="module")
def text():
    return make_text()


def test_every_cut_of_a_text_gives_the_outputs_of_the_rule(lay, env, text):
    tab = lay.table([[2], [0]])
    expected = reference(text)[0]
    for chunks in lay.cuts(6):
        pages = lay.poisoned(3, env.nbytes)
        _, out = run(lay, pages, env, text, tab, chunks, width=6)
        np.testing.assert_allclose(out, expected, atol=3e-6, err_msg=str(chunks))


@pytest.mark.parametrize("chunks", [(1,) * 6, (6,), (4, 2), (3, 3)])
def test_the_width_of_a_step_changes_nothing(chunks, lay, env, text):
    pages = lay.poisoned(3, env.nbytes)
    _, out = run(lay, pages, env, text, lay.table([[1], [2]]), chunks)
    np.testing.assert_allclose(out, reference(text)[0], atol=3e-6)


def test_the_dense_pass_follows_the_rule(text):
    out = gated_delta.dense(Inputs(**text))
    np.testing.assert_allclose(out, reference(text)[0], atol=3e-6)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_state_stands_after_its_tokens_and_not_one_further(length, lay, env, text):
    """A boundary at `length`: what follows in the padded step is not in the state."""
    ids = lay.ints([2], [0])
    full = Inputs(**text)  # the rows behind num_new are the text's own next tokens
    args = (lay.table(ids), lay.ints(0, 0), lay.ints(length, length))
    pages, _ = step(lay.poisoned(3, env.nbytes), env, "l1", full, *args)
    _, matrix, tails = reference(text, length)
    found = state_in(pages, env, "l1", ids)
    np.testing.assert_allclose(found["ssm"], matrix.reshape(2, W, -1), atol=3e-6)
    for name, tail in tails.items():
        np.testing.assert_array_equal(found[name], tail.reshape(*tail.shape[:2], -1))
    one_further = reference(text, length + 1)[1].reshape(2, W, -1)
    assert np.abs(found["ssm"] - one_further).max() > 1e-2


def test_a_snapshot_at_a_boundary_continues_either_way(lay, env, text):
    pages = lay.poisoned(6, env.nbytes)
    pages, _ = run(lay, pages, env, text, lay.table([[2], [0]]), (4,))
    pages = pages.at[np.array([3, 5])].set(pages[np.array([2, 0])])  # snapshots
    other = {n: x.copy() for n, x in text.items()}
    for name in BY_TOKEN:
        other[name][:, 4:] = make_text(seed=9)[name][:, 4:]
    pages, _ = run(lay, pages, env, text, lay.table([[2], [0]]), (2,), at=4)
    kept = np.asarray(pages[np.array([3, 5])])
    pages = pages.at[np.array([1, 4])].set(pages[np.array([3, 5])])  # restored
    pages, out = run(lay, pages, env, other, lay.table([[1], [4]]), (1, 1), at=4)
    np.testing.assert_allclose(out, reference(other)[0][:, 4:], atol=3e-6)
    np.testing.assert_array_equal(pages[np.array([3, 5])], kept)


def test_sequences_of_a_step_stand_at_different_lengths(lay, env, text):
    tab, pages = lay.table([[2], [0]]), lay.poisoned(3, env.nbytes)
    outs, at = [[], []], [0, 0]
    for news in ((3, 1), (0, 2), (2, 0), (1, 3)):
        inputs = dict(text)
        for name in BY_TOKEN:
            parts = [text[name][s : s + 1, at[s] : at[s] + news[s]] for s in (0, 1)]
            inputs[name] = np.concatenate([lay.padded(part, 3) for part in parts])
        args = (Inputs(**inputs), tab, lay.ints(*at), lay.ints(*news))
        pages, out = step(pages, env, "l1", *args)
        for s in (0, 1):
            outs[s].append(np.asarray(out)[s, : news[s]])
            at[s] += news[s]
    out = np.stack([np.concatenate(rows) for rows in outs])
    np.testing.assert_allclose(out, reference(text)[0], atol=3e-6)


def test_a_state_at_its_beginning_reads_as_zeros_whatever_lies_there(lay, env, text):
    junk = np.random.default_rng(3).integers(0, 256, (3, env.nbytes), np.uint8)
    _, out = run(lay, jnp.asarray(junk), env, text, lay.table([[2], [0]]), (6,))
    np.testing.assert_allclose(out, reference(text)[0], atol=3e-6)


def test_a_row_without_tokens_changes_no_byte(lay, env, text):
    before = np.random.default_rng(3).integers(0, 256, (3, env.nbytes), np.uint8)
    inputs = chunk_of(lay, text, 0, 3, 3)
    args = (lay.table([[2], [0]]), lay.ints(4, 0), lay.ints(0, 0))
    after, _ = step(jnp.asarray(before), env, "l1", inputs, *args)
    np.testing.assert_array_equal(after, before)
    args = (lay.table([[2], [0]]), lay.ints(0, 0), lay.ints(0, 1))
    after, _ = step(jnp.asarray(before), env, "l1", inputs, *args)
    np.testing.assert_array_equal(after[1:], before[1:])
    assert (np.asarray(after[0]) != before[0]).any()


def test_a_layer_changes_its_own_bytes_alone(lay, env, text):
    before = np.random.default_rng(3).integers(0, 256, (3, env.nbytes), np.uint8)
    after, _ = run(lay, jnp.asarray(before), env, text, lay.table([[2], [0]]), (6,))
    mine = np.zeros(env.nbytes, bool)
    for entry in env.entries:
        if entry.field.layer == "l1":
            mine[entry.offset : entry.offset + entry.nbytes] = True
    np.testing.assert_array_equal(np.asarray(after)[:, ~mine], before[:, ~mine])
    np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize("null", [3, 2**31 - 1, -1])
def test_a_null_state_drops_its_writes_and_reads_as_zeros(null, lay, env, text):
    before = np.random.default_rng(3).integers(0, 256, (3, env.nbytes), np.uint8)
    tab, inputs = lay.table([[null], [null]]), Inputs(**text)
    args = (lay.ints(7, 7), lay.ints(6, 6))
    after, out = step(jnp.asarray(before), env, "l1", inputs, tab, *args)
    np.testing.assert_array_equal(after, before)
    np.testing.assert_allclose(out, reference(text)[0], atol=3e-6)


def test_padded_rows_give_finite_numbers(lay, env, text):
    pages = lay.poisoned(3, env.nbytes)
    inputs = chunk_of(lay, text, 0, 2, 6)
    args = (lay.table([[2], [0]]), lay.ints(0, 0), lay.ints(2, 2))
    _, out = step(pages, env, "l1", inputs, *args)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("order", ["head_major", "token_major"])
@pytest.mark.parametrize("extents", [2, 5])
def test_a_state_in_several_pages_is_the_same_state(order, extents, lay, text):
    whole = lay.page_of(layers(), order=order)
    nbytes = {2: -(-whole.nbytes // 32) * 16 + 160, 5: 512}[extents]
    env = lay.page_of(layers(), order=order, nbytes=nbytes)
    assert env.extents >= extents
    ids = np.random.default_rng(8).permutation(2 * env.extents).astype(np.int32)
    ids = ids.reshape(2, env.extents)
    pages = lay.poisoned(2 * env.extents, nbytes)
    pages, out = run(lay, pages, env, text, lay.table(ids), (3, 1, 2))
    np.testing.assert_allclose(out, reference(text)[0], atol=3e-6)
    found = state_in(pages, env, "l1", ids)
    np.testing.assert_allclose(
        found["ssm"], reference(text)[1].reshape(2, W, -1), atol=3e-6
    )


def test_states_that_are_narrower_cut_as_their_dense_pass_does(lay, text):
    env = lay.page_of(layers(conv_dtype="bfloat16"))
    dense = gated_delta.dense(Inputs(**text), "bfloat16")
    for chunks in ((6,), (2, 4), (1,) * 6):
        pages = lay.poisoned(3, env.nbytes)
        _, out = run(lay, pages, env, text, lay.table([[2], [0]]), chunks, width=6)
        np.testing.assert_allclose(out, dense, atol=3e-6)
    np.testing.assert_allclose(dense, reference(text)[0], atol=0.05)
    assert np.abs(dense - reference(text)[0]).max() > 1e-4


def test_a_convolution_of_one_tap_keeps_no_tail(lay):
    text = make_text(kernel=1)
    env = lay.page_of(layers(kernel=1))
    assert {entry.field.name for entry in env.entries} == {"ssm"}
    pages = lay.poisoned(3, env.nbytes)
    _, out = run(lay, pages, env, text, lay.table([[2], [0]]), (2, 1, 3))
    np.testing.assert_allclose(out, reference(text)[0], atol=3e-6)


@pytest.mark.parametrize("tp", [4, pytest.param(2, marks=pytest.mark.long)])
def test_the_ranks_hold_their_heads_and_sum_to_the_whole(tp, lay, text):
    env = lay.page_of(layers(), tp=tp)
    rng = np.random.default_rng(4)
    project = rng.standard_normal((W, V, 7)).astype(np.float32)
    cut = {}
    for name, rows in text.items():
        axis = 0 if name.startswith("conv") else 2
        heads = rows.shape[axis]
        copies = max(1, tp // heads)  # a key head that several ranks hold
        parts = np.split(rows, min(tp, heads), axis)
        cut[name] = np.stack([part for part in parts for _ in range(copies)])

    def rank(pages, inputs, project, start, new):
        pages, out = gated_delta.mix(pages, env, "l1", inputs, tab, start, new)
        out = jnp.einsum("sqwv,wvd->sqd", out, project)
        return pages, jax.lax.psum(out, "tp")

    tab = lay.table([[2], [0]])
    run = jax.jit(jax.vmap(rank, in_axes=(0, 0, 0, None, None), axis_name="tp"))
    pages, outs = lay.poisoned(3, env.nbytes, ranks=tp), []
    for at, end in ((0, 4), (4, 6)):
        part = {n: x[:, :, at:end] for n, x in cut.items() if n in BY_TOKEN}
        args = (project.reshape(tp, W // tp, V, 7), lay.ints(at, at))
        pages, out = run(
            pages, Inputs(**(cut | part)), *args, lay.ints(*[end - at] * 2)
        )
        outs.append(out[0])
    expected = np.einsum("sqwv,wvd->sqd", reference(text)[0], project)
    np.testing.assert_allclose(np.concatenate(outs, 1), expected, atol=2e-5)


@pytest.mark.parametrize("seqs,length", [(1, 1), (8, 1), (2, 16)])
def test_a_state_is_updated_in_place(seqs, length, lay, env, pool_copies):
    pages = lay.poisoned(4096, env.nbytes)
    inputs = Inputs(**make_text(seqs, length))
    tab = lay.table(np.arange(seqs)[:, None])
    args = (inputs, tab, lay.ints(*[3] * seqs), lay.ints(*[length] * seqs))
    compiled = step.lower(pages, env, "l1", *args).compile()
    assert pool_copies(compiled, pages, spare_nbytes=256 * 1024) == []


def test_the_gates_are_those_of_the_model():
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 2, 3, W)).astype(np.float32)
    a_log, dt_bias = rng.standard_normal((2, W)).astype(np.float32)
    g, beta = gated_delta.gates(a, b, a_log, dt_bias)
    np.testing.assert_allclose(g, -np.exp(a_log) * np.log1p(np.exp(a + dt_bias)), 1e-5)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-b)), 1e-5)


def test_a_table_that_names_some_extents_alone_is_refused(lay, text):
    env = lay.page_of(layers(), nbytes=512)
    args = (Inputs(**text), lay.table([[2], [0]]), lay.ints(0, 0), lay.ints(6, 6))
    with pytest.raises(IncompatiblePlan, match=f"stands in {env.extents} pages"):
        step(lay.poisoned(3, 512), env, "l1", *args)


def test_a_state_without_its_convolutions_is_refused(lay, text):
    env = lay.page_of(layers(kernel=1))
    args = (Inputs(**text), lay.table([[2], [0]]), lay.ints(0, 0), lay.ints(6, 6))
    with pytest.raises(IncompatiblePlan, match="conv_k, conv_q, conv_v, ssm"):
        step(lay.poisoned(3, env.nbytes), env, "l1", *args)


def test_heads_of_another_rank_are_refused(lay, env, text):
    inputs = dataclasses.replace(Inputs(**text), v=text["v"][:, :, :2])
    args = (inputs, lay.table([[2], [0]]), lay.ints(0, 0), lay.ints(6, 6))
    with pytest.raises(IncompatiblePlan, match="hold 4 rows of 30 elements"):
        step(lay.poisoned(3, env.nbytes), env, "l1", *args)


def test_value_heads_that_do_not_share_evenly_are_refused(lay, text):
    env = lay.page_of(layers(heads=(2, 3)))
    odd = {n: text[n][:, :, :3] for n in ("v", "g", "beta")}
    odd["conv_v"] = text["conv_v"][:3]
    args = (Inputs(**(text | odd)), lay.table([[2], [0]]), lay.ints(0, 0))
    with pytest.raises(IncompatiblePlan, match="3 value heads on 2 key heads"):
        step(lay.poisoned(3, env.nbytes), env, "l1", *args, lay.ints(6, 6))
