"""The length of a hit: what every group can go on from, found in one look."""

import random

import numpy as np
import pytest

from kvmem.geometry import Lifecycle, goes_on, hit_pages
from kvmem.geometry.lifecycle import FULL, STATE

PAGE = 4


def shortened(lives, page_size, present):
    """Shorten for one group after the other until none objects: the rule in words."""
    n = max(map(len, present))
    while True:
        before = n
        for life, has in zip(lives, present, strict=True):
            has = [*has, *[False] * n]
            if life.kind == "state":
                while n and not has[n - 1]:
                    n -= 1
                continue
            stale = life.stale(n * page_size, page_size)
            needed = [i for i in range(n) if i not in stale]
            if missing := [i for i in needed if not has[i]]:
                n = missing[-1] if life.kind == "window" else missing[0]
        if n == before:
            return n


@pytest.mark.case("LAY-11")
def test_index_keys_and_their_latent_are_used_together_or_not_at_all():
    latent, keys = np.ones(6, bool), np.ones(4, bool)
    assert hit_pages((FULL, FULL), PAGE, (latent, keys)) == 4
    assert hit_pages((FULL, FULL), PAGE, (keys, latent)) == 4
    holed = np.array([1, 1, 0, 1, 1, 1], bool)
    assert hit_pages((FULL, FULL), PAGE, (latent, holed)) == 2


def test_a_window_needs_its_trailing_pages_and_its_sinks():
    full, window = np.ones(8, bool), np.zeros(8, bool)
    window[[6, 7]] = True
    # after 32 tokens the query at 32 reads positions 25 to 32: pages 6 and 7
    assert hit_pages((FULL, Lifecycle("window", 8)), PAGE, (full, window)) == 8
    # with a window of 9 also position 24, still in page 6; of 10 position 23
    assert hit_pages((FULL, Lifecycle("window", 9)), PAGE, (full, window)) == 8
    assert hit_pages((FULL, Lifecycle("window", 10)), PAGE, (full, window)) == 0
    assert hit_pages((FULL, Lifecycle("window", 8, 3)), PAGE, (full, window)) == 0
    window[0] = True
    assert hit_pages((FULL, Lifecycle("window", 8, 3)), PAGE, (full, window)) == 8


def test_a_state_is_restored_where_a_snapshot_stands_and_never_further():
    full, state = np.ones(8, bool), np.zeros(8, bool)
    state[[1, 4]] = True
    assert hit_pages((FULL, STATE), PAGE, (full, state)) == 5
    assert hit_pages((FULL, STATE), PAGE, (full[:4], state[:4])) == 2
    assert hit_pages((FULL, STATE), PAGE, (full, np.zeros(8, bool))) == 0


def test_groups_shorten_each_other_until_none_objects():
    full, window, state = np.ones(8, bool), np.ones(8, bool), np.zeros(8, bool)
    window[4], state[[3, 5, 7]] = False, True
    # a snapshot stands after 6 and after 8 pages; the window of 12 lacks page 4 at 6
    lives = (FULL, Lifecycle("window", 9), STATE)
    assert hit_pages(lives, PAGE, (full, window, state)) == 8
    assert hit_pages(lives, PAGE, (full[:7], window[:7], state[:7])) == 4


@pytest.mark.parametrize("seed", range(4))
def test_one_look_finds_what_shortening_finds(seed):
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    found = set()
    for _ in range(400):
        page_size = rng.choice((1, 2, 4))
        lives = [FULL, rng.choice((FULL, STATE))]
        lives += [
            Lifecycle("window", rng.randrange(1, 14), rng.choice((0, 0, 1, 5)))
            for _ in range(rng.randrange(3))
        ]
        m = rng.randrange(0, 12)
        present = [draw.random(m) < rng.choice((0.6, 0.9, 1)) for _ in lives]
        n = hit_pages(lives, page_size, present)
        assert n == shortened(lives, page_size, present)
        found.add(n)
    assert len(found) > 6


@pytest.mark.parametrize(
    "life",
    [FULL, STATE, Lifecycle("window", 6), Lifecycle("window", 3, sinks=5)],
    ids=str,
)
def test_inside_a_page_a_group_goes_on_if_it_has_what_the_next_query_reads(life):
    rng = random.Random(7)
    histories = np.arange(6 * PAGE + 1)
    for _ in range(60):
        has = np.array([rng.random() < 0.7 for _ in range(6)])
        for history, said in zip(
            histories, goes_on(life, PAGE, has, histories), strict=True
        ):
            stale = life.stale(int(history), PAGE)
            if life.kind == "state":  # it stands where a page ends, and nowhere else
                whole, rest = divmod(int(history), PAGE)
                assert said == (not rest and (not whole or has[whole - 1]))
                continue
            pages = set(range(-(-int(history) // PAGE))) - set(stale)
            assert said == all(has[page] for page in pages)
