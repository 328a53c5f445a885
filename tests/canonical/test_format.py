"""The format id: what it depends on, what it does not, and its pinned values."""

import dataclasses
import json

import pytest

from kvmem import canonical
from kvmem.geometry import LayerSpec, Rope, Topology, group_layers, kinds

BASE = LayerSpec(
    "layers.0", 0, kv_heads=3, head_dim=64, dtype="bfloat16", rope=Rope(100_000.0)
)


def one(layer=BASE, page_size=16, **rest):
    return group_layers([layer], page_size=page_size, **rest)


def rope(**changes):
    return dataclasses.replace(BASE, rope=dataclasses.replace(BASE.rope, **changes))


CHANGES = {
    "kv heads": dataclasses.replace(BASE, kv_heads=6),
    "width": dataclasses.replace(BASE, head_dim=32),
    "value width": dataclasses.replace(BASE, v_head_dim=32),
    "dtype of one width": dataclasses.replace(BASE, dtype="float16"),
    "scale": dataclasses.replace(BASE, scale=1.0),
    "layer number": dataclasses.replace(BASE, index=1),
    "sinks": dataclasses.replace(BASE, sinks=4),
    "window": dataclasses.replace(BASE, window=128),
    "another window": dataclasses.replace(BASE, window=256),
    "sinks of a window": dataclasses.replace(BASE, window=128, sinks=4),
    "a latent": kinds.latent("a", 0, rank=256, rope_dim=128, scale=BASE.softmax_scale),
    "a latent with scales": kinds.latent(
        "a", 0, rank=256, rope_dim=128, scale=BASE.softmax_scale, fp8=True
    ),
    "no rope": dataclasses.replace(BASE, rope=None),
    "theta": rope(theta=10_000.0),
    "one ulp of theta": rope(theta=100_000.00000000001),
    "style": rope(style="interleaved"),
    "offset": rope(offset=32),
    "rotated width": rope(width=32),
    "frequencies": rope(frequencies=tuple(1.0 / (i + 1) for i in range(32))),
    "magnitude": rope(magnitude=1.5),
    "a mix besides": rope(kind="hadamard"),
}


def test_every_fact_of_a_layer_changes_the_id():
    ids = {what: canonical.format_id(one(layer)) for what, layer in CHANGES.items()}
    ids["base"] = canonical.format_id(one())
    ids["draft"] = canonical.format_id(one(domain="draft"))
    ids["target and draft"] = canonical.format_id((*one(), *one(domain="draft")))
    ids["draft and target"] = canonical.format_id((*one(domain="draft"), *one()))
    assert len(set(ids.values())) == len(ids)


def test_topology_page_size_and_names_are_no_part_of_the_id():
    base = canonical.format_id(one())
    assert canonical.format_id(one(page_size=64)) == base
    assert canonical.format_id(one(dataclasses.replace(BASE, name="h.0"))) == base
    padded = dataclasses.replace(BASE, stored_head_dim=128)  # in pages alone
    assert canonical.format_id(one(padded)) == base
    plans = [
        canonical.plan(one()[0], Topology(tp), order, page_size)
        for tp, order, page_size in [(1, "token_major", 8), (9, "head_major", 32)]
    ]
    assert {canonical.format_id((p.group,)) for p in plans} == {base}


@pytest.mark.parametrize(
    "same",
    [
        dataclasses.replace(BASE, scale=0.125),
        dataclasses.replace(BASE, v_head_dim=64),
        rope(width=64),
        rope(theta=100_000),
    ],
    ids=["default scale", "equal value width", "whole row", "integer theta"],
)
def test_a_default_that_is_written_out_means_the_same(same):
    assert canonical.format_id(one(same)) == canonical.format_id(one())


def test_the_last_bit_of_a_computed_frequency_does_not_change_the_id():
    listed = tuple(float(f) for f in BASE.rope.inverse_frequencies(64))
    nudged = (listed[0], listed[1] * (1 + 2**-52), *listed[2:])
    moved = (listed[0], listed[1] * (1 + 2**-26), *listed[2:])
    first, second, third = (
        canonical.format_id(one(rope(frequencies=f))) for f in (listed, nudged, moved)
    )
    assert first == second != third


def test_the_printed_fields_are_the_digested_ones():
    fields = canonical.format_fields(one())
    assert json.loads(json.dumps(fields)) == fields
    assert fields["version"] == canonical.FORMAT_VERSION
    (layer,) = fields["groups"][0]["layers"]
    assert layer["fields"] == [["k", 3, 128, "bfloat16"], ["v", 3, 128, "bfloat16"]]
    assert layer["rope"]["theta"] == 100_000.0
    windowed = one(dataclasses.replace(BASE, window=128))
    (layer,) = canonical.format_fields(windowed)["groups"][0]["layers"]
    assert (layer["window"], layer["sinks"]) == (128, 0)
