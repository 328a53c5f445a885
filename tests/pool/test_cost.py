"""What a verb costs: in place, one trace, and no more in a larger pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import pool as kvpool
from kvmem.pool import compaction, verbs

PAGE_NBYTES = 4096
GROUPS = {"num_vpages": (96, 37), "extents": (1, 5)}
VERBS = {
    "handout": lambda pool, group, ids: verbs._handout.lower(pool, group, ids, 2),
    "release": lambda pool, group, ids: verbs._release.lower(pool, group, ids),
    "retain": lambda pool, group, ids: verbs._retain.lower(pool, group, ids),
    "pin": lambda pool, group, ids: verbs._pin.lower(pool, group, ids),
    "unpin": lambda pool, group, ids: verbs._unpin.lower(pool, group, ids),
    "fork": lambda pool, group, ids: verbs._fork.lower(pool, group, ids, np.int32(0)),
}


@pytest.mark.parametrize(
    ("group", "lanes", "ranks"),
    [
        (0, 4, 1),
        (1, 1, 4),
        pytest.param(0, 1, 4, marks=pytest.mark.long),
        pytest.param(1, 4, 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_copies_a_pool_of_parts_or_its_books(
    verb, group, lanes, ranks, copies_of
):
    pool = kvpool.init(64, PAGE_NBYTES, ranks, **GROUPS)
    ids = jnp.zeros(lanes, jnp.int32)
    program = VERBS[verb](pool, group, ids).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.pages.nbytes
    # A fork holds one page at a time, on every rank.
    assert memory.temp_size_in_bytes < 2 * ranks * PAGE_NBYTES
    assert copies_of(program, "u8", ranks, 64, PAGE_NBYTES) == []
    for leaf in jax.tree.leaves(pool.groups) + [pool.p2v, pool.free]:
        if leaf.ndim:
            assert copies_of(program, "s32", *leaf.shape) == []


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_costs_more_in_a_larger_pool(verb):
    costs = set()
    for scale in (1, 64):
        vpages = tuple(count * scale for count in GROUPS["num_vpages"])
        pool = jax.eval_shape(
            lambda vpages=vpages, scale=scale: kvpool.init(
                64 * scale, 64, num_vpages=vpages, extents=GROUPS["extents"]
            )
        )
        program = VERBS[verb](pool, 1, jnp.zeros(3, jnp.int32)).compile()
        analysis = program.cost_analysis()
        temporary = program.memory_analysis().temp_size_in_bytes
        costs.add((temporary, analysis["flops"]))
    assert len(costs) == 1


def test_compaction_alone_costs_more_in_a_larger_pool():
    costs = set()
    for num_pages in (64, 4096):
        pool = jax.eval_shape(lambda n=num_pages: kvpool.init(n, 64))
        program = compaction._compact.lower(pool).compile()
        costs.add(program.memory_analysis().temp_size_in_bytes)
    assert len(costs) == 2


def test_fifty_steps_of_pins_and_parts_trace_each_verb_once(traced):
    hand = traced(lambda pool, want: kvpool.handout(pool, 1, want, 1))
    drop = traced(lambda pool, ids: kvpool.release(pool, 1, ids))
    hold = traced(lambda pool, ids: kvpool.pin(pool, 1, ids))
    loose = traced(lambda pool, ids: kvpool.unpin(pool, 1, ids))
    close = traced(kvpool.compact)
    parts = traced(lambda pool, ids: (pool, kvpool.translate_parts(pool, 1, ids)))
    pool = kvpool.init(40, 16, **GROUPS)
    for step in range(50):
        pool, vpages, ok = hand(pool, np.int32([1, step % 2]))
        assert bool(ok)
        ids = np.asarray(vpages).ravel()
        pool, rejected = hold(pool, ids)
        assert not np.asarray(rejected).any()
        pool, places = parts(pool, ids)
        assert (np.asarray(places)[0] < 40).all()
        pool, _ = close(pool)
        pool, rejected = loose(pool, ids)
        assert not np.asarray(rejected).any()
        pool, rejected = drop(pool, ids)
        assert not np.asarray(rejected).any()
    assert kvpool.check(pool, holders=[[], []]) == ()
    counted = (hand, drop, hold, loose, close, parts)
    assert [verb.traces for verb in counted] == [1] * 6


@pytest.mark.parametrize("verb", ["pin", "unpin", "translate_parts"])
def test_ids_that_int32_would_wrap_and_unknown_groups_are_refused(verb):
    pool = kvpool.init(8, 16)
    with pytest.raises(ValueError, match="4294967301.*would read as 5"):
        getattr(kvpool, verb)(pool, 0, np.array([4_294_967_301], np.int64))
    with pytest.raises(ValueError, match="group 1 of a pool of 1"):
        getattr(kvpool, verb)(pool, 1, [0])


@pytest.mark.parametrize(
    "axis", [None, pytest.param("auto", marks=pytest.mark.long), "explicit"]
)
def test_pins_and_compaction_compile_once_inside_and_outside_a_mesh(axis, sharding_of):
    kind = {"auto": "Auto", "explicit": "Explicit"}.get(axis, "Auto")
    sharding = sharding_of(8, getattr(jax.sharding.AxisType, kind))
    placed = None if axis is None else sharding
    pool = kvpool.init(12, 16, 8, sharding=placed, **GROUPS)

    def step(pool):
        pool, vpages, _ = kvpool.handout(pool, 1, [1, 1], 1)
        vpages = np.asarray(vpages).ravel()
        pool, _ = kvpool.pin(pool, 1, vpages)
        pool, _ = kvpool.compact(pool)
        kvpool.translate_parts(pool, 1, vpages)
        pool, _ = kvpool.unpin(pool, 1, vpages)
        return kvpool.release(pool, 1, vpages)[0]

    programs = (verbs._pin, verbs._unpin, verbs._translate_parts, compaction._compact)
    pool = step(step(pool))
    warm = [program._cache_size() for program in programs]
    with jax.set_mesh(sharding.mesh):
        pool = step(pool)
    assert [program._cache_size() for program in programs] == warm
    assert kvpool.check(pool, holders=[[], []]) == ()
