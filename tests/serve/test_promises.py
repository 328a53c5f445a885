"""What a window will hold is promised when its sequence begins: nobody is sent back."""

import pytest

from kvmem import pool as pools
from kvmem.geometry import Lifecycle
from kvmem.geometry.lifecycle import FULL
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.page_table import PageTable
from kvmem.serve.scheduler import Scheduler

MISS = Hit(0, ())
PAGE, CHUNK = 4, 8


@pytest.fixture
def served(new_sequence):
    """Serve prompts of 64 tokens that arrive together; return what it took."""

    def run(lives, vpages, *, prompts=12, new=24, breaks=None):
        num_pages = sum(vpages)
        ledger = pools.Ledger(num_pages, vpages, (1,) * len(lives))
        table = PageTable(ledger, PrefixCache(PAGE), lives)
        if breaks:
            breaks(table)
        made = Scheduler(
            table, max_batch=8, prefill_chunk=CHUNK, max_length=256, prefix_cache=False
        )
        for at in range(prompts):
            prompt = [(at * 101 + place * 7) % 97 for place in range(64)]
            made.add(new_sequence(prompt, max_tokens=new))
        computed = most = 0
        while made.has_work:
            made.admit()
            most = max(most, len(made.running))
            work = made.plan()
            computed += sum(row.count for row in work.rows)
            for sequence in made.advance(work):
                sequence.accept(1, frozenset(), None)
                if sequence.finish_reason:
                    made.finish(sequence)
            assert made.objections() == ()
        assert table.accounts().free == num_pages
        return made.num_preempted, computed, most

    return run


def first_chunk_only(table):
    """Admit by the first chunk of a window, as if nobody had begun before."""
    table.needs.promised = lambda holdings: (0,) * len(table.lives)


WALLS = ((FULL, Lifecycle("window", 40)), (256, 44))
TWO_WINDOWS = ((FULL, WALLS[0][1], Lifecycle("window", 24, 4)), (256, 44, 36))
ONCE = 12 * (64 + 24 - 1)  # each token of each prompt, but the last that is chosen


@pytest.mark.parametrize("mix", [WALLS, TWO_WINDOWS])
def test_prompts_admitted_together_send_none_of_themselves_back(served, mix):
    preempted, computed, most = served(*mix)
    assert (preempted, computed) == (0, ONCE)
    assert most == 3  # 44 pages hold the peaks of three: 40 + 7 tokens straddle 13


@pytest.mark.parametrize("mix", [WALLS, TWO_WINDOWS])
def test_admission_by_the_first_chunk_would_be_a_storm(served, mix):
    preempted, computed, most = served(*mix, breaks=first_chunk_only)
    assert preempted >= 10 and computed > ONCE + 100 and most > 3


@pytest.fixture
def table():
    def make(pages=40, window=8):
        ledger = pools.Ledger(40 + pages, (40, pages))
        lives = (FULL, Lifecycle("window", window))
        return PageTable(ledger, PrefixCache(PAGE), lives)

    return make


def test_a_promise_is_the_peak_less_what_is_held(table):
    made = table()
    assert made.needs.peak(40, CHUNK) == (10, 5)
    held = made.begin(MISS, list(range(40)), step=CHUNK)
    assert made.promised() == (0, 3)  # two pages of the first chunk
    for end in range(CHUNK, 40 + CHUNK, CHUNK):
        assert made.extend(held, end)
        peak = 5 - len(held.columns[1])
        assert made.promised() == (0, peak)
        made.trim(held, end)
    # one token a step from now on: 8 - 1 tokens and one straddle three pages
    assert made.needs.peak(40, 1) == (10, 3)
    assert made.promised() == (0, 3 - len(held.columns[1]))
    made.give_back(held)
    assert made.promised() == (0, 0)


def test_a_sequence_that_decodes_finds_its_next_page_whoever_began_since(table):
    made = table(pages=5)
    first = made.begin(MISS, list(range(8)), step=CHUNK)
    made.trim(first, 8)  # both pages are read still
    assert made.extend(first, 9)
    made.trim(first, 12)
    assert (len(first.columns[1]), made.promised()) == (2, (0, 1))
    assert made.begin(MISS, list(range(50, 61)), step=CHUNK) is None  # 3 of 3 free
    assert made.begin(MISS, list(range(50, 58)), step=CHUNK) is not None
    assert made.extend(first, 13)


def test_a_twin_is_promised_what_its_windows_will_hold(table):
    made = table(pages=6)
    held = made.begin(MISS, list(range(16)), step=CHUNK)
    assert made.extend(held, 16)
    made.trim(held, 16)
    assert len(held.columns[1]) == 2 and made.promised() == (0, 1)
    twins = []
    while (twin := made.fork(held, 16)) is not None:
        twins.append(twin)
    # 2 pages are shared by all, and 4 are left: each may come to need one more
    assert len(twins) == 3 and made.promised() == (0, 4)


def test_no_snapshot_takes_what_is_promised(new_sequence):
    lives = (FULL, Lifecycle("window", 8), Lifecycle("state"))
    table = PageTable(
        pools.Ledger(14, (14, 14, 7), (1, 1, 2)), PrefixCache(PAGE), lives
    )
    tokens = list(range(16))
    held = table.begin(MISS, tokens, step=CHUNK)  # 4 + 2 + 2 pages, 2 more promised
    assert table.needs.peak(16, CHUNK) == (4, 4, 1) and table.promised() == (0, 2, 0)
    other = table.begin(MISS, [90, 91, 92, 93], step=CHUNK)  # 1 + 1 + 2
    assert other is not None and table.accounts().free == 2
    assert not table.snapshot(tokens[:4], held)  # 2 are free, and promised
    table.give_back(other)
    assert table.snapshot(tokens[:8], held)


def test_who_runs_is_rolled_back_whatever_others_were_promised(table):
    made, tokens = table(pages=6), list(range(24))
    held = made.begin(MISS, tokens, step=CHUNK)
    for end in (8, 16, 24):
        assert made.extend(held, end)
        made.trim(held, end)
    other = made.begin(MISS, list(range(50, 58)), step=CHUNK)
    other.peaks = (10, 5)  # as if it had a long way to go
    assert made.promised() == (0, 4)  # its three, and the page of one who decodes
    assert made.ledger.headroom(1) == 2
    found, computed = made.roll_back(held, tokens, 8)  # begins anew: two pages
    assert (computed, len(found.columns[1])) == (0, 2)
    assert made.promised()[1] == 3 + made.needs.peak(8, 8)[1] - 2
