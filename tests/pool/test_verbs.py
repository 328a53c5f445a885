"""The device verbs: total, in place, one trace; refused lanes change nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as kvpool
from kvmem.pool import verbs


def books_of(pool):
    """Return every book as bytes, to compare whole states."""
    kept = dataclasses.replace(pool, pages=())
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(kept)]


def handed(pool, *want, max_pages=4, group=0):
    three = [*want, *[0] * (3 - len(want))]  # always as many: one program
    pool, vpages, ok = kvpool.handout(pool, group, three, max_pages)
    assert bool(ok)
    rows = np.asarray(vpages)[: len(want)]
    return pool, [row[row < pool.groups[group].num_vpages] for row in rows]


def test_a_handout_gives_each_sequence_its_pages_and_null_beyond():
    pool, vpages, ok = kvpool.handout(kvpool.init(6, 16), 0, [2, 0, 1], 3)
    assert bool(ok)
    assert np.asarray(vpages).tolist() == [[0, 1, 6], [6, 6, 6], [2, 6, 6]]
    assert int(pool.num_free) == 3
    assert kvpool.check(pool, holders=[[vpages]]) == ()


def test_exactly_the_handed_out_pages_are_zero_on_all_ranks(placed_pool):
    pool = placed_pool(poison=True)
    pool, vpages, _ = kvpool.handout(pool, 0, [2, 1], 4)
    taken = np.asarray(kvpool.translate(pool, 0, vpages)).ravel()
    taken = taken[taken < pool.num_pages]
    pages = np.asarray(pool.pages)
    assert not pages[:, taken].any()
    assert (np.delete(pages, taken, axis=1) == 0xFF).all()


def test_a_recycled_page_is_zero_when_it_is_handed_out(placed_pool):
    pool = placed_pool()
    pool, vpages, _ = kvpool.handout(pool, 0, [4, 2], 4)
    dirty = jnp.full_like(pool.pages, 0xA5)
    pool, _ = kvpool.release(dataclasses.replace(pool, pages=dirty), 0, vpages)
    assert (np.asarray(pool.pages) == 0xA5).all()
    pool, vpages, _ = kvpool.handout(pool, 0, [1, 0], 4)
    (page, *_) = np.asarray(kvpool.translate(pool, 0, vpages)).ravel()
    pages = np.asarray(pool.pages)
    assert not pages[:, page].any()
    assert (np.delete(pages, page, axis=1) == 0xA5).all()


@pytest.mark.parametrize("want", [[3, 2], [-1, 1], [4, 0], [2**30, 2**30]])
def test_a_handout_that_cannot_be_served_changes_nothing(want):
    pool = kvpool.init(4, 16, poison=True)
    pool, _ = handed(pool, 1)
    before, pages = books_of(pool), np.asarray(pool.pages)
    pool, vpages, ok = kvpool.handout(pool, 0, want, 3)
    assert not bool(ok)
    assert (np.asarray(vpages) == pool.groups[0].null_vpage).all()
    assert books_of(pool) == before
    assert np.array_equal(np.asarray(pool.pages), pages)


def test_virtual_pages_can_run_out_before_physical_ones_do():
    pool = kvpool.init(6, 16, num_vpages=(2, 6))
    pool, _, ok = kvpool.handout(pool, 0, [3], 3)
    assert not bool(ok)
    pool, _, ok = kvpool.handout(pool, 1, [5], 6)
    assert bool(ok)
    pool, _, ok = kvpool.handout(pool, 0, [2], 3)
    assert not bool(ok)
    assert kvpool.check(pool) == ()


@pytest.mark.case("ALC-01")
def test_the_second_free_of_a_page_is_rejected_and_changes_nothing():
    pool, (a,) = handed(kvpool.init(4, 16), 1)
    pool, rejected = kvpool.release(pool, 0, a)
    assert not np.asarray(rejected).any()
    before = books_of(pool)
    pool, rejected = kvpool.release(pool, 0, a)
    assert np.asarray(rejected).all()
    assert books_of(pool) == before
    pool, (first,) = handed(pool, 1)
    pool, (second,) = handed(pool, 1)
    assert first != second
    assert kvpool.check(pool, holders=[[first, second]]) == ()


@pytest.mark.case("ALC-02")
def test_an_id_listed_as_often_as_it_is_held_is_freed_once():
    pool, (a,) = handed(kvpool.init(4, 16), 1)
    pool, _ = kvpool.retain(pool, 0, a)
    pool, rejected = kvpool.release(pool, 0, [a[0], a[0]])
    assert not np.asarray(rejected).any()
    assert int(pool.num_free) == 4
    assert kvpool.check(pool, holders=[[]]) == ()


@pytest.mark.case("ALC-02")
def test_an_id_listed_more_often_than_it_is_held_is_rejected_in_all_lanes():
    pool, (a, b) = handed(kvpool.init(4, 16), 1, 1)
    pool, rejected = kvpool.release(pool, 0, [a[0], b[0], a[0]])
    assert np.asarray(rejected).tolist() == [True, False, True]
    assert int(pool.num_free) == 3
    assert kvpool.check(pool, holders=[[a]]) == ()


@pytest.mark.case("ALC-08")
@pytest.mark.parametrize("bad", [-1, -2, -5, 2, np.iinfo(np.int32).min])
def test_a_bad_id_is_rejected_and_its_neighbours_are_released(bad):
    pool, (a, b, c) = handed(kvpool.init(4, 16), 2, 1, 1)
    pool, _ = kvpool.release(pool, 0, b)
    pool, rejected = kvpool.release(pool, 0, [c[0], bad])
    assert np.asarray(rejected).tolist() == [False, True]
    assert kvpool.check(pool, holders=[[a]]) == ()


def test_pages_join_the_stack_in_the_order_of_their_first_lanes():
    pool, (a, b, c) = handed(kvpool.init(4, 16), 1, 1, 1)
    pool, _ = kvpool.retain(pool, 0, a)
    pool, _ = kvpool.release(pool, 0, [a[0], c[0], b[0], a[0]])
    pool, (last_in_first,) = handed(pool, 3)
    assert last_in_first.tolist() == [*b, *c, *a]


@pytest.mark.case("ALC-08")
@pytest.mark.parametrize("nothing", [[], [4], [4, 4, 2**31 - 1]])
def test_releasing_no_page_or_null_is_a_no_op(nothing):
    pool, _ = handed(kvpool.init(4, 16), 2)
    before = books_of(pool)
    pool, rejected = kvpool.release(pool, 0, nothing)
    assert not np.asarray(rejected).any()
    assert books_of(pool) == before


def test_zero_is_an_ordinary_page():
    pool, (a,) = handed(kvpool.init(1, 16), 1)
    assert a.tolist() == [0]
    pool, rejected = kvpool.release(pool, 0, [0])
    assert not np.asarray(rejected).any()
    assert int(pool.num_free) == 1


def test_the_last_reference_of_a_pinned_page_is_kept():
    pool, (a,) = handed(kvpool.init(4, 16), 1)
    pins = pool.groups[0].pins.at[a].set(1)
    pool = dataclasses.replace(
        pool, groups=(dataclasses.replace(pool.groups[0], pins=pins),)
    )
    pool, _ = kvpool.retain(pool, 0, a)
    pool, rejected = kvpool.release(pool, 0, a)
    assert not np.asarray(rejected).any()
    pool, rejected = kvpool.release(pool, 0, a)
    assert np.asarray(rejected).all()
    assert kvpool.check(pool, holders=[[a]]) == ()


def test_retain_counts_each_lane_and_rejects_what_nobody_holds():
    pool, (a,) = handed(kvpool.init(4, 16), 1)
    pool, rejected = kvpool.retain(pool, 0, [a[0], a[0], -1, 3, 4])
    assert np.asarray(rejected).tolist() == [False, False, True, True, False]
    assert kvpool.check(pool, holders=[[a, a, a]]) == ()


def test_translate_of_null_of_minus_one_and_of_the_free_is_null():
    pool, (_, b, c) = handed(kvpool.init(4, 16), 2, 1, 1)
    pool, _ = kvpool.release(pool, 0, b)
    ids = [[c[0], 4], [-1, b[0]], [99, 2**31 - 1]]
    assert np.asarray(kvpool.translate(pool, 0, ids)).tolist() == [
        [3, 4],
        [4, 4],
        [4, 4],
    ]


def test_a_fork_shares_full_pages_and_copies_the_partial_one(placed_pool, shake):
    pool = placed_pool()
    pool, vpages, _ = kvpool.handout(pool, 0, [3, 0], 4)
    filled = shake(*pool.pages.shape)
    pages = jax.device_put(filled, pool.pages.sharding)
    pool = dataclasses.replace(pool, pages=pages)
    pool, child, ok = kvpool.fork(pool, 0, vpages[0], 2)
    assert bool(ok)
    assert np.asarray(child).tolist() == [0, 1, 3, 6]
    source, copied = np.asarray(kvpool.translate(pool, 0, [2, 3, 6, 6]))[:2]
    after = np.asarray(pool.pages)
    assert np.array_equal(after[:, copied], filled[:, source])
    assert np.array_equal(np.delete(after, copied, 1), np.delete(filled, copied, 1))
    assert kvpool.check(pool, holders=[[vpages, child]]) == ()


def test_a_fork_at_a_page_boundary_shares_everything():
    pool, (a,) = handed(kvpool.init(4, 16), 2)
    pool, child, ok = kvpool.fork(pool, 0, a, 2)
    assert bool(ok)
    assert np.array_equal(np.asarray(child), a)
    assert int(pool.num_free) == 2
    assert kvpool.check(pool, holders=[[a, child]]) == ()


@pytest.mark.parametrize(
    ("vpages", "copied"),
    [([0, 1], 1), ([0, 3], 2), ([0, -1], 2), ([0, 4], 1), ([0, 1], -1)],
    ids=["no page left", "nobody holds it", "minus one", "null column", "negative"],
)
def test_a_fork_that_cannot_be_done_changes_nothing(vpages, copied):
    pool = kvpool.init(4, 16, poison=True, num_vpages=(4, 2))
    pool, _ = handed(pool, 2)
    if (vpages, copied) == ([0, 1], 1):
        pool, _ = handed(pool, 2, group=1)
    before, pages = books_of(pool), np.asarray(pool.pages)
    pool, child, ok = kvpool.fork(pool, 0, vpages, copied)
    assert not bool(ok)
    assert (np.asarray(child) == 4).all()
    assert books_of(pool) == before
    assert np.array_equal(np.asarray(pool.pages), pages)


def test_a_group_that_is_not_there_is_named():
    pool = kvpool.init(4, 16)
    for verb in (kvpool.release, kvpool.retain, kvpool.translate):
        with pytest.raises(errors.InvalidId, match="group 1 of a pool of 1"):
            verb(pool, 1, [0])


@pytest.mark.case("IDX-05")
@pytest.mark.parametrize("verb", ["release", "retain", "translate"])
def test_an_id_that_int32_would_wrap_is_refused_with_its_value(verb):
    wrapped = np.array([4_294_967_301], np.int64)
    with pytest.raises(ValueError, match="4294967301.*would read as 5"):
        getattr(kvpool, verb)(kvpool.init(8, 16), 0, wrapped)


@pytest.mark.case("JAX-01")
@pytest.mark.case("JAX-04")
def test_fifty_steps_with_changing_counters_trace_each_verb_once(traced):
    hand = traced(lambda pool, want: kvpool.handout(pool, 0, want, 1))
    drop = traced(lambda pool, ids: kvpool.release(pool, 0, ids))
    share = traced(lambda pool, ids: kvpool.retain(pool, 0, ids))
    split = traced(lambda pool, ids, at: kvpool.fork(pool, 0, ids, at))
    pool, held = kvpool.init(9, 16), []
    for step in range(50):
        want = np.int32([step % 3 == 0, step % 5 == 0])
        pool, vpages, ok = hand(pool, want)
        pool, child, _ = split(pool, vpages.ravel(), np.int32(step % 3))
        pool, _ = share(pool, child)
        held += [np.asarray(vpages).ravel()] if bool(ok) else []
        held += [np.asarray(child)] * 2
        while held and (step % 2 or len(held) > 3):
            pool, rejected = drop(pool, held.pop(0))
            assert not np.asarray(rejected).any()
        assert kvpool.check(pool, holders=[held]) == ()
    assert [verb.traces for verb in (hand, drop, share, split)] == [1, 1, 1, 1]


@pytest.mark.case("JAX-06")
def test_every_verb_gives_back_the_sharding_it_was_given(placed_pool):
    pool = placed_pool()
    shardings = [leaf.sharding for leaf in jax.tree.leaves(pool)]

    def same(pool):
        return [leaf.sharding for leaf in jax.tree.leaves(pool)] == shardings

    pool, vpages, _ = kvpool.handout(pool, 0, [2, 1], 4)
    assert same(pool)
    pool, _ = kvpool.retain(pool, 0, vpages)
    assert same(pool)
    pool, _, _ = kvpool.fork(pool, 0, vpages[0], 1)
    assert same(pool)
    pool, _ = kvpool.release(pool, 0, vpages)
    assert same(pool)
    assert kvpool.check(pool) == ()


@pytest.mark.case("JAX-06")
@pytest.mark.parametrize(
    ("num_sequences", "ranks"),
    [
        (1, 4),
        (4, 1),
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(4, 4, marks=pytest.mark.long),
    ],
)
def test_no_verb_copies_the_pool_or_a_book(num_sequences, ranks, copies_of):
    num_pages, page_nbytes, num_vpages = 64, 4096, 96
    pool = kvpool.init(num_pages, page_nbytes, ranks, num_vpages=(num_vpages,))
    ids = jnp.zeros(num_sequences, jnp.int32)
    programs = [
        verbs._handout.lower(pool, 0, ids, 1),
        verbs._release.lower(pool, 0, ids),
        verbs._retain.lower(pool, 0, ids),
        verbs._fork.lower(pool, 0, ids, jnp.int32(0)),
    ]
    for program in (lowered.compile() for lowered in programs):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= pool.pages.nbytes
        # A fork reads its one page before it writes it.
        assert memory.temp_size_in_bytes < 3 * ranks * page_nbytes
        assert copies_of(program, "u8", ranks, num_pages, page_nbytes) == []
        for book in (num_pages, (num_pages, 2), num_vpages, (num_vpages, 1)):
            assert copies_of(program, "s32", *np.atleast_1d(book)) == []


def test_the_look_for_copies_sees_one(copies_of):
    array = jnp.zeros((64, 4096), jnp.uint8)
    kept = jax.jit(lambda array: (array, array.at[jnp.arange(3)].set(jnp.uint8(1))))
    compiled = kept.lower(array).compile()
    assert copies_of(compiled, "u8", 64, 4096)


@pytest.mark.case("JAX-02")
def test_warming_up_outside_a_mesh_context_counts_inside_it(placed_pool, sharding_of):
    pool = placed_pool()
    mesh = getattr(pool.pages.sharding, "mesh", None)
    mesh = mesh or sharding_of(8, jax.sharding.AxisType.Auto).mesh

    def step(pool):
        pool, vpages, _ = kvpool.handout(pool, 0, [2, 0], 4)
        mine, nothing = vpages = np.asarray(vpages)
        pool, _ = kvpool.retain(pool, 0, vpages)
        pool, child, _ = kvpool.fork(pool, 0, mine, 1)
        kvpool.translate(pool, 0, mine)
        for ids in ([mine, np.asarray(child)], [mine, nothing]):
            pool, _ = kvpool.release(pool, 0, np.stack(ids))
        return pool

    programs = (verbs._handout, verbs._release, verbs._retain, verbs._fork)
    programs += (verbs._translate,)
    pool = step(step(pool))
    warm = [program._cache_size() for program in programs]
    with jax.set_mesh(mesh):
        pool = step(pool)
    assert [program._cache_size() for program in programs] == warm
    assert kvpool.check(pool, holders=[[]]) == ()


@pytest.mark.case("JAX-08")
def test_the_pure_verbs_leak_no_tracer():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(pool, want):
        pool, vpages, _ = kvpool.handout(pool, 0, want, 2)
        pool, child, _ = kvpool.fork(pool, 0, vpages[0], 1)
        pool, _ = kvpool.retain(pool, 0, child)
        pool, _ = kvpool.release(pool, 0, vpages)
        return pool, kvpool.translate(pool, 0, child)

    with jax.checking_leaks():
        pool, pages = step(kvpool.init(5, 16), jnp.array([2, 1], jnp.int32))
    assert np.asarray(pages).tolist() == [0, 3]
    assert kvpool.check(pool) == ()


def test_the_verbs_run_inside_shard_map_on_one_rank_a_device(sharding_of):
    sharding = sharding_of(8, jax.sharding.AxisType.Auto)
    pool = kvpool.init(6, 32, 8, sharding=sharding, poison=True)
    whole = jax.sharding.PartitionSpec()
    specs = jax.tree.map(lambda _: whole, pool)
    specs = dataclasses.replace(specs, pages=sharding.spec)

    def body(pool, want):
        pool, vpages, ok = kvpool.handout(pool, 0, want, 2)
        pool, child, _ = kvpool.fork(pool, 0, vpages[0], 1)
        return pool, vpages, child, ok

    mapped = jax.shard_map(
        body,
        mesh=sharding.mesh,
        in_specs=(specs, whole),
        out_specs=(specs, *[whole] * 3),
    )
    pool, vpages, child, ok = jax.jit(mapped, donate_argnums=0)(pool, np.int32([2]))
    assert bool(ok)
    assert kvpool.check(pool, holders=[[vpages, child]]) == ()
    zero = np.asarray(pool.pages).any(axis=(0, 2))
    assert zero.tolist() == [False] * 3 + [True] * 3
