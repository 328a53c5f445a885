"""XLA's own programs move the bytes that references move, where runs stand evenly."""

import jax
import numpy as np
import pytest

from pallas_kernels import dispatch, fillings, peers, specs

CASES = {
    case.name: case
    for model in specs.TINY
    for case in specs.cases(model, 1 << 15, entries=5)
    if case.peer is not None
}


@pytest.mark.parametrize("name", CASES)
def test_a_peer_gives_the_bytes_of_its_reference(name):
    case = CASES[name]
    module = dispatch.OPERATIONS[case.operation]
    arrays = fillings.fill(case, seed=5)
    expected = jax.jit(lambda *a: module.reference(*a, **case.facts))(*arrays)
    found = jax.jit(case.peer)(*arrays)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_every_operation_that_finds_bytes_by_an_index_has_a_peer():
    without = {"gather_pages", "scatter_pages", "zero_pages", "move_pages"}
    assert {case.operation for case in CASES.values()} == (
        set(dispatch.OPERATIONS) - without
    )


def test_runs_at_other_distances_give_other_bytes():
    case = CASES["export_records-tiny_half"]
    arrays = fillings.fill(case, seed=5)
    even = case.even._replace(count=1, page_step=case.model.page_nbytes)
    wrong = peers.of(case.operation, even._replace(record_step=128), **case.facts)
    expected = jax.jit(case.peer)(*arrays)
    assert (np.asarray(wrong(*arrays)) != np.asarray(expected)).any()
