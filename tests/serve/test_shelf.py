"""What is found of a text when a draft has tokens of it computed again."""

import numpy as np
import pytest

from kvmem import pool as pools
from kvmem.geometry import Lifecycle
from kvmem.geometry.lifecycle import FULL, STATE
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.page_table import PageTable
from kvmem.serve.scheduler import Scheduler
from kvmem.serve.shelf import BACKED_OFF

MISS = Hit(0, ())
WINDOW = Lifecycle("window", 8)


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 9_000, length).tolist()


@pytest.fixture
def table():
    """Full attention of a target and its draft, others between; one token again."""

    def make(*others, num_pages=60, page_size=4):
        lives = (FULL, *others, FULL)
        ledger = pools.Ledger(num_pages, (num_pages,) * len(lives), (1,) * len(lives))
        made = PageTable(ledger, PrefixCache(page_size), lives)
        made.shelf.compute_again(1)
        return made

    return make


def computed(table, tokens, stops=()):
    """Compute a text in steps of eight, and leave it in the cache."""
    held, done = table.begin(MISS, tokens, step=8), 0
    while done < len(tokens):
        done = min([done + 8, len(tokens), *(stop for stop in stops if stop > done)])
        assert table.extend(held, done)
        if done in stops:
            assert table.snapshot(tokens[:done], held)
        table.publish(tokens[:done], held)
        table.trim(held, done)
    table.give_back(held)


def test_a_window_has_what_the_token_computed_again_reads(table):
    made, tokens = table(WINDOW), text(1, 24)
    computed(made, tokens)
    hit = made.match([*tokens, 1])
    units = made.shelf.cache.pages(tokens)
    assert (hit.num_tokens, hit.vpages, hit.copied) == (23, units[:5], units[5])
    held = made.begin(hit, [*tokens, 1])
    assert held.ordinals(1) == [4, 5, 6]  # of tokens 16 to 23, the last its own
    cached = made.shelf.companions.pages(1, units).tolist()
    assert held.columns[1][0] == cached[4]
    assert not set(held.columns[1][1:]) & set(cached)
    copies = [(owed[1], owed[2]) for owed in made.books._owed if owed[0] == "fork"]
    lasts = [made.shelf.companions.pages(g, units[5:]).tolist() for g in (1, 2)]
    assert copies == [(0, (units[5],)), *((g + 1, tuple(lasts[g])) for g in (0, 1))]
    assert made.objections([held]) == ()


@pytest.mark.parametrize(("gone", "found"), [(0, 23), (3, 23), (4, 15), (5, 19)])
def test_where_a_window_lacks_a_page_less_is_found(table, gone, found):
    """A token at 23 reads pages 4 and 5, one at 19 pages 3 and 4."""
    made, tokens = table(WINDOW), text(2, 24)
    computed(made, tokens)
    units = made.shelf.cache.pages(tokens)
    made.shelf.drop(1, units[gone])
    assert made.match([*tokens, 1]).num_tokens == found
    for unit in units[1:]:
        if made.shelf.companions.has(1, [unit])[0]:
            made.shelf.drop(1, unit)
    hit = made.match([*tokens, 1])
    want = (3, None) if gone else (0, BACKED_OFF)
    assert (hit.num_tokens, hit.reason) == want


def test_a_page_that_the_draft_lacks_ends_what_is_found(table):
    made, tokens = table(), text(3, 24)
    computed(made, tokens)
    made.shelf.drop(1, made.shelf.cache.pages(tokens)[3])
    assert made.match([*tokens, 1]).num_tokens == 11


@pytest.mark.parametrize(
    ("stops", "length", "found"),
    [
        ((20,), 24, 20),
        ((20,), 23, 0),  # the page behind the state is not whole
        ((16, 20), 23, 16),
        ((24,), 24, 0),  # nothing of the draft stands behind it
        ((8, 24), 24, 8),
    ],
)
def test_a_text_goes_on_from_a_state_that_a_page_was_computed_behind(
    table, stops, length, found
):
    made, tokens = table(STATE), text(4, length)
    computed(made, tokens, stops)
    hit = made.match([*tokens, 1])
    assert hit.num_tokens == found
    assert hit.reason == (None if found else BACKED_OFF)
    if not found:
        return
    units = made.shelf.cache.pages(tokens)
    assert (hit.vpages, hit.copied) == (units[: found // 4], units[found // 4])
    held = made.begin(hit, [*tokens, 1])
    page = [made.shelf.companions.pages(g, units).tolist() for g in (1, 2)]
    copies = [(owed[1], owed[2]) for owed in made.books._owed if owed[0] == "fork"]
    assert copies[-3:] == [
        (0, (units[found // 4],)),
        (1, (page[0][found // 4 - 1],)),  # the state that stands before that page
        (2, (page[1][found // 4],)),  # what the draft has of the token behind it
    ]
    assert len(held.columns[2]) == len(held.columns[0]) == (length + 4) // 4
    assert made.objections([held]) == ()


def test_a_state_is_of_no_use_where_the_draft_has_no_page_behind_it(table):
    made, tokens = table(STATE), text(9, 24)
    computed(made, tokens, stops=(16, 20))
    assert made.match([*tokens, 1]).num_tokens == 20
    made.shelf.drop(2, made.shelf.cache.pages(tokens)[5])
    assert made.match([*tokens, 1]).num_tokens == 16


def test_of_moving_snapshots_the_one_before_stays(table):
    """A text that ends behind either is gone on from one page before."""
    made, tokens = table(STATE), text(5, 24)
    held = made.begin(MISS, tokens)
    for length in (8, 12, 16, 20, 24):
        assert made.snapshot(tokens[:length], held, moves=True)
        assert len(made.shelf.companions.units(1)) == 1 + (length > 8)
        found = made.match([*tokens[:length], 1]).num_tokens
        assert found == (0 if length == 8 else length - 4)
    twin = made.fork(held, 24)
    assert twin.older == (held.older[0], False)
    assert made.objections([held, twin]) == ()


def test_a_snapshot_takes_the_room_of_the_one_before(table):
    """Then nothing stands a page before the end, and nothing is found."""
    made, tokens = table(STATE, num_pages=12), text(6, 20)
    held = made.begin(MISS, tokens)  # 5 + 1 + 5
    for length in (4, 8, 12, 16):
        assert made.snapshot(tokens[:length], held, moves=True)
        assert made.match([*tokens[:length], 1]) == Hit(0, (), BACKED_OFF, length)
    assert len(made.shelf.companions.units(1)) == 1
    assert made.objections([held]) == ()


def test_pages_of_one_token_keep_what_the_draft_has_of_it(table):
    made, tokens = table(page_size=1), text(7, 6)
    computed(made, tokens)
    hit = made.match([*tokens, 1])
    units = made.shelf.cache.pages(tokens)
    assert (hit.num_tokens, hit.copied) == (5, units[5])
    made.begin(hit, [*tokens, 1])
    copies = [owed[1] for owed in made.books._owed if owed[0] == "fork"]
    assert copies == [0, 1]


@pytest.mark.parametrize(
    ("length", "chunks", "found"),
    [(21, [8, 8, 5], 16), (20, [8, 8, 4], 16), (19, [8, 4, 7], 12), (7, [7], 0)],
)
def test_a_prefill_stops_where_a_text_like_it_will_go_on(
    table, new_sequence, length, chunks, found
):
    made = table(STATE)
    scheduler = Scheduler(made, max_batch=2, prefill_chunk=8, max_length=64)
    sequence = new_sequence(text(8, length))
    scheduler.add(sequence)
    scheduler.admit()
    counts = []
    while sequence.num_left:
        work = scheduler.plan()
        counts.append(work.rows[0].count)
        scheduler.advance(work)
    assert counts == chunks
    again = new_sequence(text(8, length))
    scheduler.add(again)
    scheduler.admit()
    assert (again.num_computed, again.cached_tokens) == (found, found)
    assert scheduler.objections() == ()
