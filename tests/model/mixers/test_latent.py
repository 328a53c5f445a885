import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.errors import IncompatiblePlan
from kvmem.geometry import kinds
from kvmem.model.mixers import indexer, latent
from kvmem.model.mixers.latent import Queries

G, N, C, R, V = 4, 6, 128, 8, 5  # heads; nope, latent, rope and value elements
SCALE = 0.21
TOKENS = ("nope", "rope", "latents", "ropes")


def layers(dtype="float32", fp8=False, window=None):
    sizes = dict(rank=C, rope_dim=R, scale=SCALE, dtype=dtype, fp8=fp8, window=window)
    return [kinds.latent(f"l{i}", i, **sizes) for i in range(2)]


def make_text(seqs=2, length=6, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape, size=1.0):
        return size * rng.standard_normal(shape).astype(np.float32)

    return dict(
        nope=normal(seqs, length, G, N),
        rope=normal(seqs, length, G, R),
        latents=normal(seqs, length, C),
        ropes=normal(seqs, length, R),
        w_uk=normal(G, N, C, size=0.2),
        w_uv=normal(G, V, C, size=0.2),
    )


def reference(text, window=None, selected=None):
    """Every head's keys and values made, softmax token by token, in float64."""
    text = {name: x.astype(float) for name, x in text.items()}
    seqs, length = text["latents"].shape[:2]
    out = np.zeros((seqs, length, G, V))
    for s, n, head in np.ndindex(seqs, length, G):
        seen = range(0 if window is None else max(0, n - window + 1), n + 1)
        if selected is not None:
            seen = [m for m in seen if m in selected[s][n]]
        if not seen:
            continue
        scores, values = [], []
        for m in seen:
            row = text["latents"][s, m]
            score = text["nope"][s, n, head] @ (text["w_uk"][head] @ row)
            score += text["rope"][s, n, head] @ text["ropes"][s, m]
            scores.append(score * SCALE)
            values.append(text["w_uv"][head] @ row)
        weights = np.exp(np.array(scores) - max(scores))
        out[s, n, head] = weights @ np.array(values) / weights.sum()
    return out


@functools.partial(jax.jit, static_argnums=(1, 2, 8), donate_argnums=0)
def step(pages, env, layer, text, selected, tab, starts, num_new, window=None):
    rows = (text["latents"], text["ropes"])
    pages = latent.write_rows(pages, env, layer, *rows, tab, starts, num_new)
    width = rows[0].shape[1]
    positions = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    heads = (text["w_uk"], text["w_uv"])
    queries = Queries(text["nope"], text["rope"], positions, *heads)
    end = starts + num_new
    args = (queries, tab, end, SCALE, window, selected)
    return pages, latent.attend_written(pages, env, layer, *args)


def run(lay, pages, env, text, tab, chunks, width=None, window=None, selected=None):
    """Feed a text in chunks, all padded to `width` with NaN."""
    outs, at, seqs, width = [], 0, len(tab.pages), width or max(chunks)
    for chunk in chunks:
        part = {n: lay.padded(text[n][:, at : at + chunk], width) for n in TOKENS}
        part = text | part
        chosen = None
        if selected is not None:
            chosen = np.full((seqs, width, selected.shape[2]), indexer.ABSENT, np.int32)
            chosen[:, :chunk] = selected[:, at : at + chunk]
        args = (lay.ints(*[at] * seqs), lay.ints(*[chunk] * seqs), window)
        pages, out = step(pages, env, "l1", part, chosen, tab, *args)
        outs.append(np.asarray(out)[:, :chunk])
        at += chunk
    return pages, np.concatenate(outs, axis=1)


@pytest.fixture(scope="module")
def env(lay):
    return lay.page_of(layers())


@pytest.fixture(scope="module")
def text():
    return make_text()


@pytest.fixture
def tab(lay):
    return lay.table([[5, 2], [0, 7]])


def test_every_cut_of_a_text_gives_attention_with_made_keys(lay, env, text, tab):
    expected = reference(text)
    for chunks in lay.cuts(6):
        pages = lay.poisoned(8, env.nbytes)
        _, out = run(lay, pages, env, text, tab, chunks, width=6)
        np.testing.assert_allclose(out, expected, atol=3e-6, err_msg=str(chunks))


@pytest.mark.parametrize("chunks", [(1,) * 6, (6,), (4, 2)])
def test_the_width_of_a_step_changes_nothing(chunks, lay, env, text, tab):
    _, out = run(lay, lay.poisoned(8, env.nbytes), env, text, tab, chunks)
    np.testing.assert_allclose(out, reference(text), atol=3e-6)


def test_the_dense_pass_makes_the_keys_and_gives_the_same(text):
    places = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    heads = (text["w_uk"], text["w_uv"])
    queries = Queries(text["nope"], text["rope"], places, *heads)
    rows = (text["latents"], text["ropes"])
    for window in (None, 3):
        out = latent.dense(queries, *rows, SCALE, window)
        np.testing.assert_allclose(out, reference(text, window), atol=3e-6)


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ["head_major", "token_major", "slot_major"])
@pytest.mark.parametrize("dtype,fp8", [("bfloat16", False), ("bfloat16", True)])
def test_narrow_rows_in_any_order_give_attention_over_what_is_kept(
    order, dtype, fp8, lay, text, tab
):
    env = lay.page_of(layers(dtype, fp8), order=order)
    kept = dict(text)
    wide = lay.narrowed(text["latents"], "float8_e4m3fn", 128)
    kept["latents"] = wide if fp8 else lay.narrowed(text["latents"], dtype)
    kept["ropes"] = lay.narrowed(text["ropes"], dtype)
    pages = lay.poisoned(8, env.nbytes)
    _, out = run(lay, pages, env, text, tab, (3, 1, 2))
    np.testing.assert_allclose(out, reference(kept), atol=2e-5)
    worst = np.abs(out - reference(text)).max()
    assert 1e-4 < worst < (0.2 if fp8 else 0.05)


def test_an_fp8_record_is_512_values_4_scales_and_64_rotated_elements(lay):
    """The 656 bytes a token of DeepSeek-V3.2's sparse attention."""
    spec = kinds.latent("l0", 0, rank=512, rope_dim=64, scale=1.0, fp8=True)
    env = lay.page_of([spec], order="layer token field head", page_size=4)
    assert env.nbytes == 4 * 656
    rng = np.random.default_rng(2)
    row = rng.standard_normal((1, 3, 576)).astype(np.float32)
    before = rng.integers(0, 256, (2, env.nbytes), np.uint8)
    args = (row[..., :512], row[..., 512:], lay.table([[1, 0]]))
    after = latent.write_rows(
        jnp.asarray(before), env, "l0", *args, lay.ints(2), lay.ints(3)
    )
    expected = before.copy()
    for i, (page, slot) in enumerate([(1, 2), (1, 3), (0, 0)]):
        scales = np.abs(row[0, i, :512].reshape(4, 128)).max(1) * np.float32(1 / 448)
        values = row[0, i, :512].reshape(4, 128) / scales[:, None]
        record = values.astype(jnp.float8_e4m3fn).tobytes()
        record += scales.tobytes() + row[0, i, 512:].astype(jnp.bfloat16).tobytes()
        expected[page, 656 * slot : 656 * slot + 656] = np.frombuffer(record, np.uint8)
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_window_sees_its_last_tokens_alone(window, lay, text, tab):
    env = lay.page_of(layers(window=window))
    for chunks in ((6,), (2, 1, 3), (1,) * 6):
        args = (lay.poisoned(8, env.nbytes), env, text, tab)
        _, out = run(lay, *args, chunks, width=6, window=window)
        np.testing.assert_allclose(out, reference(text, window), atol=3e-6)


@pytest.mark.case("SWA-02")
def test_a_table_that_begins_at_the_window_reads_and_writes_its_own_pages(lay):
    env = lay.page_of(layers(window=8))
    text = make_text(length=14)
    pages = lay.poisoned(8, env.nbytes)
    full = lay.table([[5, 2, 1, 3], [0, 7, 4, 6]])
    pages, _ = run(lay, pages, env, text, full, (12,), window=8)
    before = np.asarray(pages)
    part = text | {n: text[n][:, 12:] for n in TOKENS}
    late = lay.table([[2, 1, 3], [7, 4, 6]], first=[1, 1])
    args = (lay.ints(12, 12), lay.ints(2, 2), 8)
    after, out = step(pages, env, "l1", part, None, late, *args)
    np.testing.assert_allclose(out, reference(text, 8)[:, 12:], atol=3e-6)
    changed = (np.asarray(after) != before).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(changed), [3, 6])


def choose(seqs, length, k, seed=6):
    """Random positions that each query may see, ascending, ABSENT behind."""
    rng = np.random.default_rng(seed)
    chosen = np.full((seqs, length, k), indexer.ABSENT, np.int32)
    for s, n in np.ndindex(seqs, length):
        count = min(k, n + 1)
        chosen[s, n, :count] = np.sort(rng.permutation(n + 1)[:count])
    return chosen


@pytest.mark.parametrize("chunks", [(6,), (1,) * 6, (3, 1, 2)])
def test_a_query_reads_the_tokens_that_were_selected(chunks, lay, env, text, tab):
    chosen = choose(2, 6, 3)
    expected = reference(text, selected=chosen)
    pages = lay.poisoned(8, env.nbytes)
    _, out = run(lay, pages, env, text, tab, chunks, selected=chosen)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    assert np.abs(expected - reference(text)).max() > 0.1


def test_selection_and_window_combine(lay, text, tab):
    env = lay.page_of(layers(window=3))
    chosen = choose(2, 6, 6)  # all that a query sees
    for chunks in ((6,), (5, 1)):
        pages = lay.poisoned(8, env.nbytes)
        rest = dict(window=3, selected=chosen)
        _, out = run(lay, pages, env, text, tab, chunks, **rest)
        np.testing.assert_allclose(out, reference(text, 3), atol=3e-6)


def test_a_table_that_begins_late_reads_selected_positions_of_its_own(lay):
    env = lay.page_of(layers(window=8))
    text, pages = make_text(length=14), lay.poisoned(8, env.nbytes)
    full = lay.table([[5, 2, 1, 3], [0, 7, 4, 6]])
    pages, _ = run(lay, pages, env, text, full, (12,), window=8)
    late = lay.table([[2, 1, 3], [7, 4, 6]], first=[1, 1])
    part = text | {n: text[n][:, 12:] for n in TOKENS}
    chosen = np.tile(lay.ints(0, 6, 9), (2, 2, 1))  # 0 is in no page of the table
    args = (late, lay.ints(12, 12), lay.ints(2, 2), 8)
    _, out = step(pages, env, "l1", part, chosen, *args)
    expected = reference(text, 8, selected=[[{0, 6, 9}] * 14] * 2)
    np.testing.assert_allclose(out, expected[:, 12:], atol=3e-6)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_query_that_selects_nothing_gives_zeros(steps, lay, env, text, tab):
    pages, _ = run(lay, lay.poisoned(8, env.nbytes), env, text, tab, (4,))
    part = text | {n: text[n][:, 4 : 4 + steps] for n in TOKENS}
    chosen = np.full((2, steps, 3), indexer.ABSENT, np.int32)
    args = (tab, lay.ints(4, 4), lay.ints(steps, steps))
    _, out = step(pages, env, "l1", part, chosen, *args)
    np.testing.assert_array_equal(out, np.zeros_like(out))


def test_one_query_reads_no_row_that_was_not_selected(lay, env, text, tab):
    pages, _ = run(lay, lay.poisoned(8, env.nbytes), env, text, tab, (5,))
    chosen = np.full((2, 1, 3), indexer.ABSENT, np.int32)
    chosen[:, 0, :2] = [1, 5]
    for entry in env.entries_of("l1", "latent"):  # positions 0, 2, 3 become NaN
        for slot in (0, 2, 3):
            at = entry.address(slot)
            pages = pages.at[lay.ints(5, 0), at : at + entry.nbytes].set(0xFF)
    part = text | {n: text[n][:, 5:] for n in TOKENS}
    args = (tab, lay.ints(5, 5), lay.ints(1, 1))
    _, out = step(pages, env, "l1", part, chosen, *args)
    expected = reference(text, selected=[[{1, 5, n} for n in range(6)]] * 2)
    np.testing.assert_allclose(out, expected[:, 5:], atol=3e-6)


def test_a_row_without_tokens_writes_nothing_and_gives_zeros(lay, env, text):
    before = np.random.default_rng(3).integers(0, 256, (8, env.nbytes), np.uint8)
    args = (lay.table([[5, 2], [8, 8]]), lay.ints(0, 0), lay.ints(0, 0))
    after, out = step(jnp.asarray(before), env, "l1", text, None, *args)
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(out, np.zeros_like(out))


@pytest.mark.parametrize("null", [-1, 8, 2**31 - 1])
def test_a_page_outside_the_pool_drops_its_writes_and_reads_as_zeros(
    null, lay, env, text
):
    before = np.random.default_rng(3).integers(0, 256, (8, env.nbytes), np.uint8)
    args = (lay.table([[null] * 2] * 2), lay.ints(0, 0), lay.ints(6, 6))
    after, out = step(jnp.asarray(before), env, "l1", text, None, *args)
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(out, np.zeros_like(out))


def test_tokens_past_the_end_of_the_table_are_dropped(lay, env, text):
    before = np.random.default_rng(3).integers(0, 256, (8, env.nbytes), np.uint8)
    args = (lay.table([[5], [0]]), lay.ints(2, 2), lay.ints(6, 6))
    after, _ = step(jnp.asarray(before), env, "l1", text, None, *args)
    changed = (np.asarray(after) != before).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(changed), [0, 5])


def test_a_layer_writes_its_own_bytes_alone(lay, env, text, tab):
    before = np.random.default_rng(3).integers(0, 256, (8, env.nbytes), np.uint8)
    after, _ = run(lay, jnp.asarray(before), env, text, tab, (6,))
    expected = before.copy()
    (entry,) = env.entries_of("l1", "latent")
    for s, n in np.ndindex(2, 6):
        at, page = entry.address(n % 4), np.asarray(tab.pages)[s, n // 4]
        row = np.concatenate([text["latents"][s, n], text["ropes"][s, n]])
        raw = np.frombuffer(row.tobytes(), np.uint8)
        expected[page, at : at + len(raw)] = raw
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_ranks_hold_equal_rows_and_their_heads_sum_to_the_whole(tp, lay, text, tab):
    env = lay.page_of(layers(), tp=tp)
    project = np.random.default_rng(4).standard_normal((G, V, 7)).astype(np.float32)
    cut = {n: np.stack(np.split(text[n], tp, 2)) for n in ("nope", "rope")}
    cut |= {n: np.stack(np.split(text[n], tp, 0)) for n in ("w_uk", "w_uv")}
    whole = {n: text[n] for n in ("latents", "ropes")}
    ends = (lay.ints(0, 0), lay.ints(6, 6))

    def rank(pages, heads, project):
        pages, out = step(pages, env, "l1", whole | heads, None, tab, *ends)
        out = jnp.einsum("sqgv,gvd->sqd", out, project)
        return pages, jax.lax.psum(out, "tp")

    pages = lay.poisoned(8, env.nbytes, ranks=tp)
    project_of = project.reshape(tp, G // tp, V, 7)
    pages, out = jax.vmap(rank, axis_name="tp")(pages, cut, project_of)
    expected = np.einsum("sqgv,gvd->sqd", reference(text), project)
    np.testing.assert_allclose(out[0], expected, atol=2e-5)
    np.testing.assert_array_equal(pages, np.stack([pages[0]] * tp))


@pytest.mark.cover(1)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "seqs,length,chosen", [(1, 1, True), (1, 1, False), (8, 16, 0)]
)
def test_tokens_are_written_in_place(fp8, seqs, length, chosen, lay, pool_copies):
    env = lay.page_of(layers("bfloat16", fp8))
    pages, text = lay.poisoned(4096, env.nbytes), make_text(seqs, length)
    tab = lay.table(np.arange(8 * seqs).reshape(seqs, 8))
    selected = np.zeros((seqs, length, 3), np.int32) if chosen else None
    ends = (lay.ints(*[3] * seqs), lay.ints(*[length] * seqs))
    compiled = step.lower(pages, env, "l1", text, selected, tab, *ends).compile()
    assert pool_copies(compiled, pages, spare_nbytes=1024 * 1024) == []


def test_rows_of_another_width_are_refused(lay, env, text, tab):
    wrong = text | {"latents": text["latents"][..., :64]}
    with pytest.raises(IncompatiblePlan, match="1 rows of 136 elements"):
        step(
            lay.poisoned(8, env.nbytes),
            env,
            "l1",
            wrong,
            None,
            tab,
            lay.ints(0, 0),
            lay.ints(6, 6),
        )
