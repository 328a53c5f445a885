"""What comes to a pool's door in no shape to be used is refused in words.

Before anything is traced, and by the ledger before anything has changed.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kvmem import budget, errors
from kvmem.geometry import Topology, group_layers, kinds
from kvmem.pool import Ledger, fork, handout, init, release


def held(poison: bool = True):
    """Return a pool of 8 pages whose first three are held."""
    pool, _, ok = handout(init(8, 64, poison=poison), 0, [3], 4)
    assert bool(ok)
    return pool


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: release(p, 0, [[1], [1, 2]]), "vpages that are no array"),
        (lambda p: handout(p, 0, 2, 4), r"want of shape \[\]"),
        (lambda p: handout(p, 0, [[2]], 4), r"want of shape \[1, 1\]"),
        (lambda p: handout(p, 0, jnp.ones((1, 1), jnp.int32), 4), r"shape \[1, 1\]"),
        (lambda p: handout(p, 0, [1], 1.5), "max_pages=1.5"),
        (lambda p: handout(p, 0, [1], -1), "max_pages=-1"),
        (lambda p: handout(p, 0, [1], jnp.int32(2)), "width of an array"),
        (lambda p: handout(p, 0.0, [1], 4), "group 0.0 of a pool of 1"),
        (lambda p: handout(p, False, [1], 4), "group False of a pool of 1"),
        (lambda p: handout(p, "0", [1], 4), "group 0 of a pool of 1"),
        (lambda p: handout(p, jnp.int32(0), [1], 4), "group 0 of a pool of 1"),
        (lambda p: fork(p, 0, [[0, 1]], 0), r"vpages of shape \[1, 2\]"),
        (lambda p: fork(p, 0, 0, 0), r"vpages of shape \[\]"),
        (lambda p: fork(p, 0, [0, 1], [0]), r"copied of shape \[1\]"),
    ],
)
def test_what_is_not_the_shape_of_ids_is_refused_by_the_device_verbs(call, words):
    with pytest.raises(errors.KVMemError, match=words):
        call(held())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda b: b.release(0, [[1], [1, 2]]), "vpages that are no array"),
        (lambda b: b.handout(0, 2, 4), r"want of shape \[\]"),
        (lambda b: b.handout(0, [[2]], 4), r"want of shape \[1, 1\]"),
        (lambda b: b.handout(0, [1], 2.0), "max_pages=2.0"),
        (lambda b: b.handout(True, [1], 2), "group True"),
        (lambda b: b.fork(0, [[0, 1]], 1), r"vpages of shape \[1, 2\]"),
        (lambda b: b.fork(0, [0, 1], np.array([1])), r"copied of shape \[1\]"),
        (lambda b: b.fork(0, [0, 1], 1.0), "copied of dtype float64"),
    ],
)
def test_the_ledger_refuses_the_same_and_has_changed_nothing(call, words):
    ledger, twin = Ledger(8), Ledger(8)
    for each in (ledger, twin):
        each.handout(0, [3], 3)
    with pytest.raises(errors.KVMemError, match=words):
        call(ledger)
    assert ledger.num_free == twin.num_free
    assert np.array_equal(ledger.groups[0].refs, twin.groups[0].refs)
    assert np.array_equal(ledger.p2v, twin.p2v)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0,), "num_pages=0"),
        ((8.0,), "num_pages=8.0"),
        ((True,), "num_pages=True"),
        (("8",), "num_pages='8'"),
        ((8, 8), "num_vpages=8"),
        ((8, (8, 2.5)), r"num_vpages\[1\]=2.5"),
        ((8, (8, 4), (1,)), "1 extents for 2 groups"),
        ((2**31 - 1,), "num_pages=2147483647"),
    ],
)
def test_sizes_are_integers_above_zero_for_pool_and_ledger_alike(sizes, words):
    names = ("num_vpages", "extents")
    more = dict(zip(names, sizes[1:], strict=False))
    with pytest.raises(errors.ConfigError, match=words):
        Ledger(sizes[0], **more)
    with pytest.raises(errors.ConfigError, match=words):
        init(sizes[0], 16, **more)


def test_integers_of_numpy_are_sizes_and_groups():
    pool = init(np.int64(8), np.int32(64), num_vpages=[8, 4], extents=[1, 2])
    pool, vpages, ok = handout(pool, np.int64(1), [1], np.int64(2))
    assert bool(ok) and vpages.tolist() == [[0, 4]]


def test_ranks_that_no_mesh_divides_are_refused(sharding_of):
    with pytest.raises(errors.ConfigError, match="3 ranks over 2 devices"):
        init(8, 16, 3, sharding=sharding_of(2, AxisType.Auto))


@pytest.mark.parametrize("copied", [0, 1])
def test_a_fork_of_no_page_is_no_page_and_changes_nothing(copied):
    pool, ledger = held(), Ledger(8)
    ledger.handout(0, [3], 4)
    pool, child, ok = fork(pool, 0, [], copied)
    assert bool(ok) and child.tolist() == ledger.fork(0, [], copied).tolist() == []
    assert ledger.differences(pool) == ()


def test_a_plan_and_a_pool_agree_on_the_most_pages():
    layers = [kinds.latent("a", 0, rank=8, rope_dim=8, scale=1.0)]
    groups = group_layers(layers, 1)
    with pytest.raises(errors.IncompatiblePlan, match="2,147,483,646 pages apart"):
        budget.solve(groups, Topology(), (), max_pages=budget.MAX_PAGES + 1)
    most = budget.solve(groups, Topology(), (), max_pages=budget.MAX_PAGES)
    assert most.pools[0].pages == budget.MAX_PAGES
    with pytest.raises(errors.ConfigError, match="num_pages"):
        init(budget.MAX_PAGES + 1, 16)
    with pytest.raises(errors.ConfigError, match="ranks=0"):  # and not the pages
        init(budget.MAX_PAGES, 16, 0)
