import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.errors import IncompatiblePlan
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers, np_dtype
from kvmem.model.attention import attend, attend_written

ORDERS = [*envelope.ORDERS, "head token layer field"]


def page_of(order="head_major", page_size=4, dtype="float32", **sizes):
    sizes = dict(kv_heads=2, head_dim=8) | sizes
    layers = [LayerSpec(f"l{i}", i, dtype=dtype, **sizes) for i in range(2)]
    (group,) = group_layers(layers, page_size)
    return envelope.build(group, Topology(), 0, order)


def poisoned(num_pages, env):
    """Pages full of NaN in every dtype."""
    return jnp.full((num_pages, env.nbytes), 0xFF, jnp.uint8)


def ints(*values):
    return np.array(values, np.int32)


def dense(q, k, v, starts):
    """Causal softmax in float64; row i of q stands at starts + i."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    group = q.shape[2] // k.shape[2]
    for s, i, head in np.ndindex(*q.shape[:3]):
        end = starts[s] + i + 1
        scores = k[s, :end, head // group].astype(float) @ q[s, i, head]
        scores /= np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[s, i, head] = weights @ v[s, :end, head // group] / weights.sum()
    return out


@pytest.fixture
def rows():
    """Make q, k, v of whole texts [S, n, heads, D]."""
    rng = np.random.default_rng(11)

    def make(seqs, length, q_heads=6, kv_heads=2, head_dim=8, v_head_dim=8):
        widths = ((q_heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim))
        return [
            rng.standard_normal((seqs, length, *w)).astype(np.float32) for w in widths
        ]

    return make


@functools.partial(jax.jit, static_argnames=("env", "layer", "scale"), donate_argnums=0)
def step(pages, env, layer, q, k, v, table, starts, num_new, scale=None):
    return attend(pages, env, layer, q, k, v, table, starts, num_new, scale)


read_only = jax.jit(attend_written, static_argnames=("envelope", "layer"))


def in_chunks(pages, env, layer, texts, table, chunks):
    """Feed the texts through `attend` in chunks, all padded to the longest."""
    at, outs, longest = 0, [], max(chunks)
    for chunk in chunks:
        part = [np.full_like(rows[:, :longest], np.nan) for rows in texts]
        for padded, rows in zip(part, texts, strict=True):
            padded[:, :chunk] = rows[:, at : at + chunk]
        seqs = len(table)
        starts, num_new = ints(*[at] * seqs), ints(*[chunk] * seqs)
        pages, out = step(pages, env, layer, *part, table, starts, num_new)
        outs.append(np.asarray(out)[:, :chunk])
        at += chunk
    return pages, np.concatenate(outs, axis=1)


@pytest.mark.parametrize(
    "order,dtype",
    [(order, "float32") for order in ORDERS]
    + [("head_major", "bfloat16"), ("head_major", "float16")]
    + [("packed_nhd", "bfloat16"), ("token_major", "float16")],
)
def test_chunks_of_any_length_equal_dense_attention(order, dtype, rows):
    env = page_of(order, page_size=4, dtype=dtype)
    q, k, v = rows(2, 8)
    table = np.array([[5, 2], [0, 7]], np.int32)
    _, out = in_chunks(poisoned(8, env), env, "l1", (q, k, v), table, (5, 2, 1))
    kept = [a.astype(np_dtype(dtype)).astype(np.float32) for a in (k, v)]
    np.testing.assert_allclose(out, dense(q, *kept, (0, 0)), atol=2e-6)


def test_tokens_one_by_one_equal_dense_attention(rows):
    env = page_of(page_size=4)
    q, k, v = rows(2, 6)
    table = np.array([[5, 2], [0, 7]], np.int32)
    _, out = in_chunks(poisoned(8, env), env, "l0", (q, k, v), table, (1,) * 6)
    np.testing.assert_allclose(out, dense(q, k, v, (0, 0)), atol=2e-6)


@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
def test_any_page_size_gives_the_same_output(page_size, rows):
    env = page_of(page_size=page_size)
    q, k, v = rows(1, 70)
    pages = -(-70 // page_size)
    table = np.random.default_rng(1).permutation(pages)[None].astype(np.int32)
    _, out = in_chunks(poisoned(pages, env), env, "l0", (q, k, v), table, (64, 6))
    np.testing.assert_allclose(out, dense(q, k, v, (0,)), atol=2e-6)


def test_keys_and_values_may_differ_in_width(rows):
    env = page_of(v_head_dim=5)
    q, k, v = rows(2, 6, v_head_dim=5)
    table = np.array([[1, 2], [0, 3]], np.int32)
    _, out = in_chunks(poisoned(4, env), env, "l0", (q, k, v), table, (4, 2))
    assert out.shape == (2, 6, 6, 5)
    np.testing.assert_allclose(out, dense(q, k, v, (0, 0)), atol=2e-6)


def test_a_layer_writes_its_own_bytes_alone(rows):
    env = page_of()
    before = np.random.default_rng(5).integers(0, 256, (4, env.nbytes), np.uint8)
    q, k, v = rows(1, 3)
    args = (q, k, v, np.array([[2, 0]], np.int32), ints(2), ints(3))
    after = np.asarray(step(jnp.asarray(before), env, "l1", *args)[0])
    expected = before.copy()
    for name, new in (("k", k), ("v", v)):
        for head, entry in enumerate(env.entries_of("l1", name)):
            for i, (page, slot) in enumerate([(2, 2), (2, 3), (0, 0)]):
                at = entry.address(slot)
                raw = new[0, i, head].tobytes()
                expected[page, at : at + len(raw)] = np.frombuffer(raw, np.uint8)
    np.testing.assert_array_equal(after, expected)


def test_a_page_longer_than_its_envelope_gives_the_same_output(rows):
    env = page_of(page_size=4, v_head_dim=4)
    longer = envelope.cut(env, env.nbytes + 48)
    q, k, v = rows(2, 8, v_head_dim=4)
    table = np.array([[5, 2], [0, 7]], np.int32)
    args = (longer, "l1", (q, k, v), table, (5, 2, 1))
    pages, out = in_chunks(poisoned(8, longer), *args)
    np.testing.assert_allclose(out, dense(q, k, v, (0, 0)), atol=2e-6)
    assert (np.asarray(pages)[:, env.nbytes :] == 0xFF).all()


def test_scale_replaces_the_inverse_root(rows):
    env = page_of()
    q, k, v = rows(1, 4)
    args = (k, v, np.array([[0]], np.int32), ints(0), ints(4))
    _, plain = step(poisoned(1, env), env, "l0", q * 2, *args)
    _, scaled = step(poisoned(1, env), env, "l0", q, *args, scale=2 * 8**-0.5)
    np.testing.assert_allclose(plain, scaled, atol=1e-6)


@pytest.mark.case("NAN-03")
def test_nan_in_the_slots_beyond_a_length_never_reaches_an_output(rows):
    env = page_of(page_size=8)
    q, k, v = rows(1, 5)
    table = np.array([[0]], np.int32)
    _, out = in_chunks(poisoned(1, env), env, "l0", (q, k, v), table, (5,))
    np.testing.assert_allclose(out, dense(q, k, v, (0,)), atol=1e-6)


def test_nan_in_whole_pages_beyond_a_length_never_reaches_an_output(rows):
    env = page_of(page_size=4)
    q, k, v = rows(2, 5)
    table = np.array([[0, 1, 2, 3], [4, 5, 9, -7]], np.int32)
    _, out = in_chunks(poisoned(6, env), env, "l0", (q, k, v), table, (4, 1))
    np.testing.assert_allclose(out, dense(q, k, v, (0, 0)), atol=1e-6)


def test_a_row_without_tokens_writes_nothing_and_gives_zeros(rows):
    env = page_of()
    q, k, v = rows(2, 3)
    before = np.asarray(poisoned(4, env)).copy()
    table = np.array([[1, 4], [4, 4]], np.int32)  # 4 is null
    pages, out = step(
        jnp.asarray(before), env, "l0", q, k, v, table, ints(0, 0), ints(0, 0)
    )
    np.testing.assert_array_equal(pages, before)
    np.testing.assert_array_equal(out, np.zeros_like(out))


def test_padded_rows_give_finite_numbers(rows):
    env = page_of()
    q, k, v = rows(1, 4)
    q[:, 2:], k[:, 2:], v[:, 2:] = 9e9, np.nan, np.nan
    args = (q, k, v, np.array([[1, 0]], np.int32), ints(0), ints(2))
    _, out = step(poisoned(2, env), env, "l0", *args)
    assert np.isfinite(out).all()
    expected = dense(q[:, :2], k[:, :2], v[:, :2], (0,))
    np.testing.assert_allclose(out[:, :2], expected, atol=1e-6)


@pytest.mark.case("IDX-01")
def test_a_page_past_the_end_reads_as_zeros_never_as_the_last_page(rows):
    env = page_of(page_size=4)
    pages = jnp.asarray(np.ones((6, env.nbytes // 4), np.float32).view(np.uint8))
    q, _, _ = rows(1, 1)
    table, positions = np.array([[1, 2, 6]], np.int32), np.array([[11]], np.int32)
    out = read_only(pages, env, "l0", q * 0, positions, table, ints(12))
    np.testing.assert_allclose(out, 8 / 12, atol=1e-6)  # 4 of 12 equal rows are zero


@pytest.mark.case("IDX-02")
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_a_page_id_outside_the_pool_drops_its_writes(bad, rows):
    env = page_of(page_size=4)
    before = np.random.default_rng(2).integers(0, 256, (4, env.nbytes), np.uint8)
    args = (*rows(1, 4), np.array([[bad]], np.int32), ints(0), ints(4))
    after, _ = step(jnp.asarray(before), env, "l0", *args)
    np.testing.assert_array_equal(after, before)


@pytest.mark.case("IDX-03")
def test_a_padded_row_is_dropped_and_leaves_the_last_page_alone(rows):
    env = page_of(page_size=4)
    before = np.random.default_rng(2).integers(0, 256, (4, env.nbytes), np.uint8)
    table = np.array([[0], [3]], np.int32)
    args = (*rows(2, 2), table, ints(0, 2), ints(2, 0))
    after = np.asarray(step(jnp.asarray(before), env, "l0", *args)[0])
    np.testing.assert_array_equal(after[1:], before[1:])
    assert (after[0] != before[0]).any()


def test_tokens_past_the_end_of_the_table_are_dropped(rows):
    env = page_of(page_size=4)
    before = np.random.default_rng(2).integers(0, 256, (3, env.nbytes), np.uint8)
    args = (*rows(1, 4), np.array([[1]], np.int32), ints(2), ints(4))
    after = np.asarray(step(jnp.asarray(before), env, "l0", *args)[0])
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    slots = env.entries_of("l0", "k")[0].slot_stride
    np.testing.assert_array_equal(after[1, : 2 * slots], before[1, : 2 * slots])


@pytest.mark.parametrize("seqs", [1, 8])
@pytest.mark.parametrize("sizes", [{}, dict(kv_heads=1, v_head_dim=4)])
def test_one_token_is_written_in_place(seqs, sizes, pool_copies, rows):
    env = page_of(**sizes)
    pages = poisoned(4096, env)
    widths = dict(kv_heads=sizes.get("kv_heads", 2))
    widths |= dict(v_head_dim=sizes.get("v_head_dim", 8))
    table = np.arange(2 * seqs, dtype=np.int32).reshape(seqs, 2)
    args = (*rows(seqs, 1, **widths), table, ints(*[3] * seqs), ints(*[1] * seqs))
    compiled = step.lower(pages, env, "l0", *args).compile()
    assert pool_copies(compiled, pages, spare_nbytes=64 * 1024) == []


def test_the_search_for_pool_copies_sees_one(pool_copies):
    pages = jnp.zeros((4096, 64), jnp.uint8)
    row = jnp.ones((64,), jnp.uint8)
    kept = jax.jit(lambda pages: pages.at[3].set(row)).lower(pages).compile()
    assert len(pool_copies(kept, pages, spare_nbytes=0)) >= 2  # no alias, a copy


def test_rows_of_other_heads_than_the_pages_are_refused(rows):
    env = page_of()
    q, k, v = rows(1, 1, kv_heads=3)
    args = (np.array([[0]], np.int32), ints(0), ints(1))
    with pytest.raises(IncompatiblePlan, match="2 rows of 8 elements"):
        attend(poisoned(1, env), env, "l0", q, k, v, *args)


def test_query_heads_that_do_not_share_evenly_are_refused(rows):
    env = page_of()
    q, k, v = rows(1, 1, q_heads=5)
    args = (np.array([[0]], np.int32), ints(0), ints(1))
    with pytest.raises(IncompatiblePlan, match="5 query heads"):
        attend(poisoned(1, env), env, "l0", q, k, v, *args)
