"""Bytes are divided in grains, above floors, and never more than there are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem import errors
from kvmem.manage import sizing
from kvmem.manage.sizing import Part

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("ratios", "floors", "pages"),
    [
        ((0.25, 0.75), (1, 1), (24, 24)),
        ((0.05, 0.95), (16, 1), (16, 26)),
        ((0.5, 0.5), (1, 1), (48, 16)),
    ],
)
def test_96_mib_over_pages_of_one_and_three(ratios, floors, pages):
    parts = [
        Part((size * MIB,), ratio, floor)
        for size, ratio, floor in zip((1, 3), ratios, floors, strict=True)
    ]
    assert sizing.split(96 * MIB, parts, 2 * MIB) == pages
    swapped = sizing.split(96 * MIB, parts[::-1], 2 * MIB)
    assert swapped == pages[::-1]


@pytest.mark.parametrize(
    ("nbytes", "grain_mib"),
    [
        (1, 2), (GIB, 2), (2 * GIB - 1, 2), (2 * GIB, 4), (4 * GIB - 1, 4),
        (4 * GIB, 8), (8 * GIB - 1, 8), (8 * GIB, 16), (16 * GIB - 1, 16),
        (16 * GIB, 32), (141 * GIB, 32),
    ],
)  # fmt: skip
def test_the_grain_grows_with_the_memory(nbytes, grain_mib):
    assert sizing.device_grain(nbytes) == grain_mib * MIB


def test_a_pool_takes_every_page_its_grains_hold():
    parts = [Part((3 * MIB,), 0.5), Part((5 * MIB,), 0.5)]
    # 15 grains of 8 MiB: 7 hold 18 pages of 3, 8 hold 12 of 5.
    assert sizing.split(120 * MIB, parts, 8 * MIB) == (18, 12)
    # Pinned at 17, of 51 MiB, it has the 7 grains of 18 anyway.
    low = [Part((3 * MIB,), 0.01, 17), Part((5 * MIB,), 0.99)]
    assert sizing.split(120 * MIB, low, 8 * MIB) == (18, 12)


def test_the_arrays_of_a_pool_grow_together():
    # Pages of 1 and 2 MiB: 3 pages are 2 + 3 grains of 2 MiB, 4 are 2 + 4.
    (pages,) = sizing.split(10 * MIB, [Part((MIB, 2 * MIB), 1)], 2 * MIB)
    assert pages == 3


def test_bytes_are_rounded_down_to_grains():
    assert sizing.split(4 * MIB - 1, [Part((MIB,), 1)], 2 * MIB) == (2,)


@pytest.mark.parametrize("floors", [(48, 17), (96, 1), (97, 1), (1, 33)])
def test_floors_that_do_not_fit_are_refused_with_their_bytes(floors):
    parts = [
        Part((size * MIB,), 0.5, floor, name)
        for size, floor, name in zip((1, 3), floors, ("small", "large"), strict=True)
    ]
    with pytest.raises(errors.OutOfPages, match=rf"small {floors[0]}, large") as caught:
        sizing.split(96 * MIB, parts, 2 * MIB)
    assert "100,663,296 B" in str(caught.value)


def test_floors_that_fill_everything_fit():
    parts = [Part((MIB,), 0.5, 48), Part((3 * MIB,), 0.5, 16)]
    assert sizing.split(96 * MIB, parts, 2 * MIB) == (48, 16)


@settings(max_examples=150)
@given(
    st.integers(1, 4 * GIB),
    st.sampled_from([1, 4_096, 2 * MIB]),
    st.lists(
        st.tuples(st.integers(1, 4 * MIB), st.floats(1e-6, 1), st.integers(1, 40)),
        min_size=1,
        max_size=5,
    ),
)
def test_no_division_exceeds_the_bytes_or_falls_below_a_floor(nbytes, grain, rows):
    parts = [Part((size,), ratio, floor) for size, ratio, floor in rows]
    try:
        pages = sizing.split(nbytes, parts, grain)
    except errors.OutOfPages:
        least = sum(-(-size * floor // grain) * grain for size, _, floor in rows)
        slack = sum(size + grain for size, _, _ in rows)
        assert least + slack > nbytes - nbytes % grain - slack
        return
    taken = [
        -(-size * count // grain) * grain
        for (size, _, _), count in zip(rows, pages, strict=True)
    ]
    assert sum(taken) <= nbytes
    assert all(n >= row[2] for n, row in zip(pages, rows, strict=True))


@pytest.mark.parametrize(
    ("rows", "grain"),
    [
        ((), 1),
        (((0.5, 1), (0, 1)), 1),
        (((0.5, 1), (-1, 1)), 1),
        (((1, 0),), 1),
        (((1, 1),), 0),
    ],
)
def test_weights_and_floors_are_positive_and_so_is_the_grain(rows, grain):
    with pytest.raises(errors.ConfigError, match="weight above zero"):
        sizing.split(GIB, [Part((MIB,), *row) for row in rows], grain)
