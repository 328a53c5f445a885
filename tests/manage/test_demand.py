"""What batches take: stale pages not at all, shared ones once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem import errors
from kvmem.geometry import Lifecycle, LifecycleGroup
from kvmem.manage import Batch, Row, demand, rows_floor

LIVES = [Lifecycle("full"), Lifecycle("window", 128), Lifecycle("window", 40, 4)]


def group_of(life: Lifecycle, page_size: int = 32) -> LifecycleGroup:
    return LifecycleGroup(life.name, "target", life, (), page_size)


@pytest.mark.parametrize(
    ("layers", "percent"),
    [
        (dict(full=12, windowed=12), (92.9, 7.1)),
        (dict(full=4, windowed=5), (91.2, 8.8)),
    ],
)
def test_one_sequence_of_2049_tokens_gives_the_ratio_of_last_resort(
    members, layers, percent
):
    found = demand.shares(members(**layers))
    assert tuple(round(100 * share, 1) for share in found) == percent


def test_a_state_weighs_all_the_pages_it_lies_in(members):
    mixed = members(unified=True, states=6, kv_heads=1, head_dim=16, page_size=32)
    assert mixed[2].extents == 2
    assert demand.shares(mixed) == (65 / 72, 5 / 72, 2 / 72)


def test_the_first_source_of_a_ratio_that_exists_decides(members):
    made = members()
    long = Batch((Row(32_767, 32_768),))
    short = Batch((Row(63, 64),))
    assert demand.shares(made, given=(1, 3), typical=long) == (0.25, 0.75)
    assert demand.shares(made, typical=short, constraints=(long,)) == (0.5, 0.5)
    assert demand.shares(made, constraints=(long,)) == (1_024 / 1_028, 4 / 1_028)
    both = demand.shares(made, constraints=(long, Batch((Row(63, 64),) * 8)))
    assert both == (1_024 / 1_040, 16 / 1_040)  # of each group the most of any batch


def test_bytes_are_rounded_to_grains_before_they_are_compared(members):
    # 65 and 5 pages of 786,432 B are 48.75 and 3.75 MiB: 25 and 2 grains of 2 MiB.
    found = demand.shares(members(), grain_nbytes=2 << 20)
    assert found == (25 / 27, 2 / 27)


@given(
    st.sampled_from(LIVES),
    st.integers(0, 400),
    st.lists(
        st.tuples(st.integers(0, 700), st.integers(1, 64)), min_size=1, max_size=4
    ),
)
def test_a_batch_takes_the_pages_that_some_row_still_reads(life, shared, rows):
    size = 32
    made = tuple(Row(shared + history, shared + history + new) for history, new in rows)
    wanted = set()
    for i, row in enumerate(made):
        kept = set(range(-(-row.capacity // size)))
        kept -= set(life.stale(row.history, size))
        common = shared // size
        wanted |= {("shared", n) if n < common else (i, n) for n in kept}
    assert demand.pages(Batch(made, shared), group_of(life)) == len(wanted)


def test_a_shared_text_out_of_every_window_costs_nothing():
    window = group_of(Lifecycle("window", 128))
    batch = Batch((Row(4_095, 4_096),) * 8, shared=1_024)
    assert demand.pages(batch, window) == 8 * 4
    assert demand.pages(batch, group_of(Lifecycle("full"))) == 32 + 8 * 96


def test_a_row_has_one_state_and_shares_none():
    batch = Batch((Row(100, 101), Row(900, 901)), shared=64)
    assert demand.pages(batch, group_of(Lifecycle("state"))) == 2


def test_floors_hold_every_batch_that_must_fit(members):
    made = members()
    batches = (Batch((Row(2_048, 2_049),)), Batch((Row(30, 31),) * 12))
    assert demand.floors(made, batches) == (65, 12)
    assert demand.floors(made, ()) == (1, 1)


def test_floors_of_rows_are_the_peak_of_what_is_bounded(members):
    made = members(window=16, states=1)
    assert rows_floor(made, 64, 4_096) == (128, 2 * 64, 64)
    assert rows_floor(made, 64, 4_096, step=256) == (128, 10 * 64, 64)


@pytest.mark.parametrize("wrong", [(-1, 4), (5, 4)])
def test_a_row_has_room_for_what_it_has(wrong):
    with pytest.raises(errors.ConfigError, match="room for what it has"):
        Row(*wrong)


@pytest.mark.parametrize(
    ("rows", "shared"), [((), 0), ((Row(3, 4),), 5), ((Row(3, 4),), -1)]
)
def test_a_batch_shares_at_most_its_shortest_row(rows, shared):
    with pytest.raises(errors.ConfigError, match="share at most"):
        Batch(rows, shared)
