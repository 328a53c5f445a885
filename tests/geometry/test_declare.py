"""Declared arrays: their order is what the axes say, and every misfit is named."""

import re
import types

import numpy as np
import pytest

from kvmem import errors
from kvmem.geometry import (
    LayerSpec,
    Topology,
    declare,
    envelope,
    group_layers,
    kinds,
    np_dtype,
)


def group(heads=8, dim=64, dtype="bfloat16", layers=2, page_size=4, v_dim=None):
    specs = [
        LayerSpec(f"l{i}", i, "gqa", heads, dim, v_dim, dtype) for i in range(layers)
    ]
    (made,) = group_layers(specs, page_size)
    return made


def arrays(*shape, dtype="bfloat16", count=2):
    held = None if dtype is None else np.dtype("uint8")
    if dtype not in (None, "uint8"):
        held = np_dtype(dtype)
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
        {"heads": 2},
        Topology(4),
        f"rank {AXES}",
        (4, 9, 2, 4, 2, 64),
        {},
        "2 local heads, and 2 heads on TP 4 are 1 a rank",
    ),
    "heads that TP neither divides nor multiplies": (
        {"heads": 2},
        Topology(3),
        f"rank {AXES}",
        (3, 9, 2, 4, 1, 64),
        {},
        "2 KV heads of layer 'l0' on TP 3",
    ),
    "compressed states": (
        {},
        Topology(),
        AXES,
        (9, 2, 2, 8, 64),
        {},
        "2 rows for the 4 tokens of a page: compressed states are not tokens",
    ),
    "a page that is no multiple of its rows": (
        {},
        Topology(),
        "page (token head field dim)",
        (9, 4098),
        {},
        "a page of 4098 elements is not a multiple of its 4 token rows",
    ),
    "scales at the end of each row": (
        {"dtype": "float8_e4m3fn"},
        Topology(),
        AXES,
        (9, 2, 4, 8, 68),
        {"dtype": "float8_e4m3fn"},
        "no entry declares the other 4 bytes (scales between rows?)",
    ),
    "scales at the end of a flat page": (
        {"dtype": "float8_e4m3fn"},
        Topology(),
        "page (field token head dim)",
        (9, 4096 + 256),
        {"dtype": "float8_e4m3fn"},
        "no entry declares the other 256 bytes",
    ),
    "an array without a dtype": (
        {},
        Topology(),
        AXES,
        (9, 2, 4, 8, 64),
        {"dtype": None},
        "has no dtype, so a row has no width",
    ),
    "an array of another dtype": (
        {},
        Topology(),
        AXES,
        (9, 2, 4, 8, 64),
        {"dtype": "float16"},
        "dtype float16, and the model keeps bfloat16",
    ),
    "an array too few": (
        {},
        Topology(),
        AXES,
        (9, 2, 4, 8, 64),
        {"count": 1},
        "2 are expected, one a layer, and 1 given",
    ),
    "axes of another number": (
        {},
        Topology(),
        AXES,
        (9, 4, 8, 64),
        {},
        "4 axes of (9, 4, 8, 64), 5 declared",
    ),
    "keys and values of different widths in one array": (
        {"v_dim": 32},
        Topology(),
        AXES,
        (9, 2, 4, 8, 64),
        {},
        "rows of several widths",
    ),
    "heads without an axis": (
        {},
        Topology(),
        "page field token dim",
        (9, 2, 4, 512),
        {},
        "8 local heads, and no axis of heads",
    ),
    "heads that are no whole words": (
        {"heads": 3},
        Topology(),
        "page token [head field] dim",
        (9, 4, 2, 4, 64),
        {},
        "head x field of 6 packed 4 by 4",
    ),
}
LIST = "field layer | (page token) head dim"
REFUSALS |= {
    "slots that are no whole pages": (
        {}, Topology(), LIST, (38, 8, 64), {"count": 4},
        "38 slots are no pages of 4 tokens",
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
        ("page field token head", "each of dim, page, token is named once"),
        ("page field token head dim dim", "is named once"),
        ("page field token head row dim", "is named once"),
        ("page field token dim head", "dim is the innermost axis"),
        ("(page field) token head dim", "neither rank nor page is flattened"),
        ("page rank token head dim", "rank is the outermost axis"),
        ("token page field head dim", "only layer and field stand outside of pages"),
        ("field | (page token) head dim", "a list is numbered by layer and field"),
        ("page field token head {dim}", "a line is names"),
        ("(page token field) head dim", "nor page is flattened"),
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
    with pytest.raises(errors.ConfigError, match="each of dim, page, rank"):
        declare(group(), Topology(4), AXES, arrays(9, 2, 4, 2, 64))


def latent(page_size=4, dtype="bfloat16", fp8=False):
    specs = [kinds.latent("l0", 0, rank=512, rope_dim=64, scale=1.0, fp8=fp8)]
    (made,) = group_layers(specs, page_size)
    return made


def test_a_latent_has_no_axis_of_heads():
    found = declare(latent(), Topology(), "page token dim", arrays(9, 4, 576, count=1))
    assert found == ("layer field | token head", None)
    folded = declare(
        latent(), Topology(), "(page token) one dim", arrays(36, 1, 576, count=1)
    )
    assert folded == found


def test_lists_are_numbered_in_the_order_of_their_line():
    line = "field layer | (page token) head dim"
    found = declare(group(), Topology(), line, arrays(36, 8, 64, count=4))
    assert found == ("field layer | token head", None)


def test_bytes_are_declared_for_any_dtype_and_for_several_in_one_page():
    assert declare(
        group(), Topology(), AXES, arrays(9, 2, 4, 8, 128, dtype="uint8")
    ) == ("layer | field token head", None)
    line = "page [field token dim]"
    found = declare(
        latent(64, fp8=True),
        Topology(),
        line,
        arrays(9, 64, 656, dtype="uint8", count=1),
    )
    assert found.order == "layer | field token head"
    with pytest.raises(errors.IncompatiblePlan, match="32 rows for the 64 tokens"):
        declare(
            latent(64, fp8=True),
            Topology(),
            line,
            arrays(9, 32, 1312, dtype="uint8", count=1),
        )
    with pytest.raises(errors.IncompatiblePlan, match="several dtypes, and is no"):
        declare(
            latent(64, fp8=True),
            Topology(),
            line,
            arrays(9, 64, 656, dtype="float8_e4m3fn", count=1),
        )


def test_rows_of_any_width_are_tight_in_pages_of_others():
    small = group(heads=2, dim=3, dtype="float32")
    found = declare(small, Topology(), AXES, arrays(9, 2, 4, 2, 3, dtype="float32"))
    assert found.order == "layer | field token head; align 1"
    env = envelope.build(small, Topology(), 0, found.order)
    assert (env.nbytes, env.padding_nbytes) == (2 * 2 * 4 * 2 * 3 * 4, 0)


def test_pages_that_are_padded_say_by_how_much():
    line, padded = "page (field token dim)", 64 * 656 + 64
    given = arrays(9, padded, dtype="uint8", count=1)
    model = latent(64, fp8=True)
    found = declare(model, Topology(), line, given, page_nbytes=padded)
    assert found.order == f"layer | field token head; page {padded}"
    env = envelope.build(model, Topology(), 0, found.order)
    assert env.planes[0].page_stride == padded and env.padding_nbytes == 64
    for wrong, law in ((padded + 64, "declared 42,112 apart"), (64, "64 apart")):
        with pytest.raises(errors.IncompatiblePlan, match=law):
            declare(model, Topology(), line, given, page_nbytes=wrong)
    with pytest.raises(errors.IncompatiblePlan, match="one flat axis"):
        declare(
            latent(),
            Topology(),
            "page token dim",
            arrays(9, 4, 576, count=1),
            page_nbytes=5000,
        )


@pytest.mark.case("IDX-09")
def test_a_page_is_whole_words_of_packed_rows():
    line = "page [token] dim"
    for page_size in (2, 4):
        given = arrays(9, page_size // 2, 2, 576, count=1)
        assert declare(latent(page_size), Topology(), line, given).num_pages is None
    with pytest.raises(errors.IncompatiblePlan, match="token of 1 packed 2 by 2"):
        declare(latent(1), Topology(), line, arrays(9, 1, 2, 576, count=1))


def test_a_list_of_keys_and_one_of_values_may_be_of_unequal_widths():
    unequal, line = group(v_dim=32), "field layer | page token head dim"
    keys, values = arrays(9, 4, 8, 64), arrays(9, 4, 8, 32)
    assert declare(unequal, Topology(), line, [*keys, *values]).num_pages is None
    by_turns = [keys[0], values[0], keys[1], values[1]]
    with pytest.raises(errors.IncompatiblePlan, match="array 1 .'l1'.: dim of 32"):
        declare(unequal, Topology(), line, by_turns)


def test_pages_are_never_declared_to_overlap():
    with pytest.raises(errors.ConfigError, match="8,192 B, and pages do not overlap"):
        envelope.build(group(), Topology(), 0, "layer | field token head; page 8000")
