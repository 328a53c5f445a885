"""Topologies as other engines spell them, and fields that cannot be stored."""

import pytest

from kvmem import errors
from kvmem.geometry import Field, Topology


def test_token_shards_that_count_inside_tp_are_counted_beside_it():
    assert Topology.nested(8, 2) == Topology(4, 2)
    assert Topology.nested(4, 4, interleave=2) == Topology(1, 4, 2)
    assert Topology.nested(8) == Topology(8)
    assert Topology.nested(2, pcp=2) == Topology(2)


def test_pipeline_stages_are_refused():
    with pytest.raises(errors.IncompatiblePlan, match="2 pipeline stages") as refusal:
        Topology.nested(4, pp=2)
    assert "a record holds every layer" in str(refusal.value)
    assert "Use one stage" in str(refusal.value)


@pytest.mark.parametrize("sizes", [(4, 3), (2, 4), (0, 1), (4, 0)])
def test_token_shards_that_do_not_divide_tp_are_refused(sizes):
    with pytest.raises(errors.IncompatiblePlan, match="DCP divides it.*Give a DCP"):
        Topology.nested(*sizes)


@pytest.mark.parametrize("interleave", [0, -1, 1.5, True])
def test_an_interleave_of_no_token_is_refused(interleave):
    with pytest.raises(errors.ConfigError, match="topology.interleave = ") as refusal:
        Topology(2, 2, interleave)
    assert "Give interleave an integer >= 1" in str(refusal.value)


@pytest.mark.parametrize(
    "dtype, nbytes, phrase",
    [
        (None, 64, "cache dtype None"),
        ("", 64, "cache dtype ''"),
        ("float32", 0, "0 bytes in float32"),
        ("float32", -4, "-4 bytes in float32"),
        ("float32", 6, "6 bytes in float32"),
    ],
)
def test_a_field_without_dtype_or_width_is_refused(dtype, nbytes, phrase):
    with pytest.raises(errors.ConfigError, match=phrase) as refusal:
        Field("l0", "k", 2, nbytes, dtype)
    asked, law = str(refusal.value).split(": ", 1)
    assert asked and law.endswith(".")
