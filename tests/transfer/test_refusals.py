"""What the canonical form refuses, in three beats: the question, the law, the cure."""

import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, errors, transfer
from kvmem.geometry import (
    Field,
    LayerSpec,
    Topology,
    declare,
    group_layers,
    np_dtype,
)

AXES = "rank page field token head dim"


def group(heads=8, dim=64, dtype="bfloat16", page_size=4, **spec):
    layer = LayerSpec("layers.0", 0, kv_heads=heads, head_dim=dim, dtype=dtype, **spec)
    return group_layers([layer], page_size=page_size)[0]


def declared(shape, topology, axes=AXES, dtype="bfloat16", **facts):
    held = types.SimpleNamespace(shape=shape, dtype=dtype and np_dtype(dtype))
    return declare(group(dtype=dtype or "bfloat16", **facts), topology, axes, [held])


def a_list_of_tensors():
    plan = canonical.plan(group(), Topology())
    arrays = [jnp.zeros((1, 3, plan.page_nbytes // 2), jnp.uint8)] * 2
    transfer.export_records(arrays, [0], plan, 4)


REFUSALS = {
    "TP and heads divide neither way": (
        lambda: canonical.plan(group(heads=2), Topology(3)),
        "2 KV heads of layer 'layers.0' on TP 3",
    ),
    "token shards that leave TP and heads divisible neither way": (
        lambda: canonical.plan(group(heads=2), Topology.nested(6, 2)),
        "2 KV heads of layer 'layers.0' on TP 3",
    ),
    "a local head count that is neither": (
        lambda: declared((4, 9, 2, 4, 2, 64), Topology(4), heads=2),
        "2 local heads, and 2 heads on TP 4 are 1 a rank",
    ),
    "an interleave of no token": (
        lambda: Topology(1, 2, 0),
        "topology.interleave = 0",
    ),
    "a negative interleave": (
        lambda: Topology(1, 2, -1),
        "topology.interleave = -1",
    ),
    "an interleave larger than the page": (
        lambda: canonical.plan(group(), Topology(1, 2, 8)),
        "interleave 8 on pages of 4 slots, DCP 2",
    ),
    "an interleave that does not divide the page": (
        lambda: canonical.plan(group(), Topology.nested(2, 2, interleave=3)),
        "interleave 3 on pages of 4 slots, DCP 2",
    ),
    "compressed latents": (
        lambda: declared((9, 2, 2, 8, 64), Topology(), AXES.removeprefix("rank ")),
        "2 rows for the 4 tokens of a page: compressed states are not tokens",
    ),
    "compressed latents over token shards": (
        lambda: declared((2, 9, 2, 2, 8, 64), Topology.nested(2, 2)),
        "2 rows for the 4 tokens of a page: compressed states are not tokens",
    ),
    "a page that is not a multiple of its token rows": (
        lambda: declared((9, 4102), Topology(), "page (token head field dim)"),
        "a page of 4102 elements is not a multiple of its 4 token rows",
    ),
    "scales between the rows of a token and head": (
        lambda: declared((2, 9, 2, 4, 4, 68), Topology(2), dtype="float8_e4m3fn"),
        "no entry declares the other 4 bytes (scales between rows?)",
    ),
    "a list of tensors with no declaration": (
        lambda: declare(group(), Topology(), None, [None, None]),
        "a list of 2 arrays with no declaration",
    ),
    "a list of tensors where the plan has one array": (
        a_list_of_tensors,
        "2 arrays with a plan for 1",
    ),
    "a field without dtype": (
        lambda: Field("layers.0", "state", 0, 64, None),
        "cache dtype None",
    ),
    "a field without width": (
        lambda: Field("layers.0", "state", 0, 0, "float32"),
        "0 bytes in float32",
    ),
    "an array without dtype": (
        lambda: declared((2, 9, 2, 4, 4, 64), Topology(2), dtype=None),
        "has no dtype, so a row has no width",
    ),
    "pipeline stages": (lambda: Topology.nested(2, pp=2), "2 pipeline stages"),
    "a foreign group of workers": (
        lambda: transfer.export_records(
            jnp.zeros((4, 3, 4096), jnp.uint8),
            [0],
            canonical.plan(group(), Topology(2)),
            4,
        ),
        "a pool of 4 ranks with a plan for 2",
    ),
    "a layer of another kind that declares no rows": (
        lambda: LayerSpec("layers.0", 0, kind="state"),
        "layer 'layers.0' of kind 'state'",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_it_is_refused_with_the_law_and_a_cure(what):
    act, phrase = REFUSALS[what]
    with pytest.raises(errors.KVMemError, match=re.escape(phrase)) as refusal:
        act()
    beats = re.fullmatch(r"(.+?): (.+)\. ([A-Z].+)\.", str(refusal.value))
    assert beats, f"not three beats: {refusal.value}"
    assert len(beats[3].split()) > 2


def test_none_of_them_is_a_page_that_is_served():
    plan = canonical.plan(group(), Topology.nested(4, 2))
    pages = jnp.zeros((4, 3, plan.page_nbytes), jnp.uint8)
    records = transfer.export_records(pages, [2], plan, 8)
    assert records.shape == (8, group().record_nbytes)
    assert not np.any(records)
