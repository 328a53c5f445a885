"""Zero at handout, poison everywhere else: what nobody wrote reads as NaN.

Page 0 is an ordinary page here; where other stacks keep a reserved page clean, rows
that name no page are dropped.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kvmem import pool as kvpool
from kvmem.geometry import (
    LayerSpec,
    Topology,
    envelope,
    group_layers,
    kinds,
    np_dtype,
)
from kvmem.pool import tokens, verbs
from pallas_kernels import move_pages

FP8 = "float8_e4m3fn"


def latents():
    """Latent attention and Mamba states: 96 B a token, states in float32."""
    layers = [kinds.latent(f"a{i}", i, rank=16, rope_dim=8, scale=1.0) for i in (0, 1)]
    states = [
        kinds.mamba2(f"s{i}", i, heads=2, head_dim=4, groups=1, state=4, conv_kernel=4)
        for i in (2, 3)
    ]
    return group_layers([*layers, *states], 16)


def heads():
    """Two layers of two heads of eight bf16: 128 B a token."""
    layers = [LayerSpec(f"a{i}", i, "gqa", 2, 8, None, "bfloat16") for i in (0, 1)]
    return group_layers(layers, 8)


def three():
    """Full attention, a window, and recurrent states in one pool."""
    full = LayerSpec("a0", 0, "gqa", 2, 8, None, "bfloat16")
    window = LayerSpec("a1", 1, "gqa", 2, 8, None, "bfloat16", window=8)
    state = kinds.kda("s2", 2, heads=2, head_dim=8, conv_kernel=4)
    return group_layers([full, window, state], 4)


def scaled():
    """Latents and index keys in fp8, with their scales at the tail of a block."""
    layers = [
        kinds.latent("a0", 0, rank=128, rope_dim=64, scale=1.0, fp8=True),
        kinds.indexer("i0", 0, dim=128),
    ]
    return group_layers(layers, 4)


GEOMETRIES = {"latents": latents, "heads": heads, "three": three, "scaled": scaled}


ONE = pytest.mark.parametrize("unified", ["latents"], indirect=True)


@pytest.fixture(params=GEOMETRIES)
def unified(request):
    """Return a poisoned pool of every group of a geometry, and their envelopes."""
    groups = GEOMETRIES[request.param]()
    built = [envelope.build(group, Topology(), 0) for group in groups]
    paged = zip(groups, built, strict=True)
    page_nbytes = max(b.nbytes for group, b in paged if not group.is_state)
    cut = [envelope.cut(b, page_nbytes) for b in built]
    sizes = {
        "num_vpages": tuple(9 for _ in cut),
        "extents": tuple(b.extents for b in cut),
    }
    return kvpool.init(40, page_nbytes, 2, poison=True, **sizes), cut


def every_row(pool, built, parts):
    """Yield (dtype, bytes) of every entry, slot and rank of pages i32[N, K]."""
    for pages in pool.pages:
        for entry in built.entries:
            for slot in range(built.page_size):
                slots = np.full(len(parts), slot, np.int32)
                rows = tokens.read(
                    pages, entry, parts, slots, page_size=built.page_size
                )
                yield np_dtype(entry.field.dtype), np.asarray(rows)


def reads_zero(pool, built, parts):
    return all(not rows.any() for _, rows in every_row(pool, built, parts))


def reads_nan(pool, built, parts):
    return all(
        np.isnan(rows.view(dtype).astype(np.float32)).all()
        for dtype, rows in every_row(pool, built, parts)
    )


def free_parts(pool, built):
    """Return pages that nobody holds, i32[N, K], as if they were handed out."""
    free = np.asarray(pool.free)[: int(pool.num_free)]
    count = min(len(free) // built.extents, 3)
    return free[: count * built.extents].reshape(count, built.extents)


def handed_pages_read_zero_and_all_others_nan(pool, cut, handout):
    for group, built in enumerate(cut):
        for _ in range(2):  # fresh, then recycled
            pool, vpages, ok = handout(pool, group, np.int32([2, 1]), 2)
            assert bool(ok)
            held = np.asarray(vpages).ravel()
            held = held[held < pool.groups[group].num_vpages]
            parts = np.asarray(kvpool.translate_parts(pool, group, held))
            pages = np.asarray(pool.pages)
            assert not pages[:, parts.ravel()].any()
            assert (np.delete(pages, parts.ravel(), axis=1) == kvpool.POISON).all()
            assert reads_zero(pool, built, parts)
            assert all(reads_nan(pool, b, free_parts(pool, b)) for b in cut)
            filled = pool.pages.at[:, parts.ravel()].set(jnp.uint8(0x3C))
            pool = dataclasses.replace(pool, pages=filled)
            pool, _ = kvpool.release(pool, group, held)
            assert (np.asarray(pool.pages) == kvpool.POISON).all()
            assert all(reads_nan(pool, b, free_parts(pool, b)) for b in cut)


def test_a_page_reads_zero_when_it_is_handed_out_and_nan_until_then(unified):
    handed_pages_read_zero_and_all_others_nan(*unified, kvpool.handout)


@ONE
def test_the_look_at_handed_pages_sees_one_that_was_not_zeroed(unified):
    with pytest.raises(AssertionError):
        handed_pages_read_zero_and_all_others_nan(*unified, verbs._handout_books)


@ONE
def test_the_look_at_other_pages_sees_what_a_release_left(unified):
    pool, cut = unified
    plain = dataclasses.replace(pool, is_poisoned=False)
    with pytest.raises(AssertionError):
        handed_pages_read_zero_and_all_others_nan(plain, cut, kvpool.handout)


def test_what_a_compaction_leaves_reads_nan(unified):
    pool, cut = unified
    group = len(cut) - 1
    pool, vpages, _ = kvpool.handout(pool, group, [1, 1], 2)  # shapes as above
    (first, null), (second, _) = np.asarray(vpages)
    pool, _ = kvpool.release(pool, group, np.stack([first, null, null]))
    pool, moved = kvpool.compact(pool)
    assert int(moved) == cut[-1].extents
    assert all(reads_nan(pool, built, free_parts(pool, built)) for built in cut)
    parts = kvpool.translate_parts(pool, group, np.stack([second] * 3))
    assert reads_zero(pool, cut[-1], np.asarray(parts))


def test_the_look_at_other_pages_sees_one_that_is_not_poison():
    built = envelope.build(heads()[0], Topology(), 0)
    pool = kvpool.init(4, built.nbytes, poison=True)
    assert reads_nan(pool, built, free_parts(pool, built))
    for byte in (0, built.nbytes - 1):
        pages = pool.pages.at[0, 3, byte].set(jnp.uint8(0))
        pages = pages.at[0, 3, byte ^ 1].set(jnp.uint8(0))
        found = dataclasses.replace(pool, pages=pages)
        assert not reads_nan(found, built, free_parts(found, built))


def test_a_page_is_zero_before_the_same_program_reads_it(unified):
    pool, cut = unified
    group, built = len(cut) - 1, cut[-1]
    entry = built.entries[-1]

    @jax.jit
    def step(pool):
        pool, vpages, _ = kvpool.handout(pool, group, np.int32([1]), 1)
        parts = kvpool.translate_parts(pool, group, vpages[0])
        read = tokens.read(pool.pages[0], entry, parts, np.zeros(1, np.int32))
        pages = tokens.write(
            pool.pages[0], entry, parts, np.zeros(1, np.int32), read + jnp.uint8(1)
        )
        return tokens.read(pages, entry, parts, np.zeros(1, np.int32))

    assert (np.asarray(step(pool)) == 1).all()


# A page changes hands: the bytes of one dtype under the reader of another.


def give_a_bf16_page_to_fp8(handout):
    """Return the eight fp8 rows and scales of a page that bf16 used before."""
    plain = LayerSpec("a0", 0, "gqa", 1, 66, None, "bfloat16")
    (first,) = group_layers([plain], 8)
    index = group_layers(
        [
            kinds.latent("a1", 1, rank=16, rope_dim=8, scale=1.0),
            kinds.indexer("i1", 1, dim=128),
        ],
        8,
    )[1]
    old = envelope.build(first, Topology(), 0)
    new = envelope.cut(envelope.build(index, Topology(), 0), old.nbytes)
    pool = kvpool.init(2, old.nbytes, num_vpages=(2, 2))
    pool, vpages, _ = kvpool.handout(pool, 0, [1], 1)
    filled = np.full((1, 2, old.nbytes // 2), 1.9921875).astype(np_dtype("bfloat16"))
    pages = jnp.array(filled.view(np.uint8).reshape(pool.pages.shape))
    pool, _ = kvpool.release(dataclasses.replace(pool, pages=pages), 0, vpages)
    pool, vpages, _ = handout(pool, 1, np.int32([1]), 1)
    page = np.asarray(kvpool.translate(pool, 1, vpages)).repeat(8)
    values, scales = new.entries
    slots = np.arange(8, dtype=np.int32)
    pages = tokens.write(
        pool.pages[0],
        values,
        page[:3],
        slots[:3],
        np.full((3, values.nbytes), 0x38, np.uint8),
        page_size=8,
    )
    one = np.ones((3, 1), np.float32).view(np.uint8)
    pages = tokens.write(pages, scales, page[:3], slots[:3], one, page_size=8)
    read = [
        np.asarray(tokens.read(pages, entry, page, slots, page_size=8))
        for entry in new.entries
    ]
    return read[0].view(np_dtype(FP8)).astype(np.float32), read[1].view(np.float32)


@pytest.mark.case("NAN-01")
def test_a_page_of_finite_bf16_reads_zero_where_fp8_has_not_written():
    rows, scales = give_a_bf16_page_to_fp8(kvpool.handout)
    assert (rows[:3] == 1).all()
    assert (scales[:3] == 1).all()
    assert not rows[3:].any()
    assert np.isfinite(scales).all()
    assert not scales[3:].any()


@pytest.mark.case("NAN-01")
def test_without_the_zeroing_that_page_would_read_nan():
    rows, _ = give_a_bf16_page_to_fp8(verbs._handout_books)
    assert np.isnan(rows[3:, ::2]).all()
    assert (rows[3:, 1::2] == 1.875).all()


# A batch padded with a row of NaN.


def a_padded_batch(shake):
    """Return pages, an entry, 3 pages and a null, and 4 rows, the last one NaN.

    Page 0 is zero, and the last pages hold what is no NaN: a row that lands shows.
    """
    built = envelope.build(heads()[0], Topology(), 0)
    pool = kvpool.init(6, built.nbytes, 1, poison=True)
    pool, vpages, _ = kvpool.handout(pool, 0, [1, 1, 1, 1], 1)
    ids = np.asarray(kvpool.translate(pool, 0, vpages)).ravel()
    assert 0 in ids
    others = pool.pages.at[0, 4:].set(shake(2, built.nbytes) & 0x3F)
    pool = dataclasses.replace(pool, pages=others)
    rows = shake(4, built.entries[0].nbytes) & 0x3F  # finite in every dtype
    rows[3] = 0xFF
    return pool, built, np.int32([*ids[1:], pool.null_page]), rows


def append(pages, built, ids, rows):
    slots = np.zeros(4, np.int32)
    return tokens.write(pages, built.entries[0], ids, slots, rows, page_size=8)


def move(pages, built, ids, rows):
    # There and back: the second and third page swap, the pairs with null do nothing.
    copy = jax.jit(move_pages.reference)
    swapped = copy(append(pages, built, ids, rows), ids, ids[::-1])
    return copy(swapped, ids[::-1], ids)


def restore(pages, built, ids, rows):
    # A whole page at a time, as when a page comes back from a host.
    images = np.zeros((4, built.nbytes), np.uint8)
    images[:, : rows.shape[1]] = rows
    images[3] = 0xFF
    return tokens.write_rows(pages, ids, np.zeros(4, np.int32), images)


@pytest.mark.case("NAN-02")
@pytest.mark.parametrize("writer", [append, move, restore])
def test_a_padding_row_of_nan_reaches_no_page(writer, shake):
    pool, built, ids, rows = a_padded_batch(shake)
    before = np.asarray(pool.pages)[0].copy()
    pages = writer(jnp.array(before), built, ids, rows)
    untouched = [0, 4, 5]
    after = np.asarray(pages)
    assert np.array_equal(after[untouched], before[untouched])
    assert not after[0].any()
    read = tokens.read(pages, built.entries[0], ids, np.zeros(4, np.int32))
    values = np.asarray(read).view(np_dtype("bfloat16")).astype(np.float32)
    assert np.isfinite(values).all()
    assert not values[3].any()
    assert np.array_equal(np.asarray(read)[:3], rows[:3])


@pytest.mark.case("NAN-02")
def test_a_fork_of_nothing_reaches_no_page(shake):
    pool, _, _, _ = a_padded_batch(shake)
    before = np.asarray(pool.pages).copy()
    null = pool.groups[0].null_vpage
    pool, child, ok = kvpool.fork(pool, 0, [null, null], 1)
    assert not bool(ok)
    assert np.asarray(child).tolist() == [null, null]
    assert np.array_equal(np.asarray(pool.pages), before)


# jax_debug_nans looks at floating-point results; the pool is bytes.


@pytest.mark.case("NAN-07")
def test_under_debug_nans_only_a_bad_read_raises(shake):
    built = envelope.build(heads()[0], Topology(), 0)
    entry, slots = built.entries[0], np.zeros(1, np.int32)

    @jax.jit
    def decode(rows):
        return lax.bitcast_convert_type(rows.reshape(-1, 2), jnp.bfloat16)

    with jax.debug_nans(True):
        pool = kvpool.init(4, built.nbytes, poison=True)
        pool, vpages, _ = kvpool.handout(pool, 0, [1], 1)
        page = np.asarray(kvpool.translate(pool, 0, vpages))[0]
        rows = shake(1, entry.nbytes) & 0x3F
        pages = tokens.write(pool.pages[0], entry, page, slots, rows)
        decode(tokens.read(pages, entry, page, slots))
        decode(tokens.read(pages, entry, page, slots + 1))  # handed out: zeros
        decode(tokens.read(pages, entry, np.int32([4]), slots))  # null: zeros
        bad = tokens.read(pages, entry, page + 1, slots)
        with pytest.raises(FloatingPointError, match="nan"):
            decode(bad).block_until_ready()
