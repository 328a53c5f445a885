"""Compaction: the lowest pages hold what is in use, pinned ones stay, bytes follow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as kvpool
from kvmem.pool import compaction, tokens


def filled(pool, shake):
    """Return the pool with aperiodic bytes in every page, and those bytes."""
    content = shake(*pool.pages.shape)
    pages = jax.device_put(content, pool.pages.sharding)
    return dataclasses.replace(pool, pages=pages), content


@pytest.fixture
def scattered(shake):
    """Return a pool of 8 pages whose pages 1, 4, 5 and 7 are held, and its bytes.

    Group 0 holds vpage 1 at page 1 and vpage 5 at page 7; a state of group 1 has its
    two parts in pages 4 and 5.
    """
    pool = kvpool.init(8, 16, 2, num_vpages=(8, 2), extents=(1, 2), poison=True)
    pool, _, _ = kvpool.handout(pool, 0, [4], 4)
    pool, _, _ = kvpool.handout(pool, 1, [1], 1)
    pool, _, _ = kvpool.handout(pool, 0, [2], 2)
    pool, _ = kvpool.release(pool, 0, [0, 2, 3, 4])
    return filled(pool, shake)


def test_what_is_in_use_lies_lowest_and_its_bytes_have_followed(scattered):
    pool, content = scattered
    pool, moved = kvpool.compact(pool)
    assert int(moved) == 3
    assert kvpool.translate(pool, 0, [1, 5]).tolist() == [1, 3]
    assert kvpool.translate_parts(pool, 1, [0]).tolist() == [[0, 2]]
    pages = np.asarray(pool.pages)
    assert np.array_equal(pages[:, [1, 0, 2, 3]], content[:, [1, 4, 5, 7]])
    assert (pages[:, [4, 5, 7]] == kvpool.POISON).all()
    assert np.array_equal(pages[:, 6], content[:, 6])
    assert kvpool.check(pool, holders=[[[1, 5]], [[0]]]) == ()
    assert pool.free[: int(pool.num_free)].tolist() == [7, 6, 5, 4]


def test_a_pinned_page_stays_and_the_others_close_the_gaps(scattered):
    pool, content = scattered
    pool, _ = kvpool.pin(pool, 1, [0])
    pool, moved = kvpool.compact(pool)
    assert int(moved) == 1
    assert kvpool.translate_parts(pool, 1, [0]).tolist() == [[4, 5]]
    assert kvpool.translate(pool, 0, [1, 5]).tolist() == [1, 0]
    assert np.array_equal(np.asarray(pool.pages)[:, 0], content[:, 7])
    assert pool.free[: int(pool.num_free)].tolist() == [7, 6, 3, 2]


def test_a_second_compaction_moves_nothing(scattered):
    pool, _ = kvpool.compact(scattered[0])
    before = jax.tree.map(np.asarray, pool)
    pool, moved = kvpool.compact(pool)
    assert int(moved) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, before, pool))


@pytest.mark.parametrize("want", [0, 4])
def test_an_empty_pool_and_a_full_one_move_nothing(want):
    pool = kvpool.init(4, 16)
    if want:
        pool, _, _ = kvpool.handout(pool, 0, [want], want)
    pool, moved = kvpool.compact(pool)
    assert int(moved) == 0
    assert kvpool.check(pool) == ()
    ledger = kvpool.Ledger.of(pool)
    assert ledger.compact() == 0
    assert ledger.differences(pool) == ()


def test_a_handout_after_compaction_takes_the_lowest_free_page(scattered):
    pool, _ = kvpool.compact(scattered[0])
    pool, vpages, _ = kvpool.handout(pool, 0, [2], 2)
    assert kvpool.translate(pool, 0, vpages).tolist() == [[4, 5]]
    assert not np.asarray(pool.pages)[:, [4, 5]].any()


def test_compaction_runs_in_checked_mode_and_names_itself(scattered):
    pool, _ = scattered
    pool, moved = kvpool.checked(kvpool.compact)(pool)
    assert int(moved) == 3
    refs = pool.groups[0].refs.at[3].set(1)
    books = dataclasses.replace(pool.groups[0], refs=refs)
    broken = dataclasses.replace(pool, groups=(books, pool.groups[1]))
    with pytest.raises(errors.KVMemError, match="the books after compact: .*no page"):
        kvpool.checked(kvpool.compact)(broken)


def test_every_compaction_is_one_trace(traced):
    def lanes(ids):  # six, the others null: every release is one program
        return np.int32([*ids, *[6] * (6 - len(ids))])

    compact = traced(kvpool.compact)
    pool = kvpool.init(6, 16)
    for step in range(12):
        pool, vpages, _ = kvpool.handout(pool, 0, [1 + step % 3], 3)
        pool, _ = kvpool.release(pool, 0, lanes(vpages[0, : step % 2]))
        pool, _ = compact(pool)
        pool, _ = kvpool.release(pool, 0, lanes(range(step % 6)))
    assert compact.traces == 1


@pytest.mark.parametrize("ranks", [1, 4])
def test_pages_are_moved_in_place_one_at_a_time(ranks, copies_of):
    num_pages, page_nbytes = 64, 8192
    pool = kvpool.init(num_pages, page_nbytes, ranks, num_vpages=(64, 9))
    program = compaction._compact.lower(pool).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.pages.nbytes
    books = sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) - pool.pages.nbytes
    assert memory.temp_size_in_bytes < ranks * page_nbytes + 8 * books
    assert copies_of(program, "u8", ranks, num_pages, page_nbytes) == []


def test_each_rank_moves_its_own_bytes_and_keeps_its_placement(placed_pool, shake):
    pool = placed_pool()
    pool, _, _ = kvpool.handout(pool, 0, [4, 1], 4)
    pool, _ = kvpool.release(pool, 0, [[0, 2, 6, 6], [6] * 4])
    pool, content = filled(pool, shake)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(pool)]
    pool, moved = kvpool.compact(pool)
    assert int(moved) == 2
    assert [leaf.sharding for leaf in jax.tree.leaves(pool)] == shardings
    pages = np.asarray(pool.pages)
    places = np.asarray(kvpool.translate(pool, 0, [1, 3, 4, 6]))[:3]
    assert places.tolist() == [1, 0, 2]
    assert np.array_equal(pages[:, places], content[:, [1, 3, 4]])


def test_compaction_runs_inside_shard_map(sharding_of, shake):
    sharding = sharding_of(8, jax.sharding.AxisType.Auto)
    pool = kvpool.init(6, 32, 8, sharding=sharding)
    pool, _, _ = kvpool.handout(pool, 0, [5], 5)
    pool, _ = kvpool.release(pool, 0, [0, 1])
    pool, content = filled(pool, shake)
    whole = jax.sharding.PartitionSpec()
    specs = jax.tree.map(lambda _: whole, pool)
    specs = dataclasses.replace(specs, pages=sharding.spec)
    mapped = jax.shard_map(
        kvpool.compact, mesh=sharding.mesh, in_specs=(specs,), out_specs=(specs, whole)
    )
    pool, _ = jax.jit(mapped, donate_argnums=0)(pool)
    places = np.asarray(kvpool.translate(pool, 0, [2, 3, 4]))
    assert places.tolist() == [2, 0, 1]
    assert np.array_equal(np.asarray(pool.pages)[:, places], content[:, [2, 3, 4]])


# What can go wrong around a compaction that comes late: five pages, one hole.


@pytest.fixture
def holed(shake):
    """Return a pool of 6 pages: 0, 2, 3 and 4 held, a hole at 1."""
    pool, _, _ = kvpool.handout(kvpool.init(6, 16), 0, [5], 5)
    pool, _ = kvpool.release(pool, 0, [1])
    return filled(pool, shake)[0]


def test_the_newest_page_stays_while_somebody_writes_it(holed):
    pool, _ = kvpool.pin(holed, 0, [4])
    pool, moved = kvpool.compact(pool)
    assert kvpool.translate(pool, 0, [4]).tolist() == [4]
    assert int(moved) == 1  # the next lower one fills the hole
    pool, _ = kvpool.unpin(pool, 0, [4])
    pool, moved = kvpool.compact(pool)
    assert int(moved) == 1
    assert kvpool.translate(pool, 0, [0, 2, 3, 4]).tolist() == [0, 2, 1, 3]


def test_while_all_are_pinned_nothing_moves_and_the_hole_stays(holed):
    pool, _ = kvpool.pin(holed, 0, [0, 2, 3, 4])
    pool, moved = kvpool.compact(pool)
    assert int(moved) == 0
    assert pool.free[: int(pool.num_free)].tolist() == [5, 1]
    pool, _ = kvpool.unpin(pool, 0, [0, 2, 3, 4])
    _, moved = kvpool.compact(pool)
    assert int(moved) == 1


def test_the_source_of_a_move_is_free_at_once_for_programs_run_in_order(holed):
    newest = np.asarray(holed.pages)[:, 4].copy()
    pool, moved = kvpool.compact(holed)
    assert int(moved) == 1
    pool, vpages, ok = kvpool.handout(pool, 0, [2], 2)
    assert bool(ok)
    assert kvpool.translate(pool, 0, vpages).tolist() == [[4, 5]]
    (page,) = np.asarray(kvpool.translate(pool, 0, [4]))
    assert np.array_equal(np.asarray(pool.pages)[:, page], newest)


def test_a_handout_takes_the_hole_before_it_reaches_further(holed):
    pool, vpages, _ = kvpool.handout(holed, 0, [1], 1)
    assert kvpool.translate(pool, 0, vpages).tolist() == [[1]]
    pool, vpages, ok = kvpool.handout(pool, 0, [2], 2)
    assert not bool(ok)
    assert (np.asarray(vpages) == pool.groups[0].null_vpage).all()
    assert kvpool.check(pool) == ()


# Translation: a table of virtual pages is read the same before and after.


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_window_over_a_page_boundary_reads_the_same_after_pages_moved(
    page_size, token_major, shake
):
    num_pages, entry = 12, token_major.entries[-1]
    pool = kvpool.init(num_pages, token_major.nbytes, num_vpages=(9,), poison=True)
    pool, vpages, _ = kvpool.handout(pool, 0, [6], 6)
    pool, _ = kvpool.release(pool, 0, [4, 0])
    table = kvpool.BlockTable(vpages[None, :, 1:4], jnp.array([3 * page_size]))
    positions = jnp.arange(page_size - 1, 3 * page_size, dtype=jnp.int32)[None]
    rows = shake(positions.size, entry.nbytes)
    still = np.zeros((4, token_major.nbytes), np.uint8)

    def where(pool):
        vpages, slots = kvpool.table.locate(table, 0, positions, page_size)
        return kvpool.translate(pool, 0, vpages).ravel(), slots.ravel()

    @jax.jit
    def write(pool):
        places = where(pool)
        return tokens.write(pool.pages[0], entry, *places, rows, page_size=page_size)

    @jax.jit
    def read(pool):
        return tokens.read(pool.pages[0], entry, *where(pool), page_size=page_size)

    pool = dataclasses.replace(pool, pages=write(pool)[None])
    pool, moved = kvpool.compact(pool)
    assert int(moved) > 0
    assert np.array_equal(np.asarray(read(pool)), rows)
    columns, slots = divmod(np.asarray(positions)[0], page_size)
    plain = tokens.write(
        jnp.array(still), entry, np.int32(columns), slots, rows, page_size=page_size
    )
    mine = pool.pages[0][kvpool.translate(pool, 0, vpages[0, 1:4])]
    assert np.array_equal(np.asarray(mine), np.asarray(plain)[:3])
