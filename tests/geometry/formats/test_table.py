"""One row a format: predicates read off its line, shapes that follow from it."""

import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, Part, formats, group_layers, kinds

NUMBERED = [row for row in formats.FORMATS if row.id is not None]
# Which numbers a predicate is true of (LMCache's golden table).
TRUE_OF = {
    "is_cross_layer": {0, 8},
    "is_kv_list": {4, 9},
    "is_layer_list": set(range(18)) - {0, 4, 8, 9},
    "is_tuple": {16, 17},
    "is_mla": {3, 5, 14, 17},
    "is_hnd": {6, 7, 8, 10, 12, 15},
    "is_fused": {10, 11, 12, 13},
    "is_two_major": {1, 6, 15},
    "is_folded": {4, 5},
    "is_blocked": {14},
}


def test_the_eighteen_formats_have_a_row_each():
    assert [row.id for row in NUMBERED] == list(range(18))
    assert len({row.name for row in formats.FORMATS}) == len(formats.FORMATS)


@pytest.mark.parametrize("predicate", TRUE_OF)
def test_a_predicate_is_true_of_the_rows_it_names(predicate):
    found = {row.id for row in NUMBERED if getattr(row, predicate)}
    assert found == TRUE_OF[predicate]


@pytest.mark.parametrize("row", formats.FORMATS, ids=lambda row: row.name)
def test_each_format_is_listed_in_exactly_one_way(row):
    assert row.is_cross_layer + row.is_kv_list + row.is_layer_list == 1


def test_latents_and_fused_rows_are_one_plane():
    one = {row.id for row in NUMBERED if row.kv_planes == 1}
    assert one == {3, 5, 14, 17} | {10, 11, 12, 13}


def test_a_row_is_found_by_number_and_by_name():
    assert formats.find(14) is formats.find("NL_X_NB_BSV_BSS")
    with pytest.raises(errors.ConfigError, match="a row of the table"):
        formats.find(18)


def keys_and_values(heads=2, dim=3, dtype="float32", page_size=4):
    specs = [
        LayerSpec(f"l{i}", i, kv_heads=heads, head_dim=dim, dtype=dtype)
        for i in range(2)
    ]
    (group,) = group_layers(specs, page_size)
    return group


def rows_of(*parts, page_size=4):
    spec = LayerSpec("l0", 0, kind="mla", parts=parts, scale=1.0)
    (group,) = group_layers([spec], page_size)
    return group


@pytest.mark.parametrize(
    "number, shape, count",
    [
        (0, (5, 2, 2, 4, 2, 3), None),
        (1, (2, 5, 4, 2, 3), 2),
        (2, (5, 2, 4, 2, 3), 2),
        (6, (2, 5, 2, 4, 3), 2),
        (7, (5, 2, 2, 4, 3), 2),
        (8, (5, 2, 2, 2, 4, 3), None),
        (10, (5, 2, 4, 2, 3), 2),
        (11, (5, 4, 2, 2, 3), 2),
        (12, (5, 2, 4, 6), 2),
        (13, (5, 4, 2, 6), 2),
        (15, (2, 5, 2, 1, 4, 3), 2),
    ],
)
def test_shapes_follow_from_the_line(number, shape, count):
    made = formats.shapes(formats.find(number), keys_and_values(), num_pages=5)
    every = [made] if count is None else made
    assert [each.shape for each in every] == [shape] * (count or 1)


def test_lists_are_nested_as_their_engine_nests_them():
    keys, values = formats.shapes(formats.find(4), keys_and_values(), 5)
    assert [each.shape for each in (*keys, *values)] == [(20, 2, 3)] * 4
    layers = formats.shapes(formats.find(16), keys_and_values(), 5)
    assert [[each.shape for each in layer] for layer in layers] == [
        [(5, 4, 2, 3)] * 2
    ] * 2
    unequal = rows_of(
        Part("latent", 0, 6, "bfloat16"),
        Part("rope", 0, 2, "bfloat16"),
        Part("key", 0, 4, "bfloat16"),
    )
    ((a, b, c),) = formats.shapes(formats.find(17), unequal, 5)
    assert [each.shape for each in (a, b, c)] == [(5, 4, 6), (5, 4, 2), (5, 4, 4)]


def test_rows_are_packed_into_words_where_the_line_cuts_an_axis():
    group = keys_and_values(heads=2, dim=64, dtype="bfloat16")
    find = formats.find
    (first, _) = formats.shapes(find("RPA_PACKED"), group, 5)
    assert first.shape == (5, 4, 2, 2, 64)
    (first, _) = formats.shapes(find("RPA_PACKED_HD64"), group, 5)
    assert first.shape == (5, 4, 1, 2, 128)
    (layer,) = group_layers(
        [kinds.latent("a", 0, rank=512, rope_dim=64, scale=1.0)], 16
    )
    assert formats.shapes(find("MLA_PACKED"), layer, 5)[0].shape == (5, 8, 2, 576)
    (layer,) = group_layers([kinds.indexer("a", 0, dim=128), kinds.latent(
        "a.latent", 0, rank=512, rope_dim=64, scale=1.0)], 64)[1:]  # fmt: skip
    made = formats.shapes(find(14), layer, 5)[0]
    assert (made.shape, made.dtype) == ((5, 64, 132), np.uint8)


@pytest.mark.case("IDX-09")
@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_a_page_of_odd_tokens_is_no_word_of_packed_tokens(page_size):
    latent = kinds.latent("a", 0, rank=512, rope_dim=64, scale=1.0)
    (group,) = group_layers([latent], page_size)
    form = formats.find("MLA_PACKED")
    if page_size == 2:
        assert formats.shapes(form, group, 5)[0].shape == (5, 1, 2, 576)
        return
    with pytest.raises(errors.IncompatiblePlan, match="packed 2 to a word"):
        formats.shapes(form, group, 5)


@pytest.mark.parametrize(
    "number, group, reason",
    [
        (3, keys_and_values(), "no axis of heads"),
        (3, rows_of(Part("a", 0, 4, "float16"), Part("b", 0, 4, "float16")), "one fi"),
        (14, rows_of(Part("a", 0, 4, "float16")), "values and then scales"),
        (1, rows_of(Part("a", 0, 4, "float16")), "an axis of 2, not 1 fields"),
        (1, rows_of(Part("a", 0, 4, "float16"), Part("b", 0, 2, "float16")), "no axis"),
    ],
)
def test_a_group_that_a_format_cannot_hold_is_refused_with_the_reason(
    number, group, reason
):
    if number == 1 and "no axis" in reason:
        number, reason = "KVMEM_HEAD_MAJOR", "rows of one width"
    with pytest.raises(errors.IncompatiblePlan, match=reason):
        formats.shapes(formats.find(number), group, 5)
