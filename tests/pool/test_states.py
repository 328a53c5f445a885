"""Recurrent states in the pool: written by their parts, kept as snapshots, restored."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import errors
from kvmem import pool as kvpool
from kvmem.geometry import (
    Entry,
    Field,
    Plane,
    Topology,
    envelope,
    group_layers,
    kinds,
)
from kvmem.pool import tokens

NUM_PAGES, STATES = 14, 4


def recurrent(kind):
    """Return two small recurrent layers of a kind, behind two of latent attention."""
    latents = [kinds.latent(f"a{i}", i, rank=16, rope_dim=8, scale=1.0) for i in (0, 1)]
    make = {
        "mamba2": lambda name, i: kinds.mamba2(
            name, i, heads=2, head_dim=4, groups=1, state=4, conv_kernel=4
        ),
        "gated_delta": lambda name, i: kinds.gated_delta(
            name, i, key_heads=2, value_heads=4, key_dim=4, value_dim=4, conv_kernel=4
        ),
        "kda": lambda name, i: kinds.kda(name, i, heads=2, head_dim=8, conv_kernel=4),
    }[kind]
    return [*latents, make("s2", 2), make("s3", 3)]


@pytest.fixture(params=["mamba2", "gated_delta", "kda"])
def hybrid(request):
    """Return a poisoned pool of latents and states, and the envelope of a state."""
    full, state = group_layers(recurrent(request.param), 4)
    page_nbytes = envelope.build(full, Topology(), 0).nbytes
    cut = envelope.cut(envelope.build(state, Topology(), 0), page_nbytes)
    assert cut.extents > 1
    pool = kvpool.init(
        NUM_PAGES * cut.extents,
        page_nbytes,
        num_vpages=(NUM_PAGES, STATES),
        extents=(1, cut.extents),
        poison=True,
    )
    return pool, cut


def write_state(pool, vpages, values):
    """Write every entry of N states; values are {entry: u8[N, nbytes]}."""
    parts = kvpool.translate_parts(pool, 1, vpages)
    pages, slots = pool.pages[0], np.zeros(len(vpages), np.int32)
    for entry, rows in values.items():
        pages = tokens.write(pages, entry, parts, slots, rows, page_size=1)
    return dataclasses.replace(pool, pages=pages[None])


def read_state(pool, built, vpages):
    """Return what `write_state` wrote."""
    parts = kvpool.translate_parts(pool, 1, vpages)
    slots = np.zeros(len(vpages), np.int32)
    return {
        entry: np.asarray(tokens.read(pool.pages[0], entry, parts, slots, page_size=1))
        for entry in built.entries
    }


def shaken(built, shake, count):
    return {entry: shake(count, entry.nbytes) for entry in built.entries}


def same(left, right):
    return all(np.array_equal(left[entry], right[entry]) for entry in left)


def test_every_entry_lands_in_the_page_of_its_extent_and_nowhere_else(hybrid, shake):
    pool, built = hybrid
    pool, _, _ = kvpool.handout(pool, 0, [1], 1)
    pool, vpages, _ = kvpool.handout(pool, 1, [1, 1], 1)
    values = shaken(built, shake, 2)
    expected = np.asarray(pool.pages)[0].copy()
    parts = np.asarray(kvpool.translate_parts(pool, 1, vpages.ravel()))
    for entry, rows in values.items():
        end = entry.offset + entry.nbytes
        expected[parts[:, entry.extent], entry.offset : end] = rows
    pool = write_state(pool, vpages.ravel(), values)
    assert np.array_equal(np.asarray(pool.pages)[0], expected)
    assert same(read_state(pool, built, vpages.ravel()), values)


def test_a_state_without_a_page_is_not_written_and_reads_as_zeros(hybrid, shake):
    pool, built = hybrid
    pool, vpages, _ = kvpool.handout(pool, 1, [1], 1)
    before = np.asarray(pool.pages).copy()
    null = np.int32([STATES, -1])
    pool = write_state(pool, null, shaken(built, shake, 2))
    assert np.array_equal(np.asarray(pool.pages), before)
    assert not any(rows.any() for rows in read_state(pool, built, null).values())


def test_a_snapshot_stays_as_it_was_while_the_live_state_goes_on(hybrid, shake):
    pool, built = hybrid
    pool, live, _ = kvpool.handout(pool, 1, [1], 1)
    live = live[0]
    after = [shaken(built, shake, 1) for _ in range(6)]  # after n + 1 tokens
    snapshots = {}
    for count, values in enumerate(after, start=1):
        pool = write_state(pool, live, values)
        if count % 4 == 0:  # exactly at a page boundary, before the next token
            pool, snapshots[count], ok = kvpool.fork(pool, 1, live, 0)
            assert bool(ok)
    assert same(read_state(pool, built, live), after[5])
    assert same(read_state(pool, built, snapshots[4]), after[3])
    # Restored: after four tokens, not after the fifth.
    pool, _ = kvpool.release(pool, 1, live)
    pool, restored, _ = kvpool.fork(pool, 1, snapshots[4], 0)
    assert same(read_state(pool, built, restored), after[3])
    pool = write_state(pool, restored, after[4])
    assert same(read_state(pool, built, snapshots[4]), after[3])
    assert kvpool.check(pool, holders=[[], [restored, snapshots[4]]]) == ()


def test_a_rejected_draft_goes_back_to_the_state_it_was_accepted_at(hybrid, shake):
    pool, built = hybrid
    pool, live, _ = kvpool.handout(pool, 1, [1], 1)
    live = live[0]
    accepted, rejected = shaken(built, shake, 1), shaken(built, shake, 1)
    pool = write_state(pool, live, accepted)
    pool, kept, _ = kvpool.fork(pool, 1, live, 0)
    pool = write_state(pool, live, rejected)
    pool, _ = kvpool.release(pool, 1, live)
    assert same(read_state(pool, built, kept), accepted)
    assert kvpool.check(pool, holders=[[], [kept]]) == ()


def test_states_follow_a_compaction_part_by_part(hybrid, shake):
    pool, built = hybrid
    pool, vpages, _ = kvpool.handout(pool, 1, [1, 1], 1)
    vpages = np.asarray(vpages).ravel()
    values = shaken(built, shake, 2)
    pool = write_state(pool, vpages, values)
    pool, _ = kvpool.release(pool, 1, vpages[:1])
    pool, moved = kvpool.compact(pool)
    assert int(moved) == built.extents
    read = read_state(pool, built, vpages[1:])
    assert same(read, {entry: rows[1:] for entry, rows in values.items()})


def test_page_ids_without_the_extent_of_an_entry_are_refused(hybrid):
    pool, built = hybrid
    last = max(built.entries, key=lambda entry: entry.extent)
    rows = np.zeros((1, last.nbytes), np.uint8)
    for ids in (np.int32([0]), np.zeros((1, last.extent), np.int32)):
        with pytest.raises(errors.FormatMismatch, match=f"extent {last.extent}"):
            tokens.write(pool.pages[0], last, ids, [0], rows, page_size=1)
        with pytest.raises(errors.FormatMismatch, match="as translate_parts gives"):
            tokens.read(pool.pages[0], last, ids, [0], page_size=1)


def test_the_checked_verbs_take_parts_too(hybrid, shake):
    pool, built = hybrid
    pool, vpages, _ = kvpool.handout(pool, 1, [1, 1], 1)
    parts = np.asarray(kvpool.translate_parts(pool, 1, vpages.ravel()))
    entry = max(built.entries, key=lambda entry: entry.extent)
    rows, slots = shake(2, entry.nbytes), np.int32([0, 0])
    pages = tokens.checked_write(pool.pages[0], entry, parts, slots, rows, page_size=1)
    read = tokens.checked_read(pages, entry, parts, slots, page_size=1)
    assert np.array_equal(np.asarray(read), rows)
    with pytest.raises(errors.InvalidId, match="more than once"):
        tokens.checked_write(pages, entry, parts[[0, 0]], slots, rows, page_size=1)


# Any strides of layers and slots; an entry's inside in one piece.

_LAYERS, _SLOTS = 3, 5


def strided(layout, nbytes, gap):
    """Return a page's entries, one a layer, and its size: `layout` says what is outer.

    `gap` bytes that belong to nobody lie behind every entry.
    """
    width = nbytes + gap
    layer, slot = (
        (width * _SLOTS, width) if layout == "layer, slot" else (width, width * _LAYERS)
    )
    page_nbytes = width * _LAYERS * _SLOTS
    entries = [
        Entry(
            Field(f"l{i}", "ssm", 1, nbytes, "float8_e5m2"),
            i * layer,
            slot,
            0,
            1,
            Plane(0, 0, page_nbytes),
        )
        for i in range(_LAYERS)
    ]
    return entries, page_nbytes


@pytest.mark.parametrize("layout", ["layer, slot", "slot, layer"])
@pytest.mark.parametrize("gap", [0, 16, 4_096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_scattered_at_any_strides_and_gaps_keep_their_bytes(
    layout, gap, dtype, shake
):
    values = shake(_LAYERS, _SLOTS, 4, 4, jnp.dtype(dtype).itemsize)
    nbytes = values[0, 0].size
    entries, page_nbytes = strided(layout, nbytes, gap)
    pages = jnp.full((2, page_nbytes), kvpool.POISON, jnp.uint8)
    expected = np.full(page_nbytes, kvpool.POISON, np.uint8)
    order = np.int32([3, 0, 4, 1, 2])
    for layer, entry in enumerate(entries):
        rows = values[layer].reshape(_SLOTS, nbytes)
        ids = np.ones(_SLOTS, np.int32)
        pages = tokens.write(pages, entry, ids, order, rows, page_size=_SLOTS)
        for slot, row in zip(order, rows, strict=True):
            start = entry.address(int(slot))
            expected[start : start + nbytes] = row
    assert np.array_equal(np.asarray(pages)[1], expected)
    assert (np.asarray(pages)[0] == kvpool.POISON).all()
    assert (expected == kvpool.POISON).sum() >= gap * _LAYERS * _SLOTS


@pytest.mark.parametrize("layout", ["layer, slot", "slot, layer"])
def test_masked_rows_and_slots_out_of_range_write_nothing(layout, shake):
    entries, page_nbytes = strided(layout, 64, 16)
    before = shake(2, page_nbytes)
    outside = [(2, 0), (-1, 0), (2**31 - 1, 1), (1, _SLOTS), (1, -1), (0, 2**31 - 1)]
    ids, slots = np.int32(outside).T
    pages = jnp.array(before)
    for entry in entries:
        rows = shake(len(outside), 64)
        pages = tokens.write(pages, entry, ids, slots, rows, page_size=_SLOTS)
        read = tokens.read(pages, entry, ids, slots, page_size=_SLOTS)
        assert not np.asarray(read).any()
    assert np.array_equal(np.asarray(pages), before)


@pytest.mark.parametrize(
    "change",
    [
        {"slot_stride": 63},
        {"slot_stride": 0},
        {"slot_stride": -64},
        {"offset": -16},
        {"offset": 80 * _SLOTS * _LAYERS - 63},
    ],
    ids=lambda change: "{}={}".format(*next(iter(change.items()))),
)
def test_an_entry_that_is_not_in_one_piece_inside_the_page_is_refused(change, shake):
    entries, page_nbytes = strided("layer, slot", 64, 16)
    broken = dataclasses.replace(entries[0], **change)
    pages = jnp.array(shake(2, page_nbytes))
    for page_size in (None, 1, _SLOTS):
        with pytest.raises(errors.FormatMismatch, match="contiguous, inside the page"):
            tokens.write(pages, broken, [0], [0], shake(1, 64), page_size=page_size)
        with pytest.raises(errors.FormatMismatch, match="contiguous, inside the page"):
            tokens.read(pages, broken, [0], [0], page_size=page_size)


def test_a_state_in_pieces_is_refused_as_values(shake):
    (entry, *_), page_nbytes = strided("layer, slot", 64, 16)
    pages = jnp.array(shake(2, page_nbytes))
    with pytest.raises(errors.FormatMismatch, match="flatten heads and bytes"):
        tokens.write(pages, entry, [0], [0], shake(1, 8, 8), page_size=_SLOTS)


# Slots far apart, as in a pool whose slot stride is a whole envelope.


def test_slots_on_both_sides_of_a_wrap_hold_their_own_rows(shake):
    nbytes, stride, slots = (
        96,
        224,
        np.int32([0, 75, 146, 147, 152, 153, 292, 293, 400]),
    )
    field = Field("l", "ssm", 1, nbytes, "float32")
    entry = Entry(field, 0, stride, 0, 1, Plane(0, 0, stride * 401))
    narrow = np.int16(slots.astype(np.int64) * stride % 2**16)
    wraps = narrow.astype(np.int64) != slots.astype(np.int64) * stride
    assert slots[wraps].min() == 147  # as slot 153 does at the real stride in 32 bits
    rows, gaps = shake(slots.size, nbytes), jnp.full((1, stride * 401), 0xFF, jnp.uint8)
    ids = np.zeros(slots.size, np.int32)
    pages = tokens.write(gaps, entry, ids, slots, rows)
    assert np.array_equal(np.asarray(tokens.read(pages, entry, ids, slots)), rows)
    plain = np.asarray(pages)[0].reshape(401, stride)
    assert np.array_equal(plain[slots, :nbytes], rows)
    plain = plain.copy()
    plain[slots, :nbytes] = 0xFF
    assert (plain == 0xFF).all()
