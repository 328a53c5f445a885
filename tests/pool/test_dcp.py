"""Tables of token shards: one table, and each rank finds its own slots in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import pool as kvpool
from kvmem.geometry import Spread

NULL = 2**31 - 1
PAGES = np.array([[7, 2, 9, 4]], np.int32)


def of_ranks(ask, table, dcp, *args):
    """Ask every rank of the axis "dcp" the same."""
    run = jax.vmap(lambda _: ask(table, *args), axis_name="dcp")
    return jax.tree.map(np.asarray, run(jnp.arange(dcp)))


def table_of(spread, first=0):
    return kvpool.GroupTable(PAGES, np.full(1, first, np.int32), spread)


@pytest.mark.parametrize("spread", [Spread(2, 1), Spread(2, 4), Spread(4, 2)], ids=str)
def test_each_position_is_found_by_its_owner_and_null_to_the_others(spread):
    size, covered = 4, 4 * 4 * spread.dcp
    positions = np.arange(-1, covered + 2, dtype=np.int32)[None]
    locate = kvpool.GroupTable.locate
    pages, slots = of_ranks(locate, table_of(spread), spread.dcp, positions, size)
    seen = [[] for _ in range(spread.dcp)]
    for at, position in enumerate(positions[0].tolist()):
        holders = np.flatnonzero(pages[:, 0, at] != NULL).tolist()
        if not 0 <= position < covered:
            assert holders == []
            continue
        run = position // spread.interleave
        assert holders == [run % spread.dcp]
        page, slot = pages[holders[0], 0, at], slots[holders[0], 0, at]
        assert page == PAGES[0, position // (size * spread.dcp)]
        seen[holders[0]].append((page, slot))
    for own in seen:  # no slot twice, and none left out
        assert own == [(page, slot) for page in PAGES[0] for slot in range(size)]


@pytest.mark.parametrize("spread", [Spread(2, 1), Spread(4, 2)], ids=str)
def test_places_are_the_positions_that_slots_keep(spread):
    table, dcp = table_of(spread, first=3), spread.dcp
    places = of_ranks(kvpool.GroupTable.places, table, dcp, 4)
    assert sorted(places.ravel()) == list(range(3 * 4 * dcp, 7 * 4 * dcp))
    for rank in range(dcp):
        assert (np.diff(places[rank, 0]) > 0).all()  # ascending, as a select wants it
        back, slots = of_ranks(kvpool.GroupTable.locate, table, dcp, places[rank], 4)
        expected = [(page, slot) for page in PAGES[0] for slot in range(4)]
        found = zip(back[rank, 0].tolist(), slots[rank, 0].tolist(), strict=True)
        assert list(found) == expected


def test_rows_say_where_among_its_places_a_rank_keeps_a_position():
    spread = Spread(2, 2)
    table = table_of(spread, first=1)
    positions = np.array([[[8, 9, 10, 31], [0, 7, 40, NULL]]], np.int32)
    rows = of_ranks(kvpool.GroupTable.rows, table, 2, positions, 4)
    places = of_ranks(kvpool.GroupTable.places, table, 2, 4)
    for rank in range(2):
        for position, row in zip(positions.ravel(), rows[rank].ravel(), strict=True):
            inside = position in places[rank, 0]
            assert (row != NULL) == inside
            assert not inside or places[rank, 0, row] == position


@pytest.mark.case("LAY-08")
def test_a_table_of_a_group_kept_whole_maps_a_position_to_its_slot_on_every_rank():
    spread = Spread(2, is_whole=True)
    table = table_of(spread, first=2)  # of a virtual page of 8 tokens, in two parts
    positions = np.arange(8, 24, dtype=np.int32)[None]
    pages, slots = table.locate(positions, 4)  # no axis is asked for
    assert pages[0].tolist() == [7] * 4 + [2] * 4 + [9] * 4 + [4] * 4
    assert slots[0].tolist() == [0, 1, 2, 3] * 4
    np.testing.assert_array_equal(table.places(4), positions)


def test_sink_pages_of_a_group_kept_whole_are_whole_virtual_pages():
    table = table_of(Spread(2, is_whole=True), first=6)
    # one sink page of 4 slots is asked for, two parts of a virtual page are kept
    assert table.ordinals(sink_pages=1).tolist() == [[0, 1, 6, 7]]
    pages, _ = table.locate(np.array([[0, 7, 8, 24]], np.int32), 4, 1)
    assert pages[0].tolist() == [7, 2, NULL, 9]
