"""Detection: the truth table of what is declared, and every refusal with readings."""

import types

import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import formats, np_dtype


def array(*shape, dtype="uint8"):
    held = np.dtype(dtype) if dtype.endswith("int8") else np_dtype(dtype)
    return types.SimpleNamespace(shape=shape, dtype=held)


def number(*args, **kwargs):
    found = formats.detect(*args, **kwargs).format
    return None if found is None else found.id


BF16 = "bfloat16"
LATENT, INDEX = array(10, 64, 576, dtype=BF16), array(10, 64, 132)
# What, arrays, hint, outcome by LMCache's structure, outcome as declared to kvmem.
TABLE = [
    ("index pages", [INDEX] * 3, "NHD", 14, 14),
    ("one layer of them", [array(1, 1, 132)], "NHD", 14, 14),
    *[
        (f"{dtype} of that shape", [array(10, 64, 132, dtype=dtype)], "NHD", 3, 3)
        for dtype in ("int8", "float8_e4m3fn", BF16)
    ],
    *[
        (f"rows of {width}", [array(10, 64, width)], "NHD", 3, 3)
        for width in (131, 133, 136, 128, 64, 68, 584, 656)
    ],
    ("latents", [LATENT] * 2, "NHD", 3, 3),
    ("one array of three axes", INDEX, "NHD", 0, 0),
    ("views with a head", [array(10, 64, 1, 132)], "NHD", 13, 13),
    ("views in fused pools", [array(10, 64, 1, 132)], "BLNHC", None, 13),
    ("views, HND", [array(10, 1, 64, 132)], "HND", 12, 12),
    ("views in fused pools, HND", [array(10, 1, 64, 132)], "BLHNC", None, 12),
    ("flat pages", [array(10, 132)], "NHD", None, None),
    ("flat pages of a block", [array(10, 64 * 132)], "NHD", None, None),
    ("two first", [array(2, 9, 4, 8, 64, dtype=BF16)], "NHD", 1, 1),
    ("two first, HND", [array(2, 9, 8, 4, 64, dtype=BF16)], "HND", 6, 6),
    ("two second", [array(9, 2, 4, 8, 64, dtype=BF16)], "NHD", 2, 2),
    ("two second, HND", [array(9, 2, 8, 4, 64, dtype=BF16)], "LBHNC", None, 7),
    ("two twice", [array(2, 2, 4, 8, 64, dtype=BF16)], "NHD", 1, 1),
    ("six axes", [array(2, 9, 8, 1, 4, 64, dtype=BF16)], "NHD", None, 15),
    ("pairs", [(array(9, 4, 8, 64, dtype=BF16),) * 2] * 2, "NHD", 16, 16),
    ("latents of planes", [(array(9, 4, 512, dtype=BF16), array(9, 4, 64, dtype=BF16))],
     "NHD", None, 17),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_what_is_declared_decides(row):
    _, arrays, hint, _, outcome = row
    if outcome is None:
        with pytest.raises(errors.FormatMismatch, match="no format of the table"):
            formats.detect(arrays, declared=hint)
    else:
        assert number(arrays, declared=hint) == outcome


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_lmcaches_structural_rules_are_reproduced(row):
    _, arrays, hint, outcome, _ = row
    hint = {"BLNHC": "NHD", "BLHNC": "HND", "LBHNC": "HND"}.get(hint, hint)
    if row[0].startswith("views in fused") or row[0] == "two second, HND":
        outcome = row[4]
    assert number(arrays, declared=hint, rules="lmcache") == outcome


def test_a_first_array_speaks_for_its_list_under_lmcaches_rules_alone():
    mixed = [LATENT] * 78 + [INDEX] * 21
    assert number(mixed, rules="lmcache") == 3
    for declared in (None, "NHD", 3):
        with pytest.raises(errors.FormatMismatch, match=r"array 78 is uint8\[10, 64"):
            formats.detect(mixed, declared=declared)


def test_tuples_that_differ_are_named_too():
    pair = (array(9, 4, 8, 64, dtype=BF16),) * 2
    other = (pair[0], array(9, 4, 8, 32, dtype=BF16))
    with pytest.raises(errors.FormatMismatch, match="array 1 is bfloat16"):
        formats.detect([pair, other], declared="NHD")


@pytest.mark.case("LAY-05")
def test_of_undeclared_pages_one_shape_is_blocked_scale():
    assert number([array(10, 64, 132)] * 2) == 14
    assert number([array(7, 16, 132)]) == 14
    for other, law in [
        (array(10, 64, 132, dtype=BF16), "NL_X_NB_BS_HS"),
        (array(10, 64, 264), "splits into values and scales is not in its shape"),
        (array(10, 8448), "flat pages of 8448 elements"),
        (array(10, 64, 130), "a blocked row of 130 bytes is no multiple of 4"),
    ]:
        with pytest.raises(errors.FormatMismatch, match=law):
            formats.detect([other])


UNDECLARED = {
    **{
        f"uint8 rows of {width}": ([array(10, 64, width)], "NL_X_NB_BS_HS")
        for width in (68, 264, 288, 352, 528, 584, 656, 131, 133)
    },
    "known blocked rows": ([array(10, 64, 584)], "blocked rows of 576 [+] 8 bytes"),
    "latents": ([LATENT], "one latent of 512 [+] 64, or nine heads of 64"),
    "views with a head": ([array(10, 64, 1, 132)], "a view of blocked pages"),
    "two pages": (
        [array(2, 2, 4, 1, 8, dtype=BF16)],
        "NL_X_TWO_NB_BS_NH_HS .*NL_X_NB_TWO_BS_NH_HS .*two pages look like keys",
    ),
    "as many heads as tokens": (
        [array(9, 8, 8, 64, dtype=BF16)],
        "NL_X_NB_NH_BS_CS .*NL_X_NB_BS_NH_CS .*equally many",
    ),
    "one array of index pages": (array(10, 64, 132), "no format has it"),
    "pairs": ([(array(9, 4, 8, 64, dtype=BF16),) * 2] * 2, "NL_X_TWO_X_NB_BS_NH_HS"),
    "three pages, which length alone tells": (
        [array(3, 2, 4, 1, 8, dtype=BF16)], "NL_X_NB_TWO_BS_NH_HS",
    ),
}  # fmt: skip


@pytest.mark.case("LAY-04")
@pytest.mark.parametrize("what", UNDECLARED)
def test_undeclared_arrays_are_refused_with_what_they_may_be(what):
    arrays, said = UNDECLARED[what]
    with pytest.raises(errors.FormatMismatch, match=said) as refusal:
        formats.detect(arrays)
    assert "with no declaration" in str(refusal.value)
    assert str(refusal.value).endswith("NHD or HND.")


@pytest.mark.parametrize("row", [12, 13, "NL_X_NB_NH_BS_CS"])
def test_a_square_is_what_it_is_declared_to_be(row):
    square = [array(9, 8, 8, 64, dtype=BF16)]
    assert formats.detect(square, declared=row).format is formats.find(row)
    assert number(square, declared="HND") == 12


@pytest.mark.parametrize("row", [1, 2])
def test_two_pages_are_what_they_are_declared_to_be(row):
    assert number([array(2, 2, 4, 1, 8, dtype=BF16)], declared=row) == row


@pytest.mark.parametrize(
    "arrays, declared, fault",
    [
        ([array(9, 2, 4, 8, 64, dtype=BF16)], 1, "an axis of 2, and it has 9"),
        ([array(9, 4, 8, 64, dtype=BF16)], 1, "5 axes, and the array has 4"),
        ([LATENT], 14, "its pages are bytes"),
        ([array(10, 64, 130)], 14, "no multiple of 4"),
        (LATENT, 3, "one array holds all layers"),
        ([LATENT], 0, "there is a list of arrays"),
        ([LATENT], 17, "the list is not nested"),
        ([(LATENT, LATENT)] * 3, 9, "a list of 3 is no list of keys"),
        ([array(9, 8, 2, 4, 64, dtype=BF16)], 15, "6 axes"),
    ],
)
def test_a_declared_row_is_held_against_the_arrays(arrays, declared, fault):
    with pytest.raises(errors.FormatMismatch, match=fault):
        formats.detect(arrays, declared=declared)


def test_hints_that_contradict_or_cannot_be_served_are_refused():
    for hint in ("BLHNC", "BLNHC"):
        with pytest.raises(errors.FormatMismatch, match="four axes a layer"):
            formats.detect([LATENT], declared=hint)
    for hint in ("LHBNC", "BHLNC"):
        with pytest.raises(errors.IncompatiblePlan, match="heads stand outside"):
            formats.detect([LATENT], declared=hint)
    with pytest.raises(errors.ConfigError, match="NHD"):
        formats.detect([LATENT], declared="HDN")
    with pytest.raises(errors.ConfigError, match="rules 'vllm'"):
        formats.detect([LATENT], rules="vllm")
    with pytest.raises(errors.FormatMismatch, match="no arrays"):
        formats.detect([])
    assert number([], rules="lmcache") is None


def test_every_list_of_keys_and_of_values_is_of_one_kind():
    """Layers of one list differ, and of the other in the same way."""
    mixed = [array(9, 4, 8, 64, dtype=BF16), array(7, 4, 9, 64)]
    with pytest.raises(errors.FormatMismatch, match="a list whose array 1 is uint8"):
        formats.detect([mixed, mixed], "TWO_X_NL_X_NB_BS_NH_HS")
    keys, values = [array(9, 4, 8, 64)] * 2, [array(9, 4, 8, 32)] * 2
    assert number([keys, values], "TWO_X_NL_X_NB_BS_NH_HS") == 9, "values may be narrow"


@pytest.mark.parametrize(
    "arrays", [5, None, [1, 2], [[[INDEX]]], array(), (each for each in [INDEX])]
)
@pytest.mark.parametrize("rules", ["kvmem", "lmcache"])
def test_what_is_no_array_is_refused_in_words(arrays, rules):
    with pytest.raises(errors.FormatMismatch, match="among arrays"):
        formats.detect(arrays, rules=rules)


def test_lists_of_nothing_are_nothing():
    for arrays in ([], [[]], [[], []]):
        with pytest.raises(errors.FormatMismatch, match="no arrays"):
            formats.detect(arrays, 4)
