"""Companions: pages of other groups beside the tree's, and which of them are spare."""

from kvmem.prefix import Companions

NULL = 9


def made():
    table = Companions(6, {1: NULL, 2: NULL})
    table.put(1, [0, 1, 2], [7, 8, 6])
    table.put(2, [2], [0])
    return table


def test_a_unit_has_a_page_of_a_group_or_none():
    table = made()
    assert table.pages(1, [2, 0, 5]).tolist() == [6, 7, NULL]
    assert table.has(2, [0, 1, 2]).tolist() == [False, False, True]
    assert table.units(1).tolist() == [0, 1, 2]


def test_what_leaves_with_its_unit_is_named_by_group():
    table = made()
    table.pass_by(1, [2, 0], 5)
    assert table.take_out([2, 4, 1]) == {1: [6, 8], 2: [0]}
    assert list(table.spares) == [(1, 0)]
    assert table.units(1).tolist() == [0] and table.units(2).tolist() == []
    assert table.take_out([3]) == {}


def test_spares_stand_in_the_order_in_which_they_were_passed():
    table = made()
    table.pass_by(1, [1, 2], 1)
    table.pass_by(2, [2], 1)
    table.pass_by(1, [1], 2)
    assert list(table.spares) == [(1, 2), (2, 2), (1, 1)]
    table.use(1, [2])
    assert list(table.spares) == [(2, 2), (1, 1)]
    assert table.drop(2, 2) == 0 and list(table.spares) == [(1, 1)]
