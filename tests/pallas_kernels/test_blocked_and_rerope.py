"""Blocked scales as rows and back, and keys turned in place, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import blocked, blocks_of_rows, rerope, rotation, rows_of_blocks

NUM_PAGES = 4
SHAPE = blocked.Shape(16, 128, 4)
OFFSETS = np.array([0, 2240], np.int32)
IDS = np.array([3, 9, 0], np.int32)


def test_values_and_scales_of_a_slot_become_its_row(prove):
    pages = prove.bytes(NUM_PAGES + 2, 4400)
    facts = {"shape": SHAPE, "num_pages": NUM_PAGES}
    rows = prove.equal(rows_of_blocks, (pages, IDS, OFFSETS), **facts)
    for k, start in enumerate(OFFSETS):
        for slot in (0, 5, 15):
            at, scale = start + 128 * slot, start + 128 * 16 + 4 * slot
            own = np.concatenate([pages[3, at : at + 128], pages[3, scale : scale + 4]])
            np.testing.assert_array_equal(rows[0, k, slot], own)
    assert not rows[1].any()


def test_rows_become_blocks_and_the_bytes_between_are_kept(prove):
    pages, rows = prove.bytes(NUM_PAGES + 2, 4400), prove.bytes(4, 2, 16, 132)
    ids = np.array([3, 9, 0, 3], np.int32)
    facts = {"shape": SHAPE, "num_pages": NUM_PAGES}
    found = prove.equal(blocks_of_rows, (pages, ids, OFFSETS, rows), **facts)
    between = slice(SHAPE.nbytes, 2240)
    np.testing.assert_array_equal(found[:, between], pages[:, between])
    again = rows_of_blocks.host(found, ids, OFFSETS, **facts)
    np.testing.assert_array_equal(again[2:], rows[2:])
    np.testing.assert_array_equal(again[0], rows[3])


@pytest.mark.parametrize("op", [rows_of_blocks, blocks_of_rows])
def test_blocks_without_a_guard_are_caught(prove, op, monkeypatch):
    pages, ids = prove.bytes(NUM_PAGES + 2, 4400), np.array([5], np.int32)
    more = () if op is rows_of_blocks else (prove.bytes(1, 1, 16, 132),)
    arrays = pages, ids, OFFSETS[:1], *more
    facts = {"shape": SHAPE, "num_pages": NUM_PAGES}
    assert prove.unguarded_differs(op, monkeypatch, *arrays, **facts)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (blocked.Shape(16, 130, 4), "130 B of values"),
        (blocked.Shape(16, 128, 3), "3 B of scales"),
        (blocked.Shape(18, 128, 4), "18 slots"),
        (blocked.Shape(16, 64, 4), "64 words, no multiple of 128"),
        (blocked.Shape(256, 576, 8), "a block has 232,448 B"),
    ],
)
def test_blocks_that_no_kernel_turns_are_refused_with_numbers(prove, shape, words):
    shapes = prove.shape("uint8", 8, 4400), prove.shape("int32", 2), OFFSETS
    assert words in rows_of_blocks.supports(*shapes, shape=shape)


def keys_of(prove, style: str, dtype: str):
    """Return a rotation's arguments and facts; every seventh slot's delta is nought."""
    pairs = 16 if style == "half" else 8
    deltas = prove.rng.integers(-(10**5), 10**5, (3, 16))
    deltas[:, ::7] = 0
    cos, sin = rotation.tables(deltas, 10_000.0 ** (-np.arange(pairs) / pairs))
    keys = prove.rng.standard_normal((6, 16 * 2 * 2 * pairs)).astype(jnp.dtype(dtype))
    window = 2 * pairs * keys.dtype.itemsize
    pages = keys.view(np.uint8).reshape(6, -1).copy()
    facts = {"style": style, "dtype": dtype, "slot_stride": 2 * window}
    arrays = pages, IDS, np.array([0, window], np.int32), cos, sin
    return arrays, facts | {"num_pages": NUM_PAGES}, deltas


@pytest.mark.parametrize(
    ("style", "dtype"),
    [
        ("half", "bfloat16"),
        ("half", "float16"),
        ("interleaved", "bfloat16"),
        ("interleaved", "float16"),
    ],
)
def test_keys_of_16_bits_are_turned_to_the_same_last_bit(prove, style, dtype):
    arrays, facts, deltas = keys_of(prove, style, dtype)
    found = prove.equal(rerope, arrays, **facts)
    slots = found.reshape(6, 16, -1)
    old = arrays[0].reshape(6, 16, -1)
    still = deltas[0] == 0
    np.testing.assert_array_equal(slots[3, still], old[3, still])
    assert (slots[3, ~still] != old[3, ~still]).any(axis=1).all()
    np.testing.assert_array_equal(
        np.delete(found, [0, 3], 0), np.delete(old.reshape(6, -1), [0, 3], 0)
    )
    turned = found[3].view(jnp.dtype(dtype)).astype(np.float64)
    plain = plainly(arrays, facts, page=3, entry=0)
    np.testing.assert_allclose(turned, plain, atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    ("offsets", "stride", "words"),
    [
        ([0, 0], 64, "windows of 32 B from 0 and from 0 of a page"),
        ([0, 16], 64, "windows of 32 B from 0 and from 16 of a page"),
        ([0], 16, "windows of 32 B every 16 B"),
        ([64], 64, "992 B from offset 64 on, in a page of 1,024 B"),
        ([-32], 64, "992 B from offset -32 on"),
    ],
)
def test_windows_that_overlap_or_leave_their_page_are_refused(
    prove, offsets, stride, words
):
    """The kernel would turn a byte twice, or a neighbour's."""
    (pages, ids, _, cos, sin), facts, _ = keys_of(prove, "interleaved", "bfloat16")
    facts["slot_stride"] = stride
    at = np.array(offsets, np.int32)
    assert words in rerope.supports(pages, ids, at, cos, sin, **facts)


def test_a_block_that_leaves_its_page_is_refused(prove):
    shape = blocked.Shape(16, 128, 4)
    pages, offsets = prove.bytes(3, shape.nbytes + 16), np.array([32], np.int32)
    refusal = rows_of_blocks.supports(pages, IDS, offsets, shape=shape)
    assert "2,112 B from offset 32 on, in a page of 2,128 B" in refusal


def plainly(arrays, facts, page: int, entry: int) -> np.ndarray:
    """Turn one page in double precision."""
    pages, _, _, cos, sin = arrays
    dtype = jnp.dtype(facts["dtype"])
    pairs = cos.shape[-1]
    keys = pages[page].view(dtype).astype(np.float64).reshape(16, 2, 2 * pairs)
    c, s = (t[entry][:, None].astype(np.float64) for t in (cos, sin))
    half = facts["style"] == "half"
    first = slice(0, pairs) if half else slice(0, None, 2)
    second = slice(pairs, None) if half else slice(1, None, 2)
    x, y = keys[..., first].copy(), keys[..., second].copy()
    keys[..., first], keys[..., second] = x * c - y * s, y * c + x * s
    return keys.reshape(-1)


def test_keys_of_32_bits_agree_to_two_ulps(prove):
    from pallas_kernels import interpret

    arrays, facts, _ = keys_of(prove, "half", "float32")
    assert rerope.supports(*arrays, **facts) is None
    found = np.asarray(interpret.run(rerope.kernel, *arrays, **facts)).view(np.float32)
    expected = rerope.host(arrays[0].copy(), *arrays[1:], **facts).view(np.float32)
    distance = np.abs(found - expected).reshape(6, 16, 2, 2, 16)
    pairs = arrays[0].view(np.float32).reshape(6, 16, 2, 2, 16)
    of_pair = np.hypot(pairs[..., 0, :], pairs[..., 1, :])[..., None, :]
    assert (distance <= 2 * np.spacing(of_pair)).all()


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_nothing_is_turned_where_the_delta_is_nought_whatever_the_bits(prove, style):
    arrays, facts, _ = keys_of(prove, style, "bfloat16")
    pages, ids, offsets, cos, sin = arrays
    nan = np.full_like(pages, 0xFF)
    still = nan, ids, offsets, np.ones_like(cos), np.zeros_like(sin)
    np.testing.assert_array_equal(prove.equal(rerope, still, **facts), nan)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_half_a_turn_is_no_stillness_though_its_sine_is_nought(prove, style):
    arrays, facts, _ = keys_of(prove, style, "bfloat16")
    pages, ids, offsets, cos, sin = arrays
    turned = pages, ids, offsets, -np.ones_like(cos), np.zeros_like(sin)
    found = prove.equal(rerope, turned, **facts).view(np.uint16)
    np.testing.assert_array_equal(found[3], pages.view(np.uint16)[3] ^ 0x8000)


def test_a_page_that_is_named_twice_turns_once_as_the_last_entry_says(prove):
    (pages, _, offsets, cos, sin), facts, _ = keys_of(prove, "interleaved", "bfloat16")
    ids = np.array([3, 0, 3], np.int32)
    twice = prove.equal(rerope, (pages, ids, offsets, cos, sin), **facts)
    alone = np.array([-1, 0, 3], np.int32)
    np.testing.assert_array_equal(
        twice, rerope.host(pages, alone, offsets, cos, sin, **facts)
    )


@pytest.mark.parametrize("op", [rows_of_blocks, blocks_of_rows, rerope])
def test_no_page_and_no_block_change_nothing(prove, op):
    none = np.zeros(0, np.int32)
    (pages, ids, offsets, cos, sin), facts, _ = keys_of(prove, "half", "bfloat16")
    blocks = prove.bytes(6, 4400)
    whole = offsets if op is rerope else OFFSETS
    for some, where, count in ((none, whole, (0, 2)), (IDS, none, (3, 0))):
        rows = np.zeros((*count, 16, 132), np.uint8)
        if op is rerope:
            tables = cos[: len(some)], sin[: len(some)]
            kept = prove.equal(op, (pages, some, where, *tables), **facts)
            np.testing.assert_array_equal(kept, pages)
        elif op is rows_of_blocks:
            assert prove.equal(op, (blocks, some, where), shape=SHAPE).size == 0
        else:
            kept = prove.equal(op, (blocks, some, where, rows), shape=SHAPE)
            np.testing.assert_array_equal(kept, blocks)


def test_a_rotation_without_its_guard_is_caught(prove, monkeypatch):
    (pages, _, *more), facts, _ = keys_of(prove, "half", "bfloat16")
    ids = np.array([5, 0, 1], np.int32)
    assert prove.unguarded_differs(rerope, monkeypatch, pages, ids, *more, **facts)


@pytest.mark.parametrize(
    ("style", "dtype", "pairs", "words"),
    [
        ("spiral", "bfloat16", 16, "style 'spiral'"),
        ("interleaved", "float32", 16, "two lanes' words"),
        ("half", "bfloat16", 15, "two keys of 16 bits share a word"),
        ("half", "bfloat16", 6, "window of 24 B"),
        ("half", "bfloat16", 8, "no tile of at most 16 slots"),
    ],
)
def test_rotations_that_no_kernel_makes_are_refused(prove, style, dtype, pairs, words):
    table = prove.shape("float32", 3, 16, pairs)
    shapes = prove.shape("uint8", 6, 4096), prove.shape("int32", 3), OFFSETS
    facts = {"style": style, "dtype": dtype, "slot_stride": 64}
    assert words in rerope.supports(*shapes, table, table, **facts)
