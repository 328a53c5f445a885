"""Drafts over pages: virtual ids stay, physical pages move, seams are freed once."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as kvpool
from kvmem.geometry import LayerSpec, Topology, envelope, group_layers
from kvmem.pool import tokens
from kvmem.speculative import SpecPlan, draft_pool

SIZE = 4
PAGES = 12


@pytest.fixture
def group():
    layer = LayerSpec("l", 0, kv_heads=1, head_dim=8, dtype="bfloat16")
    (found,) = group_layers([layer], SIZE)
    return found


@pytest.fixture
def rows():
    """Return aperiodic rows of 16 bytes, one a position."""
    return np.random.default_rng(7).integers(1, 255, (64, 16), dtype=np.uint8)


def churned(group):
    """Return a pool whose pages of virtual ids 0 to 2 are no run, and 6 ids freed."""
    (entry, *_) = envelope.build(group, Topology(), 0, "head_major").entries
    nbytes = envelope.build(group, Topology(), 0, "head_major").nbytes
    pool = kvpool.init(PAGES, nbytes, 1, num_vpages=(PAGES, PAGES), poison=True)
    for of, count in ((1, 2), (0, 1), (1, 3), (0, 1), (1, 1), (0, 1)):
        pool, _, _ = kvpool.handout(pool, of, [count], count)
    return pool, entry


def at(positions):
    return np.asarray(positions) // SIZE, np.asarray(positions) % SIZE


def written(pool, entry, positions, values):
    """Write positions of the sequence through v2p, as a verification does."""
    vpages, slots = at(positions)
    pages = kvpool.translate(pool, 0, vpages)
    rank = tokens.write(
        pool.pages[0], entry, pages, slots, jnp.asarray(values), page_size=SIZE
    )
    return kvpool.Pool(rank[None], pool.p2v, pool.free, pool.num_free, pool.groups)


def seen(pool, entry, positions):
    vpages, slots = at(positions)
    pages = kvpool.translate(pool, 0, vpages)
    return np.asarray(tokens.read(pool.pages[0], entry, pages, slots, page_size=SIZE))


def test_a_verification_across_a_page_is_that_of_pages_that_never_move(group, rows):
    """Target rows go through v2p, the draft's by raw virtual ids; between drafting and
    verifying the pool is compacted, and nothing is seen of it."""
    pool, entry = churned(group)
    still = jnp.zeros((PAGES, pool.pages.shape[-1]), jnp.uint8)
    draft = np.zeros((PAGES * SIZE, 16), np.uint8)
    context, window = np.arange(2), np.arange(2, 9)  # 7 rows over three pages
    for positions in (context, window):
        pool = written(pool, entry, positions, rows[positions])
        vpages, slots = at(positions)
        still = tokens.write(
            still, entry, vpages, slots, jnp.asarray(rows[positions]), page_size=SIZE
        )
        draft[vpages * SIZE + slots] = rows[32 + positions]
        before = np.asarray(kvpool.translate(pool, 0, np.arange(3)))
        freed = {0: [0, 1], 2: [3]}[int(positions[0])]
        pool, _ = kvpool.release(pool, 1, freed)
        pool, _ = kvpool.compact(pool)
        after = np.asarray(kvpool.translate(pool, 0, np.arange(3)))
        assert (before != after).any()  # while a draft lies between its two halves
        assert (after != np.arange(3)).any()  # and the pages are no identity
    everything = np.arange(9)
    vpages, slots = at(everything)
    kept = tokens.read(still, entry, vpages, slots, page_size=SIZE)
    np.testing.assert_array_equal(seen(pool, entry, everything), np.asarray(kept))
    np.testing.assert_array_equal(seen(pool, entry, everything), rows[:9])
    np.testing.assert_array_equal(draft[vpages * SIZE + slots], rows[32:41])
    assert kvpool.check(pool, holders=[[[0, 1, 2]], [[2, 4, 5]]]) == ()


def test_a_draft_has_rows_up_to_the_highest_virtual_id_and_none_behind(group):
    pool, _ = churned(group)
    num_vpages = pool.groups[0].num_vpages
    drafts = group_layers(group.layers, SIZE, domain="draft")
    for dcp in (1, 4):
        plan, topology = SpecPlan("dspark", dcp=dcp), Topology(dcp=dcp)
        size = draft_pool(plan, drafts, num_vpages, topology)
        rows = np.zeros((size.pages * SIZE, 16), np.uint8)
        highest = num_vpages * SIZE * dcp - 1
        rows[highest] = 1
        with pytest.raises(IndexError):
            rows[highest + 1] = 1


def test_ids_that_mean_nothing_are_null_for_target_and_draft_alike(group, rows):
    pool, entry = churned(group)
    odd = np.asarray([-1, 5, PAGES, PAGES + 7, 2**31 - 1])  # 5 is nobody's
    pages = np.asarray(kvpool.translate(pool, 0, odd))
    assert (pages == PAGES).all()
    written_to = tokens.write(
        pool.pages[0],
        entry,
        pages,
        np.zeros(5, np.int32),
        jnp.asarray(rows[:5]),
        page_size=SIZE,
    )
    fresh, _ = churned(group)
    np.testing.assert_array_equal(np.asarray(written_to), np.asarray(fresh.pages[0]))
    with pytest.raises(errors.InvalidId, match="integer"):
        kvpool.translate(pool, 0, np.asarray([0.5]))


@pytest.mark.parametrize(("page_size", "dcp"), [(64, 8), (64, 1), (16, 4)])
@pytest.mark.parametrize("accepted", [64, 65, 0])
def test_the_page_on_a_seam_is_freed_once(page_size, dcp, accepted):
    """SGLang #38941: what was accepted and what was rejected are freed apart, and the
    page that holds both, page 1 of 512 tokens, belongs to one of the two.

    576 tokens stand at a seam inside it.
    """
    wide = page_size * dcp
    committed, drafted = wide + accepted, wide + accepted + 2 * wide
    pool = kvpool.init(8, 16, 1, num_vpages=(8,))
    whole = -(-drafted // wide)
    pool, vpages, _ = kvpool.handout(pool, 0, [whole], whole)
    held = np.asarray(vpages)[0]
    kept = -(-committed // wide)
    pool, rejected = kvpool.release(pool, 0, held[kept:])  # behind what was accepted
    assert not np.asarray(rejected).any()
    pool, rejected = kvpool.release(pool, 0, held[:kept])  # the text ends
    assert not np.asarray(rejected).any()
    assert int(pool.num_free) == 8
    assert kvpool.check(pool, holders=[[]]) == ()


def test_a_seam_that_is_freed_from_both_sides_would_be_seen():
    wide, committed, drafted = 512, 576, 1_536
    pool = kvpool.init(4, 16, 1, num_vpages=(4,))
    pool, vpages, _ = kvpool.handout(pool, 0, [3], 3)
    held = np.asarray(vpages)[0]
    behind = held[committed // wide : -(-drafted // wide)]  # [576, 1,536) by its ends
    front = held[: -(-committed // wide)]  # [0, 576)
    assert set(behind) & set(front) == {held[1]}
    both = np.concatenate([behind, front])
    pool, rejected = kvpool.release(pool, 0, both)
    assert np.asarray(rejected).tolist() == [True, False, False, True]
