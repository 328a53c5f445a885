"""Pages of windows, index keys and states beside those of full attention."""

import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as pools
from kvmem.geometry import Lifecycle
from kvmem.geometry.lifecycle import FULL, STATE
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.page_table import PageTable
from kvmem.serve.scheduler import Scheduler

MISS = Hit(0, ())
WINDOW = Lifecycle("window", 8)


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 9_000, length).tolist()


@pytest.fixture
def table():
    """Full attention and others over one pool; a state takes three pages."""

    def make(*others, num_pages=40, page_size=4):
        lives = (FULL, *others)
        extents = tuple(3 if life == STATE else 1 for life in lives)
        vpages = tuple(num_pages // extent for extent in extents)
        ledger = pools.Ledger(num_pages, vpages, extents)
        return PageTable(ledger, PrefixCache(page_size), lives)

    return make


@pytest.fixture
def compute():
    """Compute all of a text in steps, as a scheduler does."""

    def run(table, tokens, step=8, stops=()):
        hit = table.match(tokens)
        held = table.begin(hit, tokens, step=step)
        done = hit.num_tokens
        while done < len(tokens):
            end = min([done + step, len(tokens), *(s for s in stops if s > done)])
            assert table.extend(held, end)
            done = end
            if done in stops:
                assert table.snapshot(tokens[:done], held)
            table.publish(tokens[:done], held)
            table.trim(held, done)
        return held

    return run


@pytest.mark.case("SWA-01")
@pytest.mark.parametrize(
    ("computed", "freed"), [(8, 0), (10, 0), (11, 1), (12, 1), (14, 1), (15, 2)]
)
def test_pages_leave_a_window_when_no_later_query_reads_them(table, computed, freed):
    made = table(WINDOW)
    held = made.begin(MISS, text(0, 16))
    before = list(held.columns[1])
    made.trim(held, computed)
    assert held.columns[1] == before[freed:]
    assert held.firsts == [0, freed]
    assert made.accounts().free == 40 - 8 + freed
    assert made.objections([held]) == ()


@pytest.mark.case("SWA-04")
def test_a_window_does_not_grow_with_the_prompt(compute):
    window, page, step, length = 1_024, 16, 2_048, 100_000
    ledger = pools.Ledger(6_500)
    ledger = pools.Ledger(6_500, (6_500, 6_500))
    lives = (FULL, Lifecycle("window", window))
    made = PageTable(ledger, PrefixCache(page), lives)
    tokens = [1] * length
    held = made.begin(MISS, tokens, step=step)
    most = 0
    for end in range(step, length + step, step):
        end = min(end, length)
        assert made.extend(held, end)
        most = max(most, len(held.columns[1]))
        made.trim(held, end)
        assert held.end(1) == -(-end // page)  # the table counts absolute pages
    assert most <= 64 + 1 + 128
    assert len(held.columns[0]) == 6_250
    assert made.objections([held]) == ()


def test_a_sequence_gets_pages_of_all_groups_or_of_none(table):
    made = table(WINDOW, STATE, num_pages=12)
    assert made.begin(MISS, text(1, 24)) is None  # 6 + 6 + 3 pages
    assert made.accounts() == (12, 0, 0, 12)
    held = made.begin(MISS, text(1, 12))  # 3 + 3 + 3
    assert [len(vpages) for vpages in held.columns] == [3, 3, 1]
    assert made.extend(held, 16) and made.accounts().free == 1
    assert not made.extend(held, 20)
    assert [len(vpages) for vpages in held.columns] == [4, 4, 1]
    made.give_back(held)
    assert made.accounts().free == 12


def test_a_window_is_admitted_by_its_peak_and_given_its_first_chunk(table):
    made = table(WINDOW, num_pages=15)
    # 10 pages of full attention, and at most 5 of the window: 8 - 1 tokens before a
    # chunk of 8 straddle four pages, or five.
    assert made.needs.peak(40, 8) == (10, 5)
    held = made.begin(MISS, text(2, 40), step=8)
    assert [len(vpages) for vpages in held.columns] == [10, 2]
    assert table(WINDOW, num_pages=14).begin(MISS, text(2, 40), step=8) is None


def test_a_hit_needs_only_the_trailing_pages_of_a_window(table, compute):
    made = table(WINDOW)
    tokens = text(3, 24)
    made.give_back(compute(made, tokens))
    hit = made.match([*tokens, 1])
    assert (hit.num_tokens, hit.num_matched) == (24, 24)
    held = made.begin(hit, [*tokens, 1])
    assert held.ordinals(1) == [4, 5, 6]
    assert made.objections([held]) == ()


def test_a_windows_page_leaves_a_cached_text_that_stays(table, compute):
    made = table(WINDOW, num_pages=14)
    tokens = text(4, 24)
    made.give_back(compute(made, tokens))  # 6 of full attention, 6 of the window
    assert made.accounts() == (2, 12, 0, 14)
    other = made.begin(MISS, text(5, 12))  # asks for 6: four of the window go
    assert made.accounts() == (0, 8, 6, 14) and made.num_evicted == 4
    assert made.match([*tokens, 1]).num_tokens == 24
    # a text that parts after three pages has lost the window there
    hit = made.match([*tokens[:12], 1, 2])
    assert (hit.num_tokens, hit.num_matched) == (0, 12)
    assert "window(8)" in hit.reason
    made.give_back(other)


def test_a_page_of_full_attention_leaves_with_all_that_goes_with_it(table, compute):
    made = table(WINDOW, FULL, num_pages=18)
    tokens = text(6, 24)
    made.give_back(compute(made, tokens))
    assert made.accounts() == (0, 18, 0, 18)
    held = made.begin(MISS, text(7, 8))  # 2 of each: four spares, then a tail
    assert made.accounts() == (1, 11, 6, 18)
    assert made.match([*tokens, 1]).num_matched == 20
    assert made.objections([held]) == ()


@pytest.mark.parametrize("length", [12, 13, 16])
def test_a_state_is_never_restored_one_token_too_far(table, compute, length):
    """As vLLM #51094 did at an exact chunk boundary."""
    made = table(STATE)
    tokens = text(8, length)
    last = (length - 1) // 4 * 4
    made.give_back(compute(made, tokens, stops=(last,)))
    for more in ([], [1], [1, 2]):
        hit = made.match([*tokens, *more])
        assert hit.num_tokens == last
        again = made.begin(hit, [*tokens, *more])
        snapshot = made.shelf.companions.pages(1, hit.vpages[-1:]).tolist()
        assert again.columns[1] != snapshot and len(again.columns[1]) == 1
        made.give_back(again)
    # attention alone is there for more, and is not taken without a state
    assert made.match([*tokens, 1]).num_matched == length // 4 * 4
    assert made.match(tokens[:last]).num_tokens == 0


def test_a_snapshot_is_a_copy_and_the_live_state_stays_the_sequences_own(table):
    made, tokens = table(STATE), text(9, 8)
    held = made.begin(MISS, tokens)
    (live,) = held.columns[1]
    assert made.snapshot(tokens, held)
    assert held.columns[1] == [live]
    (unit,) = made.shelf.companions.units(1)
    (copy,) = made.shelf.companions.pages(1, [unit])
    assert copy != live
    assert made.accounts() == (32, 3, 5, 40)  # 2 + 3 in use, a copy of 3
    verb, group, vpages, copied = made.books._owed[-1]
    assert (verb, group, vpages, copied) == ("fork", 1, (live,), 0)


def test_a_moving_snapshot_leaves_none_behind_and_a_standing_one_becomes_spare(table):
    made, tokens = table(STATE), text(10, 20)
    held = made.begin(MISS, tokens)
    assert made.snapshot(tokens[:8], held)
    assert made.snapshot(tokens[:12], held, moves=True)
    units = held.columns[0]
    assert list(made.shelf.companions.spares) == [(1, units[1])]
    assert made.snapshot(tokens[:16], held, moves=True)
    assert made.shelf.companions.units(1).tolist() == sorted([units[1], units[3]])
    assert made.objections([held]) == ()


def test_no_snapshot_is_taken_at_the_price_of_another_sequence(table):
    made, tokens = table(STATE, num_pages=7), text(11, 8)
    held = made.begin(MISS, tokens)
    other = made.begin(MISS, [])  # a state alone: 2 + 3 + 3 would be eight
    assert other is None
    assert not made.snapshot(tokens, held)  # two pages are left, a copy takes three
    assert made.match([*tokens, 1]).num_matched == 8
    assert made.objections([held]) == ()


def test_a_states_shortage_is_paid_by_attention_and_only_as_far_as_it_must(table):
    """As sglang #34441 could not: a state starved beside a full cache."""
    made = table(STATE, num_pages=14)
    tokens = text(12, 32)
    held = compute_and_free(made, tokens)
    assert held == (3, 11, 0, 14)  # 8 of attention, a snapshot of 3
    again = made.begin(MISS, text(13, 8))  # 2 + 3: two are lacking
    assert again is not None and made.num_evicted == 4  # the tail and its snapshot
    assert made.match([*tokens, 1]).num_matched == 28


def compute_and_free(table, tokens):
    held = table.begin(MISS, tokens)
    table.snapshot(tokens, held)
    table.give_back(held)
    return table.accounts()


def test_a_sequence_alone_goes_on_whatever_the_cache_holds(table):
    made = table(STATE, num_pages=11)
    tokens = text(14, 16)
    compute_and_free(made, tokens)  # 4 + 3
    longer = [*tokens, *text(15, 12)]
    hit = made.match(longer)
    assert hit.num_tokens == 16
    held = made.begin(hit, longer)  # 7 + 3, while the snapshot's 3 are kept: too much
    assert held is None and made.accounts() == (4, 7, 0, 11)
    held = made.begin(made.match(longer[:20]), longer[:20])  # 5 + 3 beside it
    assert made.accounts() == (0, 3, 8, 11)
    assert made.extend(held, 32)  # the snapshot goes: nobody else can
    assert made.accounts() == (0, 0, 11, 11)


def test_samples_share_attention_and_copy_their_state(table):
    made = table(STATE, WINDOW)
    held = made.begin(MISS, text(16, 10))
    twin = made.fork(held, 10)
    assert twin.columns[0][:2] == held.columns[0][:2]
    assert twin.columns[1] != held.columns[1]
    for group in (0, 2):  # the partial page is a copy
        assert twin.columns[group][2] != held.columns[group][2]
    assert made.objections([held, twin]) == ()
    assert made.accounts().in_use == (3 + 3 + 3) + (1 + 3 + 1)


@pytest.mark.case("SWA-06")
def test_rolled_back_tokens_leave_a_window_exact_or_it_begins_anew(table, compute):
    made = table(Lifecycle("window", 4), page_size=2)
    tokens = text(17, 6)
    held = compute(made, tokens, step=2)
    assert held.firsts[1] == 1  # position 3 is read, 2 stands in its page
    found, computed = made.roll_back(held, tokens[:5], 5)
    assert computed == 5 and found.ordinals(1) == [1, 2]
    assert made.objections([found]) == ()
    # further back the window's first page is needed, which this sequence gave up: it
    # begins again from a text that all groups have, or from nothing
    found, computed = made.roll_back(found, tokens[:4], 4)
    assert computed == 4 and found.ordinals(1) == [0, 1]
    assert made.objections([found]) == ()
    made.give_back(found)
    made.clear_cache()
    held = compute(made, text(18, 8), step=2)
    made.clear_cache()
    found, computed = made.roll_back(held, text(18, 8)[:2], 2)
    assert computed == 0 and made.objections([found]) == ()


def test_a_state_is_rolled_back_to_the_snapshot_before_and_the_rest_computed(table):
    made, tokens = table(STATE), text(19, 11)
    held = made.begin(MISS, tokens)
    (live,) = held.columns[1]
    made.snapshot(tokens[:8], held)
    found, computed = made.roll_back(held, tokens[:10], 10)
    assert computed == 8 and found.columns[1] != [live]
    assert made.objections([found]) == ()
    found, computed = made.roll_back(found, tokens[:7], 7)
    assert computed == 0  # nothing stands after fewer than 8
    assert made.objections([found]) == ()


def test_a_roll_back_writes_into_no_page_that_others_read(table):
    made, tokens = table(), text(20, 8)
    held = made.begin(MISS, tokens)
    made.publish(tokens, held)
    before = list(held.columns[0])
    found, computed = made.roll_back(held, tokens[:6], 6)
    assert computed == 6
    assert found.columns[0][0] == before[0] and found.columns[0][1] != before[1]
    assert made.match([*tokens, 1]).num_tokens == 8


def test_a_request_that_no_pool_holds_is_told_what_each_group_needs(scheduler, table):
    made = table(WINDOW, STATE, num_pages=15)
    never = made.needs.peak(40, 8)
    assert never == (10, 5, 1) and made.needs.never_fits(never)
    words = made.needs.in_words(never)
    assert words == "10 of full, 5 of window(8), 1 of state in 3 parts each: 18 pages"
    assert not made.needs.never_fits((10, 2, 1))
    assert made.needs.limits_in_words == "15"
    ledger = pools.Ledger(40, (9, 20))
    divided = PageTable(ledger, PrefixCache(4), (FULL, WINDOW)).needs
    assert divided.never_fits((10, 5))
    assert divided.limits_in_words == "40, divided into 9 of full, 20 of window(8)"


def test_a_model_that_keeps_no_whole_text_says_why_nothing_is_shared():
    table = PageTable(pools.Ledger(20), PrefixCache(4), (WINDOW,))
    tokens = text(21, 16)
    held = table.begin(table.match(tokens), tokens)
    table.publish(tokens, held)
    assert table.match(tokens).reason == "no layer of this model keeps whole texts"
    table.give_back(held)
    assert table.accounts() == (20, 0, 0, 20)


def test_a_handout_that_fails_leaves_every_group_as_it_was(table):
    made = table(WINDOW, STATE, num_pages=12)
    before = [group.refs.copy() for group in made.ledger.groups]
    with pytest.raises(errors.OutOfPages):
        made.books.handout(0, 13)
    assert made.begin(MISS, text(22, 30)) is None
    for group, refs in zip(made.ledger.groups, before, strict=True):
        assert (group.refs == refs).all()
    assert made.books._owed == []


def test_where_texts_part_a_window_stays_while_older_texts_go(table, compute):
    """A system prompt is used by every request, the texts behind it once."""
    made = table(WINDOW, num_pages=40)
    stem = text(23, 16)
    found = []
    for number in range(12):
        tokens = [*stem, *text(100 + number, 21)]
        found.append(made.match(tokens).num_tokens)
        held = compute(made, tokens)
        assert made.objections([held]) == ()
        made.give_back(held)
    assert made.num_evicted > 80  # the pool is many times too small for them all
    assert found == [0] + [16] * 11


def test_a_moving_snapshot_never_drops_one_that_another_text_stands_at(table):
    made, tokens = table(STATE), text(24, 16)
    first = made.begin(MISS, tokens)
    assert made.snapshot(tokens[:8], first)
    other = made.begin(MISS, tokens)
    for length in (8, 12, 16):
        assert made.snapshot(tokens[:length], other, moves=True)
    assert made.match([*tokens[:8], 1]).num_tokens == 8
    assert made.objections([first, other]) == ()


def test_a_moving_snapshot_takes_the_room_of_the_one_before(table):
    made, tokens = table(STATE, num_pages=10), text(25, 16)
    held = made.begin(MISS, tokens)
    for length in (4, 8, 12, 16):
        assert made.snapshot(tokens[:length], held, moves=True)
        assert made.match([*tokens[:length], 1]).num_tokens == length
    assert made.num_evicted == 0 and made.accounts() == (0, 3, 7, 10)


def test_the_snapshot_that_a_text_begins_from_is_not_evicted_to_make_it_room(table):
    made, tokens = table(STATE, num_pages=13), text(26, 16)
    held = made.begin(MISS, tokens)
    made.snapshot(tokens[:8], held)
    made.snapshot(tokens, held)
    made.give_back(held)
    assert made.accounts() == (3, 10, 0, 13)
    other = [*tokens[:8], *text(27, 8)]
    hit = made.match(other)
    assert hit.num_tokens == 8  # its snapshot is spare, and the first to go
    held = made.begin(hit, other)
    assert made.objections([held]) == ()
    assert made.match([*tokens[:8], 1]).num_tokens == 8
    assert made.num_evicted == 4  # the tail of the longer text, with its snapshot


def test_samples_of_a_prompt_of_whole_pages_share_all_but_their_state(table):
    made = table(STATE, WINDOW)
    held = made.begin(MISS, text(28, 8))
    twin = made.fork(held, 8)
    assert twin.columns[0] == held.columns[0] and twin.columns[2] == held.columns[2]
    assert twin.columns[1] != held.columns[1]
    assert made.objections([held, twin]) == ()


def test_two_that_computed_one_text_end_with_one_copy_in_every_group(table):
    made, tokens = table(WINDOW, FULL), text(29, 12)
    first, second = made.begin(MISS, tokens), made.begin(MISS, tokens)
    made.publish(tokens, first)
    made.publish(tokens, second)
    assert second.columns == first.columns
    assert made.accounts() == (31, 0, 9, 40)
    assert made.objections([first, second]) == ()


def test_a_page_where_another_text_ends_is_not_spare(table, compute):
    made, tokens = table(WINDOW), text(30, 24)
    made.give_back(compute(made, tokens))
    passed = len(made.shelf.companions.spares)
    assert passed == 4  # pages 0 to 3 of 6
    other = made.begin(MISS, tokens[:12])
    made.publish(tokens[:12], other)
    assert len(made.shelf.companions.spares) == passed - 3
    assert made.objections([other]) == ()


@pytest.fixture
def scheduled():
    """A scheduler over a table."""

    def make(table):
        return Scheduler(table, max_batch=2, prefill_chunk=8, max_length=64)

    return make


def test_alone_a_text_begins_anew_where_its_snapshot_leaves_it_no_room(
    table, scheduled, new_sequence
):
    made = table(STATE, num_pages=11)
    tokens = text(31, 16)
    compute_and_free(made, tokens)  # 4 + 3
    scheduler = scheduled(made)
    longer = new_sequence([*tokens, *text(32, 12)], max_tokens=1)  # 7 + 3, and 3 kept
    scheduler.add(longer)
    assert [admitted.sequence for admitted in scheduler.admit()] == [longer]
    assert longer.num_computed == 0 and "no room" in longer.miss_reason
    assert scheduler.objections() == ()


@pytest.mark.parametrize(
    ("length", "chunks", "found", "copies"),
    [  # at a whole page it stands where its answer begins, and leaves a copy there too
        (21, [8, 8, 4, 1], 20, 1),
        (20, [8, 8, 4], 16, 2),
        (19, [8, 8, 3], 16, 1),
    ],
)
def test_a_prefill_takes_one_snapshot_a_page_before_its_end(
    table, scheduled, new_sequence, length, chunks, found, copies
):
    made = table(STATE)
    scheduler = scheduled(made)
    scheduler.add(new_sequence(text(33, length)))
    scheduler.admit()
    counts = []
    while (work := scheduler.plan()) is not None and scheduler.running[0].num_left:
        counts.append(work.rows[0].count)
        scheduler.advance(work)
        if sum(counts) == length:
            break
    assert counts == chunks
    forks = [owed for owed in made.books._owed if owed[0] == "fork"]
    assert len(forks) == copies
    assert made.match(text(33, length)).num_tokens == found
