"""Whole pages: gathered, scattered, cleared and moved, by kernel, reference and host.

The pool of each case has poison behind `num_pages`: a kernel without its guard would
read or write it, and a twin without the guard does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    gather_pages,
    interpret,
    lists,
    move_pages,
    ring,
    scatter_pages,
    zero_pages,
)

NUM_PAGES = 6
HOSTILE = np.array([3, -1, 5, 2, 3, 100, 0, NUM_PAGES, -(2**31), 2**31 - 1], np.int32)
NONE = np.array([], np.int32)
LONG = pytest.mark.long  # `make test-kernels` runs these too, on both jax
TUNINGS = (
    pytest.param({"blocks": 3, "stages": 2}, id="ring of 2"),
    pytest.param({"blocks": 1, "stages": 4}, id="ring of 4", marks=LONG),
)


def pool_of(prove, width: int = 256) -> np.ndarray:
    pages = prove.bytes(NUM_PAGES + 2, width)
    pages[NUM_PAGES:] = 0xC1
    return pages


@pytest.mark.parametrize("tuning", TUNINGS)
def test_pages_of_nobody_are_gathered_as_zeros(prove, tuning):
    pages = pool_of(prove)
    rows = prove.equal(
        gather_pages, (pages, HOSTILE), tuning=tuning, num_pages=NUM_PAGES
    )
    for row, page in zip(rows, HOSTILE, strict=True):
        own = pages[page] if 0 <= page < NUM_PAGES else np.zeros(256, np.uint8)
        np.testing.assert_array_equal(row, own)


@pytest.mark.parametrize("tuning", TUNINGS)
def test_rows_of_nobody_are_dropped_and_the_last_of_equals_wins(prove, tuning):
    pages, rows = pool_of(prove), prove.bytes(HOSTILE.size, 256)
    found = prove.equal(
        scatter_pages, (pages, HOSTILE, rows), tuning=tuning, num_pages=NUM_PAGES
    )
    expected = pages.copy()
    for page, row in zip(HOSTILE, rows, strict=True):
        if 0 <= page < NUM_PAGES:
            expected[page] = row
    np.testing.assert_array_equal(found, expected)


def test_exactly_the_pages_of_the_list_are_cleared(prove):
    pages = pool_of(prove)
    found = prove.equal(
        zero_pages, (pages, HOSTILE), tuning={"blocks": 3}, num_pages=NUM_PAGES
    )
    cleared = [page for page in range(len(pages)) if not found[page].any()]
    assert cleared == [0, 2, 3, 5]
    np.testing.assert_array_equal(found[[1, 4, 6, 7]], pages[[1, 4, 6, 7]])


SWAPS = ([0, 1, 2, 3, 9, -1, 4, 5], [1, 2, 0, 3, 4, 5, 7, 4])


@pytest.mark.case("ALC-11")
@pytest.mark.case("IDX-07")
@pytest.mark.parametrize("variant", ["slabs", "staged"])
def test_cycles_chains_and_copies_are_moved_as_if_at_once(prove, variant):
    pages = pool_of(prove)
    sources, destinations = (np.array(ids, np.int32) for ids in SWAPS)
    tuning = {"variant": variant, "blocks": 2, "stages": 2}
    found = prove.equal(
        move_pages,
        (pages, sources, destinations),
        tuning=tuning,
        num_pages=NUM_PAGES,
    )
    expected = pages.copy()
    for source, destination in zip(*SWAPS, strict=True):
        if 0 <= source < NUM_PAGES and 0 <= destination < NUM_PAGES:
            expected[destination] = pages[source]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.case("ALC-11")
def test_of_two_pages_for_one_destination_the_last_wins_and_the_host_refuses(prove):
    pages, sources = pool_of(prove), np.array([0, 1, 2], np.int32)
    destinations = np.array([5, 5, 4], np.int32)
    arrays = pages, sources, destinations
    found = interpret.run(move_pages.kernel, *arrays, num_pages=NUM_PAGES)
    expected = jax.jit(move_pages.reference)(*arrays)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    np.testing.assert_array_equal(np.asarray(found)[[5, 4]], pages[[1, 2]])
    with pytest.raises(ValueError, match="page 5 as the destination of two pages"):
        move_pages.host(*arrays)


def test_random_lists_of_pages_of_an_odd_width(prove, odd_width):
    pages = pool_of(prove, odd_width)
    ids = prove.rng.integers(-3, NUM_PAGES + 3, 7).astype(np.int32)
    rows = prove.bytes(7, odd_width)
    prove.equal(gather_pages, (pages, ids), num_pages=NUM_PAGES)
    prove.equal(scatter_pages, (pages, ids, rows), num_pages=NUM_PAGES)
    others = prove.rng.permutation(NUM_PAGES + 1).astype(np.int32)
    prove.equal(move_pages, (pages, ids, others), num_pages=NUM_PAGES)


def test_one_page_of_many_copies_is_shared_by_blocks(prove):
    pages = prove.bytes(1, 65536 * 3)
    one = np.zeros(1, np.int32)
    prove.equal(gather_pages, (pages, one), tuning={"blocks": 4})
    prove.equal(scatter_pages, (pages, one, prove.bytes(1, 65536 * 3)))


def test_a_list_of_all_pages_is_the_pool(prove):
    pages = prove.bytes(8, 48)
    found = prove.equal(gather_pages, (pages, np.arange(8, dtype=np.int32)))
    np.testing.assert_array_equal(found, pages)


def test_an_empty_list_does_nothing(prove):
    pages = prove.bytes(2, 48)
    none = np.zeros((0, 48), np.uint8)
    assert prove.equal(gather_pages, (pages, NONE)).shape == (0, 48)
    for op, more in ((scatter_pages, (NONE, none)), (zero_pages, (NONE,))):
        np.testing.assert_array_equal(prove.equal(op, (pages, *more)), pages)
    np.testing.assert_array_equal(prove.equal(move_pages, (pages, NONE, NONE)), pages)


def test_ranks_under_vmap_are_pools_of_their_own(prove):
    pages = np.stack([pool_of(prove, 64) for _ in range(2)])
    ids = np.array([5, 0, -1], np.int32)
    rows = prove.bytes(2, 3, 64)

    def batched(op, axes):
        def run(*arrays, **facts):
            one = jax.vmap(lambda *a: op(*a, **facts), in_axes=axes)
            return one(*arrays)

        return run

    class Ranks:
        supports = staticmethod(lambda *arrays, **facts: None)
        kernel = staticmethod(batched(scatter_pages.kernel, (0, None, 0)))
        reference = staticmethod(batched(scatter_pages.reference, (0, None, 0)))

        @staticmethod
        def host(pages, ids, rows):
            each = zip(pages, rows, strict=True)
            return np.stack([scatter_pages.host(p, ids, r) for p, r in each])

    prove.equal(Ranks, (pages, ids, rows))


def test_a_gather_without_its_guard_is_caught(prove, monkeypatch):
    ids = np.array([7, 0, -1], np.int32)
    arrays = pool_of(prove), ids
    facts = {"num_pages": NUM_PAGES}
    assert prove.unguarded_differs(gather_pages, monkeypatch, *arrays, **facts)


@pytest.mark.parametrize("op", [scatter_pages, zero_pages, move_pages])
def test_a_write_without_its_guard_is_caught(prove, op, monkeypatch):
    pages, ids = pool_of(prove), np.array([7, 0], np.int32)
    more = {
        scatter_pages: (ids, prove.bytes(2, 256)),
        zero_pages: (ids,),
        move_pages: (np.array([1, 2], np.int32), ids),
    }
    arrays = pages, *more[op]
    facts = {"num_pages": NUM_PAGES}
    assert prove.unguarded_differs(op, monkeypatch, *arrays, **facts)


def test_a_list_that_was_not_settled_is_a_race(prove, monkeypatch, race):
    monkeypatch.setattr(lists, "settle", lambda ids, num_pages: ids)
    pages, ids = pool_of(prove), np.array([2, 2], np.int32)
    with pytest.raises(race):
        interpret.run(scatter_pages.kernel, pages, ids, prove.bytes(2, 256), blocks=2)


def test_a_dropped_row_frees_no_slot_that_is_still_read(prove, monkeypatch, race):
    pages, rows = pool_of(prove), prove.bytes(6, 256)
    ids = np.array([0, 1, -1, 2, 3, 4], np.int32)
    tuning = {"blocks": 1, "stages": 4}
    prove.equal(scatter_pages, (pages, ids, rows), tuning=tuning)
    monkeypatch.setattr(ring, "drain", lambda: None)
    with pytest.raises(race):
        interpret.run(scatter_pages.kernel, pages, ids, rows, **tuning)


def test_a_slot_that_is_loaded_before_it_was_stored_is_a_race(prove, monkeypatch, race):
    monkeypatch.setattr(ring.plgpu, "wait_smem_to_gmem", lambda *a, **k: None)
    ids = np.arange(6, dtype=np.int32)
    with pytest.raises(race):
        interpret.run(gather_pages.kernel, pool_of(prove), ids, blocks=1, stages=2)


@pytest.mark.parametrize(
    ("num_pages", "page_nbytes"),
    [(131_072, 65_536), (7_000, 4_497_408), (60_000, 515_328), (30_000, 589_824)],
    ids=["llama", "latent", "indexer", "gpt-oss"],
)
def test_kernels_lower_for_cuda_at_the_sizes_of_models(prove, num_pages, page_nbytes):
    pages = prove.shape("uint8", num_pages, page_nbytes)
    ids, rows = prove.shape("int32", 64), prove.shape("uint8", 64, page_nbytes)
    assert "mosaic_gpu" in prove.lowers(gather_pages, (pages, ids))
    assert "mosaic_gpu" in prove.lowers(scatter_pages, (pages, ids, rows))
    assert "mosaic_gpu" in prove.lowers(zero_pages, (pages, ids))
    assert "mosaic_gpu" in prove.lowers(move_pages, (pages, ids, ids))


def test_many_pairs_lower_by_way_of_a_buffer(prove):
    pages, ids = prove.shape("uint8", 8192, 65_536), prove.shape("int32", 4096)
    text = prove.lowers(move_pages, (pages, ids, ids))
    assert text.count("mosaic_gpu_v2") >= 2


@pytest.mark.parametrize(
    ("page_nbytes", "words"),
    [(1_284, "page of 1,284 B"), (16 * 65_537, "largest part that divides them")],
)
def test_a_width_that_no_copy_serves_is_refused_with_numbers(prove, page_nbytes, words):
    pages, ids = prove.shape("uint8", 8, page_nbytes), prove.shape("int32", 4)
    assert words in gather_pages.supports(pages, ids)
    assert words in move_pages.supports(pages, ids, ids)


def test_a_list_too_long_for_shared_memory_is_refused_with_both_numbers(prove):
    pages, ids = prove.shape("uint8", 8, 48), prove.shape("int32", 10**7)
    refusal = zero_pages.supports(pages, ids)
    assert "a block has 232,448 B" in refusal


def test_ids_are_settled_as_a_loop_would(prove):
    ids = prove.rng.integers(-2, 9, 40).astype(np.int32)
    slots = prove.rng.integers(0, 3, 40).astype(np.int32)
    last = {int(page): at for at, page in enumerate(ids) if 0 <= page < 7}
    expected = [p if last.get(int(p)) == at else -1 for at, p in enumerate(ids)]
    assert lists.settle(jnp.asarray(ids), 7).tolist() == expected
    pairs = list(zip(ids.tolist(), slots.tolist(), strict=True))
    last = {pair: at for at, pair in enumerate(pairs) if 0 <= pair[0] < 7}
    named = lists.last_of(7, jnp.asarray(ids), jnp.asarray(slots))
    assert named.tolist() == [last.get(pair) == at for at, pair in enumerate(pairs)]
