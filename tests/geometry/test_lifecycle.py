"""Lifecycles: which pages are stale, which are resident, and the most there can be."""

import random

import pytest

from kvmem import errors
from kvmem.geometry import Lifecycle


def window(size, sinks=0):
    return Lifecycle("window", size, sinks)


@pytest.mark.parametrize(
    ("size", "page", "least", "most"),
    [(128, 32, 4, 5), (128, 64, 2, 3), (11, 32, 1, 2), (128, 128, 1, 2)],
)
def test_decoding_holds_between_two_numbers_of_pages(size, page, least, most):
    life = window(size)
    held = {life.resident(h + 1, h, page) for h in range(4 * size + page, 4097)}
    assert (min(held), max(held)) == (least, most)
    assert life.peak(4097, page) == most


def test_stale_pages_begin_behind_the_sinks():
    assert window(64, sinks=4).stale(1000, 32) == range(1, 29)


def test_full_attention_has_no_stale_page_and_a_state_only_stale_ones():
    assert len(Lifecycle("full").stale(10_000, 16)) == 0
    assert Lifecycle("state").stale(100, 32) == range(3)
    assert [Lifecycle("state").resident(n, n, 32) for n in (1, 31, 32, 1000)] == [1] * 4


@pytest.mark.parametrize("sinks", [0, 1, 5, 33])
@pytest.mark.parametrize(("size", "page"), [(128, 32), (11, 32), (1, 1), (7, 3)])
def test_a_page_is_stale_exactly_when_no_later_query_reads_any_of_it(size, page, sinks):
    life = window(size, sinks)
    for history in [*range(0, 200), 1023, 1024, 4096]:
        stale = set(life.stale(history, page))
        for ordinal in range(-(-history // page)):
            tokens = range(ordinal * page, (ordinal + 1) * page)
            is_read = any(t > history - size or t < sinks for t in tokens)
            whole_sinks = ordinal < life.sink_pages(page)
            assert (ordinal in stale) == (not is_read and not whole_sinks), history


def test_the_peak_is_what_a_sequence_really_reaches_in_steps_of_any_size():
    rng = random.Random(11)
    for _ in range(60):
        life = window(rng.randint(1, 80), rng.choice([0, 0, 3, 20]))
        page, step, length = rng.choice([1, 4, 16]), rng.randint(1, 40), 400
        held = [life.resident(min(h + step, length), h, page) for h in range(0, length)]
        assert max(held) <= life.peak(length, page, step)
        assert life.peak(length, page, step) <= max(held) + 1


@pytest.mark.parametrize(
    ("kind", "size", "sinks"),
    [("ring", None, 0), ("window", None, 0), ("window", 0, 0), ("full", 8, 0)],
)
def test_a_life_that_nobody_leads_is_refused(kind, size, sinks):
    with pytest.raises(errors.ConfigError, match="Use one of full, window, state"):
        Lifecycle(kind, size, sinks)


def test_lifecycles_spell_themselves_as_plans_and_ids_do():
    lives = [Lifecycle("full"), window(128), window(128, 4), Lifecycle("state")]
    assert [str(life) for life in lives] == [
        "full",
        "window(128)",
        "window(128, 4 sinks)",
        "state",
    ]
