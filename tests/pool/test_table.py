"""Block tables: where a position lies, and what is wrong with a table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import pool as kvpool
from kvmem.pool import table as tables
from kvmem.pool import tokens


@pytest.fixture
def filled():
    """Return a pool of 6 pages and a table: one sequence of 9 tokens, one of 0."""
    pool = kvpool.init(6, 64)
    pool, vpages, _ = kvpool.handout(pool, 0, [3, 0], 4)
    return pool, kvpool.BlockTable(vpages[None], jnp.array([9, 0], jnp.int32))


def test_an_empty_table_holds_nothing_in_any_group():
    pool = kvpool.init(6, 64, num_vpages=(6, 4))
    table = tables.empty(pool, num_sequences=2, max_pages=3)
    assert np.asarray(table.vpages).tolist() == [[[6] * 3] * 2, [[4] * 3] * 2]
    assert tables.objections(table, pool, (4, 8)) == ()
    assert kvpool.check(pool, holders=[[page] for page in table.vpages]) == ()


def test_a_position_lies_in_its_column_at_its_slot(filled):
    pool, table = filled
    positions = jnp.array([[0, 3, 4, 8], [0, 1, 2, 3]], jnp.int32)
    locate = jax.jit(tables.locate, static_argnums=(1, 3))
    vpages, slots = locate(table, 0, positions, 4)
    assert np.asarray(vpages).tolist() == [[0, 0, 1, 2], [6] * 4]
    assert np.asarray(slots).tolist() == [[0, 3, 0, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("position", [-1, 16, 2**31 - 1, -(2**31)])
def test_a_position_outside_the_table_is_null_to_every_pool(position):
    pool, vpages, _ = kvpool.handout(kvpool.init(4, 64), 0, [4], 4)
    table = kvpool.BlockTable(vpages[None], jnp.array([16], jnp.int32))
    positions = jnp.full((1, 1), position, jnp.int32)
    vpages, _ = tables.locate(table, 0, positions, 4)
    assert (np.asarray(kvpool.translate(pool, 0, vpages)) == pool.null_page).all()


@pytest.mark.case("IDX-01")
def test_an_id_past_the_end_within_a_length_is_named_with_the_size(filled):
    pool, table = filled
    vpages = table.vpages.at[0, 0].set(jnp.array([1, 2, 6, 6], jnp.int32))
    table = kvpool.BlockTable(vpages, jnp.array([12, 0], jnp.int32))
    (found,) = tables.objections(table, pool, (4,))
    assert found == "sequence 0 column 2: virtual page 6, group 0 has 6"


@pytest.mark.parametrize(
    ("column", "vpage", "lengths", "phrase"),
    [
        (0, -1, [9, 0], "column 0: virtual page -1, group 0 has 6"),
        (1, 5, [9, 0], "column 1: virtual page 5, nobody holds it"),
        (3, 2, [9, 0], "column 3: virtual page 2 beyond its length 9"),
        (3, 6, [17, 0], "length 17 needs 5 pages of group 0, the table has 4"),
        (3, 6, [9, -2], "sequence 1 has length -2"),
    ],
)
def test_a_broken_table_is_seen(column, vpage, lengths, phrase, filled):
    pool, table = filled
    assert tables.objections(table, pool, (4,)) == ()
    broken = dataclasses.replace(
        table,
        vpages=table.vpages.at[0, 0, column].set(vpage),
        lengths=jnp.array(lengths, jnp.int32),
    )
    assert any(phrase in found for found in tables.objections(broken, pool, (4,)))


@pytest.fixture
def windowed():
    """Return the table of one sequence: a sink page 7, then ordinals 3, 4, 5."""
    pages = jnp.array([[7, 2, 9, 4]], jnp.int32)
    return kvpool.GroupTable(pages, jnp.array([3], jnp.int32))


def test_a_group_table_says_which_page_each_column_holds(windowed):
    assert windowed.ordinals(sink_pages=1).tolist() == [[0, 3, 4, 5]]
    full = dataclasses.replace(windowed, first=jnp.zeros(1, jnp.int32))
    assert full.ordinals().tolist() == [[0, 1, 2, 3]]


def test_a_position_of_a_group_table_lies_where_its_ordinal_stands(windowed):
    positions = jnp.arange(28, dtype=jnp.int32)[None]
    locate = jax.jit(kvpool.GroupTable.locate, static_argnums=(2, 3))
    pages, slots = locate(windowed, positions, 4, 1)
    null = 2**31 - 1
    expected = {0: 7, 1: null, 2: null, 3: 2, 4: 9, 5: 4, 6: null}
    assert pages[0].tolist() == [expected[position // 4] for position in range(28)]
    assert slots[0].tolist() == [position % 4 for position in range(28)]


@pytest.mark.parametrize("first", [0, 3, 2**30])
@pytest.mark.parametrize("sink_pages", [0, 1, 4])
@pytest.mark.parametrize("position", [-1, -4, 28, 2**31 - 1, -(2**31)])
def test_a_position_outside_a_group_table_is_null_to_every_pool(
    position, sink_pages, first, windowed
):
    table = dataclasses.replace(windowed, first=jnp.array([first], jnp.int32))
    positions = jnp.full((1, 1), position, jnp.int32)
    for page_size in (1, 4):
        pages, _ = table.locate(positions, page_size, sink_pages)
        assert pages.tolist() == [[2**31 - 1]]


@pytest.mark.case("UNI-01")
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_padding_token_is_null_and_never_the_last_page(page_size):
    pool, _, _ = kvpool.handout(kvpool.init(6, 64), 0, [6], 6)
    order = jnp.array([[0], [3], [1], [5], [2], [4]], jnp.int32)
    books = dataclasses.replace(pool.groups[0], v2p=order)
    pool = dataclasses.replace(pool, groups=(books,))
    ids = jnp.array([0, 1, -1, 3], jnp.int32) // page_size
    pages = np.asarray(kvpool.translate(pool, 0, ids))
    assert ids[2] == -1  # as a plain index, the last row: page 4
    assert pages[2] == pool.null_page
    assert (np.delete(pages, 2) < pool.null_page).all()
    table = kvpool.GroupTable(order.reshape(1, 6), jnp.zeros(1, jnp.int32))
    located, _ = table.locate(jnp.array([[0, 1, -1, 3]], jnp.int32), page_size)
    assert np.delete(np.asarray(located)[0], 2).tolist() == np.delete(pages, 2).tolist()
    assert located[0, 2] >= pool.null_page


@pytest.mark.case("UNI-03")
def test_a_write_through_columns_that_a_window_has_dropped_changes_no_page(
    token_major, shake
):
    null, entry = 6, token_major.entries[0]
    table = kvpool.GroupTable(
        jnp.array([[null, null, 4, 5]], jnp.int32), jnp.zeros(1, jnp.int32)
    )
    pages, slots = table.locate(jnp.arange(16, dtype=jnp.int32)[None], 4)
    rows = np.maximum(shake(16, entry.nbytes), 1)
    written = tokens.write(
        jnp.zeros((6, token_major.nbytes), jnp.uint8),
        entry,
        pages[0],
        slots[0],
        rows,
        page_size=4,
    )
    assert not np.asarray(written)[:4].any()
    kept = tokens.read(written, entry, pages[0], slots[0], page_size=4)
    assert not np.asarray(kept)[:8].any()
    assert np.array_equal(np.asarray(kept)[8:], rows[8:])
    # The same table, as short as what the window keeps.
    short = kvpool.GroupTable(table.pages[:, 2:], jnp.array([2], jnp.int32))
    assert np.array_equal(
        np.minimum(short.locate(jnp.arange(16, dtype=jnp.int32)[None], 4)[0], null),
        pages,
    )
