"""Attention that sees a window, kept first tokens and learned sinks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.geometry import LayerSpec, Lifecycle, Topology, envelope, group_layers
from kvmem.model.attention import View, attend, attend_written
from kvmem.pool.table import GroupTable

HEADS, QUERIES, DIM = 2, 4, 8


def page_of(page_size, window=None, sinks=0):
    layer = LayerSpec("l0", 0, kv_heads=HEADS, head_dim=DIM, window=window, sinks=sinks)
    (group,) = group_layers([layer], page_size)
    return group, envelope.build(group, Topology(), 0)


@functools.partial(
    jax.jit, static_argnames=("env", "window", "sinks"), donate_argnums=0
)
def step(pages, env, q, k, v, table, starts, num_new, logits=None, **view):
    return attend(
        pages, env, "l0", q, k, v, table, starts, num_new, sink_logits=logits, **view
    )


read_only = jax.jit(attend_written, static_argnames=("envelope", "layer", "view"))


def dense(q, k, v, window=None, sinks=0, sink_logits=None):
    """Softmax over what each query of one text [n, heads, D] sees, in float64."""
    out = np.zeros(q.shape)
    for n, head in np.ndindex(*q.shape[:2]):
        seen = [
            p
            for p in range(n + 1)
            if window is None or p > n - window or p < sinks  # its own window, sinks
        ]
        shared = head * HEADS // QUERIES
        scores = k[seen, shared].astype(float) @ q[n, head] / np.sqrt(DIM)
        extra = [] if sink_logits is None else [float(sink_logits[head])]
        weights = np.exp(np.concatenate([scores, extra]))
        out[n, head] = weights[: len(seen)] @ v[seen, shared] / weights.sum()
    return out


@pytest.fixture
def rows():
    """Make q, k, v of one text, [n, heads, D]."""

    def make(length, seed=3):
        rng = np.random.default_rng(seed)
        shapes = ((length, n, DIM) for n in (QUERIES, HEADS, HEADS))
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    return make


class Text:
    """One text whose stale pages are given back, and poisoned, as it grows."""

    def __init__(self, page_size, window=None, sinks=0, logits=None):
        self.group, self.env = page_of(page_size, window, sinks)
        self.life = self.group.lifecycle
        self.view = dict(window=window, sinks=sinks)
        self.logits = logits
        self.free = list(np.random.default_rng(9).permutation(40))
        self.pages = jnp.full((40, self.env.nbytes), 0xFF, jnp.uint8)
        self.held, self.length = {}, 0

    def table(self, length):
        """Hold pages for `length` tokens; the columns of what is not stale."""
        size = self.group.page_size
        stale = self.life.stale(self.length, size)
        for ordinal in [o for o in self.held if o in stale]:
            page = self.held.pop(ordinal)
            self.pages = self.pages.at[page].set(0xFF)
            self.free.append(page)
        for ordinal in range(-(-length // size)):
            if ordinal not in stale and ordinal not in self.held:
                self.held[ordinal] = self.free.pop(0)
        kept = self.life.sink_pages(size)
        first = max(kept, stale.stop if stale else kept)
        width = 48 // size + 1  # always equal, so that the step compiles once
        columns = [*range(kept), *range(first, first + width - kept)]
        ids = [self.held.get(column, 40) for column in columns]
        return GroupTable(np.array([ids], np.int32), np.array([first], np.int32))

    def read(self, q, k, v, width=None):
        """Read tokens after those so far, padded to `width`: outputs [n, heads, D]."""
        count = len(q)
        pad = 1 if width is None else width - count
        table = self.table(self.length + count)
        batch = []
        for row in (q, k, v):
            padded = np.full((1, count + pad, *row.shape[1:]), np.nan, np.float32)
            padded[0, :count] = row
            batch.append(padded)
        starts, new = np.array([self.length], np.int32), np.array([count], np.int32)
        self.pages, out = step(
            self.pages, self.env, *batch, table, starts, new, self.logits, **self.view
        )
        self.length += count
        return np.asarray(out)[0, :count]


VIEWS = [(8, 0), (5, 0), (1, 0), (8, 3), (6, 5), (30, 2), (None, 0)]


@pytest.mark.cover(1)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("window,sinks", VIEWS)
def test_chunks_with_stale_pages_given_back_equal_the_dense_window(
    window, sinks, page_size, rows
):
    whole = rows(41)
    text = Text(page_size, window, sinks)
    found = [
        text.read(*(row[at : at + 5] for row in whole), width=6)
        for at in range(0, 41, 5)
    ]
    expected = dense(*whole, window, sinks)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-6)


@pytest.mark.case("SWA-01")
@pytest.mark.parametrize(
    "length,freed", [(8, 0), (10, 0), (11, 1), (12, 1), (14, 1), (15, 2)]
)
def test_pages_are_given_back_only_when_the_next_query_sees_none_of_them(
    length, freed, rows
):
    whole = rows(length + 1)
    text = Text(page_size=4, window=8)
    for at in range(length):
        text.read(*(row[at : at + 1] for row in whole))
    assert len(Lifecycle("window", 8).stale(length, 4)) == freed
    out = text.read(*(row[length:] for row in whole))  # freed pages are NaN by now
    np.testing.assert_allclose(out[0], dense(*whole, window=8)[-1], atol=2e-6)


@pytest.mark.case("SWA-02")
def test_a_position_behind_a_short_table_is_written_to_its_own_page(rows):
    _, env = page_of(4, window=8)
    q, k, v = (row[None] for row in rows(13))
    table = GroupTable(np.array([[6, 2, 5, 3]], np.int32), np.zeros(1, np.int32))
    pages = jnp.full((8, env.nbytes), 0xFF, jnp.uint8)
    zero, twelve, one = (np.array([n], np.int32) for n in (0, 12, 1))
    pages, _ = step(
        pages, env, *(x[:, :12] for x in (q, k, v)), table, zero, twelve, window=8
    )
    before = np.asarray(pages).copy()
    short = GroupTable(np.array([[2, 5, 3]], np.int32), one)  # pages 1, 2 and 3
    last = tuple(x[:, 12:] for x in (q, k, v))
    pages, out = step(pages, env, *last, short, twelve, one, window=8)
    changed = np.flatnonzero((np.asarray(pages) != before).any(axis=1))
    assert changed.tolist() == [3]  # of the text's page 3, not page 0 of the pool
    np.testing.assert_allclose(out[0], dense(q[0], k[0], v[0], 8)[12:], atol=2e-6)


@pytest.mark.case("SWA-06")
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_window_rolled_back_within_its_pages_is_exact(page_size, rows):
    before, after = rows(6), rows(9, seed=4)
    whole = [np.concatenate([a[:4], b[4:]]) for a, b in zip(before, after, strict=True)]
    text = Text(page_size, window=4)
    text.read(*before, width=7)
    text.length = 4  # two tokens back: the pages of positions 1 to 3 are all held
    parts = ([r[a:b] for r in whole] for a, b in ((4, 6), (6, 9)))
    found = np.concatenate([text.read(*part, width=7) for part in parts])
    np.testing.assert_allclose(found, dense(*whole, window=4)[4:], atol=2e-6)


def test_a_table_that_still_names_stale_pages_reads_nothing_of_them(rows):
    _, env = page_of(4, window=4)
    q, k, v = (row[None] for row in rows(12))
    table = np.array([[0, 1, 2]], np.int32)
    zero, twelve = np.zeros(1, np.int32), np.array([12], np.int32)
    pages = jnp.full((3, env.nbytes), 0xFF, jnp.uint8)
    pages, _ = step(pages, env, q, k, v, table, zero, twelve, window=4)
    args = (env, "l0", q[:, 11:], np.array([[11]], np.int32), table, twelve)
    clean = read_only(pages, *args, view=View(4))
    dirty = read_only(pages.at[:2].set(0xFF), *args, view=View(4))
    np.testing.assert_array_equal(clean, dirty)
    sinks = read_only(pages.at[:2].set(0xFF), *args, view=View(4, sinks=1))
    assert np.isnan(sinks).all()  # a sink token is in sight, so the poison shows


@pytest.mark.parametrize("window", [None, 6])
def test_learned_sinks_take_their_share_of_every_softmax(window, rows):
    whole = rows(13)
    logits = np.linspace(-1.0, 2.0, QUERIES).astype(np.float32)
    text, plain = Text(4, window, logits=logits), Text(4, window)
    found = np.concatenate(
        [text.read(*(r[a : a + 1] for r in whole)) for a in range(13)]
    )
    expected = dense(*whole, window, sink_logits=logits)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.abs(plain.read(*whole) - found).max() > 0.1


def test_a_learned_sink_far_above_every_score_leaves_nothing(rows):
    high = np.full(QUERIES, 500.0, np.float32)
    out = Text(4, logits=high).read(*rows(9))
    np.testing.assert_allclose(out, np.zeros_like(out), atol=1e-6)
    low = Text(4, logits=-high).read(*rows(9))
    np.testing.assert_allclose(low, dense(*rows(9)), atol=2e-6)


def test_rows_without_tokens_are_finite_under_windows_and_sinks(rows):
    _, env = page_of(4, window=3)
    q, k, v = (np.repeat(row[None], 2, axis=0) for row in rows(9))
    table = GroupTable(np.full((2, 3), 9, np.int32), np.array([0, 5], np.int32))
    starts, new = np.array([0, 22], np.int32), np.zeros(2, np.int32)
    pages = jnp.full((4, env.nbytes), 0xFF, jnp.uint8)
    logits = np.zeros(QUERIES, np.float32)
    for sink_logits in (None, logits):
        pages, out = step(
            pages, env, q, k, v, table, starts, new, sink_logits, window=3
        )
        assert np.isfinite(out).all()
    assert (np.asarray(pages) == 0xFF).all()


@pytest.mark.parametrize("window,sinks", [(8, 0), (8, 3)])
def test_a_windowed_token_is_written_in_place(window, sinks, pool_copies, rows):
    _, env = page_of(4, window, sinks)
    q, k, v = (row[None] for row in rows(1))
    table = GroupTable(np.arange(4, dtype=np.int32)[None], np.array([7], np.int32))
    starts, one = np.array([30], np.int32), np.ones(1, np.int32)
    pages = jnp.zeros((4096, env.nbytes), jnp.uint8)
    args = (pages, env, q, k, v, table, starts, one)
    compiled = step.lower(*args, window=window, sinks=sinks).compile()
    assert pool_copies(compiled, pages, spare_nbytes=64 * 1024) == []
