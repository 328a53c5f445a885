"""Where a text may be cut: at nothing, at all of it, and nowhere beyond."""

import pytest

from kvmem import errors
from kvmem import pool as pools
from kvmem.geometry import Lifecycle
from kvmem.geometry.lifecycle import FULL, STATE
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.page_table import PageTable

KINDS = {
    "full": (FULL,),
    "window": (FULL, Lifecycle("window", 8)),
    "window with sinks": (FULL, Lifecycle("window", 8, 5)),
    "state": (FULL, STATE),
}
TOKENS = (7, 5, 3)
PAGES = 40


@pytest.fixture(params=KINDS)
def lives(request):
    return KINDS[request.param]


@pytest.fixture
def begun(lives):
    """Compute three tokens; of a state a snapshot stands after them, if it can."""

    def make(page_size=4):
        extents = tuple(3 if life == STATE else 1 for life in lives)
        vpages = tuple(PAGES // extent for extent in extents)
        ledger = pools.Ledger(PAGES, vpages, extents)
        table = PageTable(ledger, PrefixCache(page_size), lives)
        held = table.begin(Hit(0, ()), TOKENS)
        if STATE in lives and page_size == 1:
            assert table.snapshot(TOKENS, held)
        return table, held

    return make


@pytest.mark.case("SWA-05")
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_text_cut_to_nothing_keeps_nothing(begun, lives, page_size):
    table, held = begun(page_size)
    found, computed = table.roll_back(held, TOKENS, 0)
    assert computed == 0
    for life, vpages in zip(lives, found.columns, strict=True):
        assert len(vpages) == (life == STATE)  # a fresh one: it is never without
    assert table.objections([found]) == ()
    table.give_back(found)
    table.clear_cache()
    assert table.accounts().free == PAGES


@pytest.mark.case("SWA-05")
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_text_from_which_nothing_is_cut_stays_whole(begun, lives, page_size):
    table, held = begun(page_size)
    before = [len(vpages) for vpages in held.columns]
    found, computed = table.roll_back(held, TOKENS, 3)
    # a state is cut at snapshots alone, and none stands inside a page
    assert computed == (0 if STATE in lives and page_size == 4 else 3)
    assert [len(vpages) for vpages in found.columns] == before
    assert table.objections([found]) == ()


@pytest.mark.case("SWA-05")
@pytest.mark.parametrize("length", [3 - 5, -1, 4, 7])
def test_a_cut_below_nothing_or_behind_the_end_is_refused_and_changes_nothing(
    begun, length
):
    table, held = begun()
    before = [list(vpages) for vpages in held.columns], table.accounts()
    with pytest.raises(errors.ConfigError, match="Cut it to a length from 0 to 3"):
        table.roll_back(held, TOKENS, length)
    assert ([list(vpages) for vpages in held.columns], table.accounts()) == before
    assert table.objections([held]) == ()


@pytest.mark.case("SWA-05")
def test_a_cut_behind_the_pages_held_is_refused_however_long_the_text_is(begun):
    table, held = begun()
    with pytest.raises(errors.ConfigError, match="9 are known and 4 of them have"):
        table.roll_back(held, [*TOKENS] * 3, 7)
    assert table.objections([held]) == ()
