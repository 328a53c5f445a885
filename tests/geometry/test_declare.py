"""Declared arrays: their order is what the axes say, and every misfit is named."""

import re
import types

import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, Topology, declare, group_layers, np_dtype


def group(heads=8, dim=64, dtype="bfloat16", layers=2, page_size=4, v_dim=None):
    specs = [
        LayerSpec(f"l{i}", i, "gqa", heads, dim, v_dim, dtype) for i in range(layers)
    ]
    (made,) = group_layers(specs, page_size)
    return made


def arrays(*shape, dtype="bfloat16", count=2):
    held = None if dtype is None else np_dtype(dtype)
    return [types.SimpleNamespace(shape=shape, dtype=held)] * count


@pytest.mark.parametrize(
    "axes, shape, count, order, num_pages",
    [
        ("page field token head dim", (9, 2, 4, 8, 64), 2,
         "layer | field token head", None),
        ("page token head field dim", (9, 4, 8, 2, 64), 2,
         "layer | token head field", None),
        ("page token field head dim", (9, 4, 2, 8, 64), 2,
         "layer | token field head", None),
        ("page head token dim", (9, 8, 4, 64), 4, "layer field | head token", None),
        ("field page token head dim", (2, 9, 4, 8, 64), 2,
         "layer | field | token head", 9),
        ("layer page field token head dim", (2, 9, 2, 4, 8, 64), 1,
         " | layer | field token head", 9),
        ("page layer field token head dim", (9, 2, 2, 4, 8, 64), 1,
         "layer field token head", None),
        ("page (token head field dim)", (9, 4096), 2,
         "layer | token head field", None),
        ("page token (head dim)", (9, 4, 512), 4, "layer field | token head", None),
    ],
)  # fmt: skip
def test_axes_become_an_order(axes, shape, count, order, num_pages):
    found = declare(group(), Topology(), axes, arrays(*shape, count=count))
    assert [p.split() for p in found.order.split("|")] == [
        p.split() for p in order.split("|")
    ]
    assert found.num_pages == num_pages


@pytest.mark.case("LAY-04")
@pytest.mark.parametrize("num_pages", [2, 3])
def test_two_pages_are_read_as_the_axes_say_and_not_as_they_look(num_pages):
    small = group(heads=1, dim=8)
    pages_first = arrays(num_pages, 2, 4, 1, 8)
    keys_first = arrays(2, num_pages, 4, 1, 8)
    axes = "page field token head dim", "field page token head dim"
    assert declare(small, Topology(), axes[0], pages_first).num_pages is None
    assert declare(small, Topology(), axes[1], keys_first).num_pages == num_pages
    if num_pages == 3:  # another length is seen; two pages only the axes tell apart
        for wrong, given in zip(axes, (keys_first, pages_first), strict=True):
            with pytest.raises(errors.IncompatiblePlan, match="field of 3"):
                declare(small, Topology(), wrong, given)


def test_ranks_have_an_axis_and_each_its_own_heads():
    found = declare(
        group(),
        Topology(4),
        "rank page field token head dim",
        arrays(4, 9, 2, 4, 2, 64),
    )
    assert found.order == "layer | field token head"


AXES = "page field token head dim"
REFUSALS = {
    "a rank with heads of another count": (
        {"heads": 2}, Topology(4), f"rank {AXES}", (4, 9, 2, 4, 2, 64), {},
        "2 local heads, and 2 heads on TP 4 are 1 a rank",
    ),
    "heads that TP neither divides nor multiplies": (
        {"heads": 2}, Topology(3), f"rank {AXES}", (3, 9, 2, 4, 1, 64), {},
        "2 KV heads of layer 'l0' on TP 3",
    ),
    "compressed states": (
        {}, Topology(), AXES, (9, 2, 2, 8, 64), {},
        "2 rows for the 4 tokens of a page: compressed states are not tokens",
    ),
    "a page that is no multiple of its rows": (
        {}, Topology(), "page (token head field dim)", (9, 4098), {},
        "a page of 4098 elements is not a multiple of its 4 token rows",
    ),
    "scales at the end of each row": (
        {"dtype": "float8_e4m3fn"}, Topology(), AXES, (9, 2, 4, 8, 68),
        {"dtype": "float8_e4m3fn"},
        "no entry declares the other 4 bytes (scales between rows?)",
    ),
    "scales at the end of a flat page": (
        {"dtype": "float8_e4m3fn"}, Topology(), "page (field token head dim)",
        (9, 4096 + 256), {"dtype": "float8_e4m3fn"},
        "no entry declares the other 256 bytes",
    ),
    "an array without a dtype": (
        {}, Topology(), AXES, (9, 2, 4, 8, 64), {"dtype": None},
        "has no dtype, so a row has no width",
    ),
    "an array of another dtype": (
        {}, Topology(), AXES, (9, 2, 4, 8, 64), {"dtype": "float16"},
        "dtype float16, and the model keeps bfloat16",
    ),
    "an array too few": (
        {}, Topology(), AXES, (9, 2, 4, 8, 64), {"count": 1},
        "2 are expected, one a layer, and 1 given",
    ),
    "axes of another number": (
        {}, Topology(), AXES, (9, 4, 8, 64), {}, "4 axes of (9, 4, 8, 64), 5 declared",
    ),
    "keys and values of different widths in one array": (
        {"v_dim": 32}, Topology(), AXES, (9, 2, 4, 8, 64), {},
        "rows of several widths",
    ),
    "rows that pages pad": (
        {"dim": 9}, Topology(), "page field head token dim", (9, 2, 8, 4, 9), {},
        "rows of 18 bytes, and rows in pages are multiples of 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_arrays_that_are_not_as_declared_are_refused(what):
    facts, topology, axes, shape, given, law = REFUSALS[what]
    with pytest.raises(errors.IncompatiblePlan, match=re.escape(law)) as refusal:
        declare(group(**facts), topology, axes, arrays(*shape, **given))
    asked, _, rest = str(refusal.value).partition(": ")
    assert "arrays declared as" in asked
    assert rest.endswith("Declare the axes as they are, or hand over rows as the "
                         "model has them.")  # fmt: skip


def test_a_list_of_arrays_with_no_declaration_is_refused():
    with pytest.raises(errors.ConfigError, match="2 arrays with no declaration") as no:
        declare(group(), Topology(), None, arrays(9, 2, 4, 8, 64))
    assert "cannot be seen from its length" in str(no.value)
    assert '"page field token head dim"' in str(no.value)


@pytest.mark.parametrize(
    "axes, law",
    [
        ("page field token head", "each of dim, head, page, token is named once"),
        ("page field token head dim dim", "is named once"),
        ("page field token head row dim", "is named once"),
        ("page field token dim head", "dim is the innermost axis"),
        ("(page field) token head dim", "neither rank nor page is flattened"),
        ("page rank token head dim", "rank is the outermost axis"),
        ("token page field head dim", "only layer and field stand outside of pages"),
    ],
)
def test_axes_that_are_none_are_refused(axes, law):
    with pytest.raises(errors.ConfigError, match=law):
        declare(group(), Topology(), axes, arrays(9, 2, 4, 8, 64))


def test_every_fault_of_every_array_is_said_at_once():
    given = [*arrays(9, 2, 2, 8, 64, count=1), *arrays(8, 2, 4, 4, 68, count=1)]
    with pytest.raises(errors.IncompatiblePlan) as refusal:
        declare(group(), Topology(), AXES, given)
    message = str(refusal.value)
    for said in (
        "array 0 ('l0'): 2 rows for the 4 tokens",
        "array 1 ('l1'): 4 local heads",
        "array 1 ('l1'): rows of 68 elements",
        "numbers of pages differ: [8, 9]",
    ):
        assert said in message


def test_ranks_without_an_axis_are_refused():
    with pytest.raises(errors.ConfigError, match="each of dim, head, page, rank"):
        declare(group(), Topology(4), AXES, arrays(9, 2, 4, 2, 64))
