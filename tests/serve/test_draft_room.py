"""Room for drafted tokens: asked at admission, taken of nobody who runs, given back."""

import numpy as np
import pytest

from kvmem import pool as pools
from kvmem.geometry import Lifecycle, Spread, Topology, envelope, group_layers
from kvmem.geometry.lifecycle import FULL, STATE
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.draft import room
from kvmem.serve.draft.wipe import Wiper, slots_of
from kvmem.serve.page_table import PageTable
from kvmem.serve.scheduler import Scheduler

NOTHING = Hit(0, (), "")


def table_of(*lives, pages=12):
    extents = tuple(3 if life == STATE else 1 for life in lives)
    ledger = pools.Ledger(pages, tuple(pages // extent for extent in extents), extents)
    return PageTable(ledger, PrefixCache(4), lives)


def test_room_is_found_for_as_many_tokens_as_pages_can_be_had_for():
    table = table_of(FULL, pages=4)
    held = table.begin(NOTHING, range(10))  # three pages: two slots are left
    assert room.widen(table, held, 10, 2) == 2
    assert table.accounts().free == 1
    assert room.widen(table, held, 10, 5) == 5  # the fourth page
    assert room.widen(table, held, 10, 9) == 6  # and no other
    assert table.accounts().free == 0


def test_pages_behind_the_accepted_tokens_go_back():
    table = table_of(FULL, Lifecycle("window", 6))
    held = table.begin(NOTHING, range(10))
    assert room.widen(table, held, 10, 7) == 7
    assert [len(columns) for columns in held.columns] == [5, 5]
    room.cut(table, held, 12)
    assert [len(columns) for columns in held.columns] == [3, 3]
    assert held.room == 12
    table.give_back(held)
    assert table.accounts().free == 12


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_state_is_read_on_in_a_copy_that_is_kept_or_dropped(is_kept):
    table = table_of(FULL, STATE)
    held = table.begin(NOTHING, range(3))
    before = list(held.columns[1])
    parted = room.part(table, held)
    assert parted == {1: before[0]}
    copy = list(held.columns[1])
    assert copy != before
    room.join(table, held, parted, is_kept)
    assert held.columns[1] == (copy if is_kept else before)
    table.give_back(held)
    assert table.accounts().free == 12


def test_without_room_for_a_copy_nothing_is_drafted_and_nothing_changes():
    table = table_of(FULL, STATE, pages=5)
    held = table.begin(NOTHING, range(7))  # two pages and a state of three parts
    assert room.widen(table, held, 7, 1) == 0
    assert room.part(table, held) is None
    assert table.objections([held]) == ()


@pytest.mark.parametrize(("pages", "may"), [(6, False), (7, True)])
def test_the_copy_of_a_state_is_counted_before_a_text_begins(pages, may):
    """A page of four tokens, and twice a state of three parts."""
    table = table_of(FULL, STATE, pages=pages)
    assert room.can_begin(table, NOTHING, 4, 4) is may


@pytest.mark.parametrize(("headroom", "begin"), [(0, 2), (4, 1)])
def test_a_sequence_begins_where_its_first_drafted_step_has_pages_too(
    new_sequence, headroom, begin
):
    """Two of 8 tokens on 4 pages of 4: no page is left for 4 drafted ones."""
    made = Scheduler(
        table_of(FULL, pages=4),
        max_batch=4,
        prefill_chunk=8,
        max_length=64,
        headroom=headroom,
    )
    for seed in range(2):
        made.add(new_sequence(range(seed, seed + 8), max_tokens=9))
    assert len(made.admit()) == begin


@pytest.mark.parametrize(
    ("topology", "kept"), [(Topology(), 5), (Topology(2), 5), (Topology(1, 2, 2), 5)]
)
def test_slots_behind_the_kept_ones_become_zero_on_every_rank(
    decoder_layers, topology, kept
):
    (group,) = group_layers(decoder_layers, 4)
    spread = Spread.of(group, topology)
    size = spread.virtual(group).page_size
    kept = min(kept, size - 1)
    env = envelope.build(group, topology, 0)
    pool = pools.init(3, env.nbytes, topology.ranks)
    pool, vpages, _ = pools.handout(pool, 0, np.int32([2]), 2)
    filled = np.arange(pool.pages.size, dtype=np.uint32) * 2654435761 >> 24
    filled = (filled.astype(np.uint8) | 1).reshape(pool.pages.shape)
    pool = type(pool)(filled, *[getattr(pool, n) for n in _REST])
    wiper = Wiper([env], [spread], topology, size, lanes=2)
    wiped = wiper(pool, 0, [int(vpages[0, 1])], [kept])
    page = int(pools.translate(wiped, 0, vpages[0])[1])
    token = slots_of(env, spread, topology)
    want = filled.copy()
    for rank in range(topology.ranks):
        want[rank, page, token[rank] >= kept] = 0
    np.testing.assert_array_equal(np.asarray(wiped.pages), want)
    counts = [int((token[rank] >= kept).sum()) for rank in range(topology.ranks)]
    assert 0 < sum(counts) < token.size


_REST = ("p2v", "free", "num_free", "groups")


@pytest.fixture
def decoder_layers(tiny_model):
    return tiny_model().spec.layer_specs("float32")
