"""A fresh pool: sizes, null ids, poison, placement, one buffer a leaf."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kvmem import budget, errors
from kvmem import pool as kvpool
from kvmem.geometry import LayerSpec, Topology, group_layers, kinds


def test_a_fresh_pool_has_every_page_free_and_breaks_no_law():
    pool = kvpool.init(6, 32, 3, num_vpages=(6, 4))
    assert (pool.num_ranks, pool.num_pages, pool.page_nbytes) == (3, 6, 32)
    assert int(pool.num_free) == 6
    assert [int(books.num_vfree) for books in pool.groups] == [6, 4]
    assert (pool.null_page, pool.groups[1].null_vpage) == (6, 4)
    assert not np.asarray(pool.pages).any()
    assert kvpool.check(pool) == ()


def test_poison_is_nan_in_every_type_a_page_may_hold():
    byte = np.asarray(kvpool.init(2, 16, poison=True).pages)
    names = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
    for name in (*names, "float8_e8m0fnu"):
        kind = np.dtype(getattr(ml_dtypes, name, name))
        assert np.isnan(byte.view(kind).astype(np.float32)).all(), name


@pytest.mark.case("JAX-05")
@pytest.mark.parametrize("rebuilt", [False, True])
def test_no_two_leaves_share_a_buffer_so_a_fresh_pool_can_be_donated(rebuilt):
    pool = kvpool.init(5, 16, num_vpages=(5, 5))
    if rebuilt:
        pool = jax.tree.map(lambda leaf: leaf, pool)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
    assert len(set(pointers)) == len(pointers)
    donated, _, ok = kvpool.handout(pool, 0, [1], 1)
    assert bool(ok)
    assert pool.pages.is_deleted()
    assert kvpool.check(donated) == ()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_ranks_are_cut_over_the_mesh_and_the_books_are_whole_on_each_device(
    axis_type, sharding_of
):
    pool = kvpool.init(6, 32, 8, sharding=sharding_of(8, axis_type))
    shards = pool.pages.addressable_shards
    assert [shard.data.shape for shard in shards] == [(1, 6, 32)] * 8
    books = jax.tree.leaves(dataclasses.replace(pool, pages=()))
    assert all(leaf.sharding.is_fully_replicated for leaf in books)


def test_two_mesh_axes_may_share_the_rank_axis():
    mesh = jax.make_mesh((4, 2), ("tp", "dcp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(("tp", "dcp")))
    pool = kvpool.init(4, 16, 8, sharding=sharding)
    assert pool.pages.addressable_shards[0].data.shape == (1, 4, 16)


def test_a_sharding_that_cuts_pages_is_refused(sharding_of):
    mesh = sharding_of(8, AxisType.Auto).mesh
    with pytest.raises(errors.ConfigError, match="only the rank axis"):
        kvpool.init(8, 16, sharding=NamedSharding(mesh, PartitionSpec(None, "tp")))


@pytest.mark.parametrize("wrong", [{"num_pages": 0}, {"page_nbytes": 2**31}])
def test_sizes_that_int32_pairs_cannot_address_are_refused_by_name(wrong):
    sizes = {"num_pages": 4, "page_nbytes": 16} | wrong
    (name, value), *_ = wrong.items()
    with pytest.raises(errors.ConfigError, match=f"{name}={value}"):
        kvpool.init(**sizes)


def test_a_pool_takes_the_bytes_that_its_budget_says():
    specs = [LayerSpec(f"l{i}", i, "gqa", 3, 8, None, "float32") for i in range(2)]
    groups = group_layers(specs, 4)
    topology = Topology(tp=3)
    solved = budget.solve(groups, topology, [budget.limit("memory", 10_000)])
    pool = kvpool.from_budget(solved, topology)
    assert pool.pages.nbytes == 3 * solved.used_nbytes
    assert pool.num_pages == solved.groups[0].pages


def mixed_groups():
    specs = [LayerSpec(f"l{i}", i, "gqa", 3, 8, None, "float32") for i in range(3)]
    specs[2] = dataclasses.replace(specs[2], window=8)
    return group_layers(specs, 4)


def test_pools_of_a_split_plan_are_refused_as_one_in_words():
    limits = [budget.limit("memory", 10_000)]
    split = budget.solve(mixed_groups(), Topology(), limits, kind="split")
    with pytest.raises(errors.IncompatiblePlan, match="1,536, 768 B"):
        kvpool.from_budget(split, Topology())
    with pytest.raises(errors.InvalidId, match="pool 2 of a plan with 2"):
        kvpool.from_budget(split, Topology(), 2)


def test_split_pools_are_the_same_type_once_a_size():
    limits = [budget.limit("memory", 10_000)]
    split = budget.solve(mixed_groups(), Topology(), limits, kind="split")
    made = [kvpool.from_budget(split, Topology(), at) for at in range(2)]
    for pool, paid in zip(made, split.pools, strict=True):
        assert pool.pages.shape == (1, paid.pages, paid.page_nbytes)
        assert [len(books.refs) for books in pool.groups] == list(paid.num_vpages)
        pool, _, ok = kvpool.handout(pool, 0, [1], 1)
        assert bool(ok)
        assert kvpool.check(pool) == ()
    assert sum(pool.pages.nbytes for pool in made) == split.used_nbytes


def test_a_state_of_a_unified_plan_lies_in_as_many_pages_as_it_is_cut_into():
    specs = [LayerSpec("l0", 0, "gqa", 1, 8, None, "float32")]
    specs.append(kinds.kda("l1", 1, heads=4, head_dim=8, conv_kernel=4))
    groups = group_layers(specs, 4)
    limits = [budget.limit("memory", 30_000)]
    solved = budget.solve(groups, Topology(), limits, sequences=2)
    pool = kvpool.from_budget(solved, Topology(), poison=True)
    extents = solved.pools[0].extents
    assert extents[0] == 1 < extents[1]
    assert tuple(books.extent for books in pool.groups) == extents
    pool, vpages, ok = kvpool.handout(pool, 1, [1], 1)
    assert bool(ok)
    assert kvpool.translate_parts(pool, 1, vpages).shape == (1, 1, extents[1])


def test_every_group_of_a_unified_plan_may_take_every_page():
    limits = [budget.limit("memory", 10_000)]
    solved = budget.solve(mixed_groups(), Topology(), limits)
    pool = kvpool.from_budget(solved, Topology())
    assert (pool.num_pages, pool.pages.shape[2]) == (10_000 // 1_536, 1_536)
    assert [len(books.refs) for books in pool.groups] == [pool.num_pages] * 2
