"""The judge kills the two mutants that every tiling check lets live, and names them."""

import numpy as np
import pytest

from kvmem import canonical
from kvmem.geometry import Topology
from kvmem.geometry.envelope import ORDERS


def exported(build, oracle, plan, logical):
    """Return the records that a plan's writers make of independently made pages."""
    records = bytearray(plan.page_tokens * plan.record_nbytes)
    for rank, runs in enumerate(plan.writers()):
        page = oracle.page(plan.group, logical, plan.topology, rank, plan.order)
        build.gather(runs, page, records)
    return np.frombuffer(bytes(records), np.uint8).reshape(plan.page_tokens, -1)


@pytest.fixture(params=sorted(ORDERS))
def case(request, build, oracle):
    group = build.group(layers=2, heads=4)
    logical = oracle.logical(group, group.page_size)
    plan = canonical.plan(group, Topology(4), request.param)
    return plan, logical, oracle.records(group, logical)


def test_the_right_bijection_meets_no_objection(build, oracle, case):
    plan, logical, expected = case
    observed = exported(build, oracle, plan, logical)
    assert canonical.judge(expected, observed, plan.group) == ()


def test_a_rank_that_writes_its_neighbours_heads_is_named(build, oracle, mutants, case):
    plan, logical, expected = case
    mutant = mutants.rotated(plan)
    assert canonical.check(mutant) == ()  # it tiles: tiling proves too little
    observed = exported(build, oracle, mutant, logical)
    objections = canonical.judge(expected, observed, plan.group)
    assert len(objections) == 2 * 4 * 2
    first = objections[0]
    assert first[:5] == ("placement", "layers.0", 0, "k", 0)
    assert "holds layer layers.0 head 3 field k, token 0 (4 of 4" in first.detail


def test_a_page_that_is_read_backwards_is_named(build, oracle, mutants, case):
    plan, logical, expected = case
    mutant = mutants.reversed_page(plan)
    assert canonical.check(mutant) == ()
    observed = exported(build, oracle, mutant, logical)
    objections = canonical.judge(expected, observed, plan.group, first_token=32)
    assert len(objections) == 2 * 4 * 2
    assert str(objections[-1]) == (
        "placement: layer layers.1 head 3 field v, token 32: "
        "holds layer layers.1 head 3 field v, token 35 (4 of 4 tokens differ)"
    )


def test_one_flipped_byte_is_one_objection(build, oracle, case):
    plan, _, expected = case
    observed = expected.copy()
    observed[2, 64] ^= 1  # token 2, layer 0, head 0, field v
    (objection,) = canonical.judge(expected, observed, plan.group)
    assert objection[:5] == ("bytes", "layers.0", 0, "v", 2)
    assert "byte 0 is" in objection.detail
    assert "(1 of 4 tokens differ)" in objection.detail


def test_bytes_that_stand_in_several_places_accuse_none_of_them(build, case):
    plan, _, expected = case
    expected = expected.copy()
    expected[0] = expected[3]  # two equal tokens
    observed = expected.copy()
    observed[1, :64] = expected[0, :64]
    (objection,) = canonical.judge(expected, observed, plan.group)
    assert objection.law == "bytes"
    observed[1, :64] = expected[2, :64]
    (objection,) = canonical.judge(expected, observed, plan.group)
    assert objection.law == "placement"


@pytest.mark.parametrize("case", ["head_major"], indirect=True)
def test_records_of_another_shape_or_dtype_are_an_objection_of_their_own(case):
    plan, _, expected = case
    for wrong in (
        expected[:, :-1],
        expected[:-1],
        expected.astype(np.uint16),
        expected.reshape(-1),
    ):
        (objection,) = canonical.judge(expected, wrong, plan.group)
        assert objection.law == "shape"
        assert f"not uint8{expected.shape}" in str(objection)
