"""Orders are read part by part, and tokens and heads never leave their page."""

import pytest

from kvmem import errors
from kvmem.geometry import order
from kvmem.geometry.order import Order


@pytest.mark.parametrize(
    "words, arrays, regions, page",
    [
        ("packed_nhd", "", "", "layer token head field"),
        ("field token head layer", "", "", "field token head layer"),
        ("layer | token head field", "layer", "", "token head field"),
        ("layer | packed_nhd", "layer", "", "token head field"),
        ("layer field | head_major", "layer field", "", "head token"),
        ("field layer|token head", "field layer", "", "token head"),
        ("layer | field | token head", "layer", "field", "token head"),
        (" | layer | token head field", "", "layer", "token head field"),
    ],
)
def test_bars_cut_arrays_and_regions_from_the_page(words, arrays, regions, page):
    parts = (tuple(part.split()) for part in (arrays, regions, page))
    assert order.parse(words) == Order(*parts)


def test_an_order_put_apart_has_its_axes_before_the_bar():
    assert order.apart("packed_nhd", "layer") == "layer | token head field"
    assert order.apart("head_major", "layer", "field") == "layer field | head token"


@pytest.mark.parametrize(
    "words, phrase",
    [
        ("layer | layer token head field", "names each of layer"),
        ("layer | token head", "names each of layer"),
        ("layer token | head field", "only layer and field stand before a bar"),
        ("head | layer token field", "only layer and field"),
        ("layer | field | head | token", "two bars"),
        ("layer field token head |", "only layer and field"),
        ("nhd", "names each of layer"),
    ],
)
def test_an_order_that_cannot_be_laid_down_is_refused(words, phrase):
    with pytest.raises(errors.ConfigError, match=phrase) as refusal:
        order.parse(words)
    assert "Use one of head_major" in str(refusal.value)


def test_an_order_of_several_arrays_is_none_of_an_engines_pool():
    assert order.parse_order("packed_hnd") == ("layer", "head", "token", "field")
    for words in (
        "layer | packed_nhd",
        "layer | field | head token",
        " | layer | field head token",
    ):
        with pytest.raises(errors.ConfigError, match="pool is one array"):
            order.parse_order(words)


def test_facts_of_others_pages_stand_behind_a_semicolon():
    parsed = order.parse("layer | field token head; align 1; page 37440")
    assert (parsed.alignment, parsed.page_nbytes) == (1, 37_440)
    assert order.parse("head_major").alignment == order.ALIGNMENT == 16
    for words in ("head_major; align", "head_major; align 0", "head_major; wide 3"):
        with pytest.raises(errors.ConfigError, match="'align N' or 'page N'"):
            order.parse(words)
    with pytest.raises(errors.ConfigError, match="pages of its own"):
        order.parse_order("head_major; align 1")
