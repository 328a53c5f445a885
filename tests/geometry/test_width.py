"""Widths: the index from which a flat address wraps, where people met it."""

import pytest

from kvmem import errors
from kvmem.geometry import width


@pytest.mark.case("IDX-04")
@pytest.mark.parametrize(
    ("stride", "bits", "first"),
    [
        (14_042_880, 31, 153),
        (14_042_880, 32, 306),
        (28_085_760, 31, 77),
        (28_085_760, 32, 153),
        (196_608, 31, 10_923),
        (576, 31, 3_728_271),
        (656, 31, 3_273_604),
        (149_760, 31, 14_340),
        (480 * 576, 31, 7_768),
        (8_192, 31, 262_144),
        (16_384, 31, 131_072),
    ],
)
def test_a_flat_address_wraps_from_the_reported_index_on(stride, bits, first):
    assert width.first_wrapping(stride, bits) == first
    assert (first - 1) * stride < 1 << bits <= first * stride


@pytest.mark.parametrize(
    ("layers", "rows"), [(24, 89_478_485), (61, 35_204_649), (64, 33_554_431)]
)
def test_ids_that_count_layers_in_reach_the_reported_number_of_rows(layers, rows):
    # The last row whose id times the number of blocks stays below 2**31.
    assert width.first_wrapping(layers) - 1 == rows


def test_a_path_is_refused_one_index_too_far_and_not_before():
    width.require_addressable("slots", 153, 14_042_880)
    with pytest.raises(errors.IncompatiblePlan, match="from index 153 on"):
        width.require_addressable("slots", 154, 14_042_880)
