"""Blocked-scale addresses: worked numbers, the width rule, and 64-bit offsets."""

import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, Part
from kvmem.geometry.formats import Blocked

# Slot: (values at, scale at, where a row copy would look) of pages of 64, 128 + 4.
WORKED = {
    0: (0, 8_192, 0),
    1: (128, 8_196, 132),
    17: (2_176, 8_260, 2_244),
    63: (8_064, 8_444, 8_316),
    64: (8_448, 16_640, 8_448),
    65: (8_576, 16_644, 8_580),
    127: (16_512, 16_892, 16_764),
    128: (16_896, 25_088, 16_896),
}


@pytest.mark.parametrize("slot", WORKED)
def test_values_and_scales_stand_where_the_worked_table_says(slot):
    blocked, (values, scale, naive) = Blocked(64, 128, 4), WORKED[slot]
    assert blocked.value_address(slot) == values
    assert blocked.scale_address(slot) == scale
    assert slot * blocked.row_nbytes == naive
    page, token = divmod(slot, 64)  # in words of 4 bytes
    assert values == 4 * (page * 64 * 33 + token * 32)
    assert scale == 4 * (page * 64 * 33 + 64 * 32 + token)


def test_a_small_page_by_hand():
    blocked = Blocked(4, 8, 4)
    slots = np.array([0, 1, 3, 4, 5, 7])
    assert blocked.tight_nbytes == 48
    assert blocked.value_address(slots).tolist() == [0, 8, 24, 48, 56, 72]
    assert blocked.scale_address(slots).tolist() == [32, 36, 44, 80, 84, 92]


def test_a_padded_page_step_is_one_field():
    tight, padded = Blocked(64, 576, 8), Blocked(64, 576, 8, page_nbytes=37_440)
    assert (tight.step, padded.step, padded.pad_nbytes) == (37_376, 37_440, 64)
    assert padded.value_address(65) - tight.value_address(65) == 64


@pytest.mark.parametrize(
    "values, scales", [(128, 4), (64, 4), (132, 4), (576, 8), (512, 16), (320, 32)]
)
def test_every_row_of_whole_words_is_accepted_where_its_split_is_declared(
    values, scales
):
    assert Blocked(64, values, scales).row_nbytes == values + scales


@pytest.mark.parametrize(
    "args, law",
    [
        ((64, 126, 4), "a row of 130 bytes is no multiple of 4"),
        ((64, 127, 4), "a row of 131 bytes"),
        ((64, 2, 1), "a row of 3 bytes"),
        ((0, 128, 4), "a page of 0 tokens"),
        ((64, 136, 0), "declared, not guessed"),
        ((64, 584, 0), "declared, not guessed"),
        ((64, 576, 8, 37_375), "37375 bytes apart overlap"),
    ],
)
def test_what_some_backend_could_not_copy_is_refused_for_all(args, law):
    with pytest.raises(errors.FormatMismatch, match=law) as refusal:
        Blocked(*args)
    assert "NL_X_NB_BSV_BSS" in str(refusal.value)


def test_addresses_past_two_and_four_gigabytes_do_not_wrap():
    blocked = Blocked(64, 128, 4)
    slot = 64 * 600_000 + 5
    want = 600_000 * 8_448 + 8_192 + 20
    assert want > 1 << 32
    assert blocked.scale_address(slot) == want
    assert blocked.scale_address(np.array([slot], np.int64)).tolist() == [want]
    assert blocked.scale_address(np.array([slot], np.int32)).tolist() == [want]


def test_a_layers_pages_are_as_far_apart_as_its_declared_order_says():
    parts = Part("key", 0, 64, "float8_e4m3fn"), Part("scale", 0, 1, "float32", True)
    layer = LayerSpec("l0", 0, kind="mla", parts=parts, scale=1.0)
    assert Blocked.of(layer, 64) == Blocked(64, 64, 4)
    padded = "layer | token head field; page 4416"
    assert Blocked.of(layer, 64, padded) == Blocked(64, 64, 4, 4416)
