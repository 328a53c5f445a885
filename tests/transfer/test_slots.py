"""Rows by slot: blocked-scale pages, padded pages, and any pool of keys and values."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, errors, transfer
from kvmem.geometry import LayerSpec, Part, Topology, formats, group_layers

E4M3 = "float8_e4m3fn"
SPLITS = [(8, 4), (64, 4), (128, 4), (576, 8), (512, 16), (320, 32), (256, 32)]


def group(values=128, scales=4, page_size=64, layers=1):
    parts = (
        Part("key", 0, values, E4M3),
        Part("scale", 0, scales // 4, "float32", True),
    )
    specs = [
        LayerSpec(f"l{i}", i, kind="mla", parts=parts, scale=1.0) for i in range(layers)
    ]
    (made,) = group_layers(specs, page_size)
    return made


class Pool:
    """A blocked-scale pool as an engine allocates it: bytes, an array a layer."""

    def __init__(self, values, scales, page_size, pages, layers=1, pad=0, fill=0xEE):
        self.group = group(values, scales, page_size, layers)
        self.step = page_size * (values + scales) + pad
        self.raw = np.full((layers, pages, self.step), fill, np.uint8)
        line, self.padded = "page (field token dim)", self.step if pad else None
        row = formats.Format(None, "flat", line, "tests")
        declared = formats.declare(row, self.group, list(self.raw), self.padded)
        self.plan = canonical.plan(self.group, Topology(), declared.order)
        layer, *_ = self.group.layers
        self.blocked = formats.Blocked.of(layer, page_size, declared.order)
        assert (self.blocked.values, self.blocked.scales) == (values, scales)
        assert self.blocked.step == self.step

    def pages(self):
        return transfer.as_bytes([jnp.asarray(a) for a in self.raw], self.plan)

    def put(self, slots, records, **kwargs):
        held = transfer.put_slots(self.pages(), slots, records, self.plan, **kwargs)
        arrays = held if isinstance(held, tuple) else (held,)
        self.raw = np.array([np.asarray(a)[0] for a in arrays])

    def take(self, slots):
        return transfer.take_slots(self.pages(), slots, self.plan)

    def by_formula(self, slots):
        """Return the records at slots, byte by byte from their addresses."""
        found, b = [], self.blocked
        for slot in map(int, slots):
            value, scale = b.value_address(slot), b.scale_address(slot)
            found.append(
                np.concatenate(
                    [
                        part
                        for flat in self.raw.reshape(len(self.raw), -1)
                        for part in (
                            flat[value : value + b.values],
                            flat[scale : scale + b.scales],
                        )
                    ]
                )
            )
        return np.array(found)


def rows(count, nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)


@pytest.fixture
def source(oracle):
    pool = Pool(128, 4, 64, pages=8, layers=3)
    pool.put(np.arange(32, 128), rows(96, 3 * 132))
    return pool


def test_rows_are_gathered_and_scattered_across_pages(source):
    slots, target = np.arange(32, 128), Pool(128, 4, 64, pages=8, layers=3)
    chunk = source.take(slots)
    assert np.array_equal(chunk, rows(96, 3 * 132))
    assert np.array_equal(source.by_formula(slots), chunk)
    target.put(np.arange(17, 113), chunk)
    assert np.array_equal(target.by_formula(range(17, 113)), chunk)


def naive(source, target, first, count=96, row=132):
    """Copy rows as if they were contiguous: 132 bytes at slot * 132, a layer."""
    for layer in range(len(source.raw)):
        flat, into = source.raw[layer].reshape(-1), target.raw[layer].reshape(-1)
        into[first * row : (first + count) * row] = flat[32 * row : (32 + count) * row]


@pytest.mark.parametrize("first, right", [(17, 0), (96, 95), (160, 95)])
def test_a_copy_of_contiguous_rows_is_wrong_where_slots_are_not_aligned(
    source, first, right
):
    """The control: distances of whole pages hide the fault, all but in one row."""
    target = Pool(128, 4, 64, pages=8, layers=3, fill=0)
    naive(source, target, first)
    equal = target.by_formula(range(first, first + 96)) == rows(96, 3 * 132)
    assert equal.reshape(96, 3, 132).all(axis=2).all(axis=1).sum() == right


def test_whole_pages_may_be_copied_without_knowing_what_is_in_them(source):
    target = Pool(128, 4, 64, pages=8, layers=3)
    target.raw[:, 5] = source.raw[:, 1]
    assert np.array_equal(
        target.by_formula(range(320, 384)), source.by_formula(range(64, 128))
    )


@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("values, scales", SPLITS)
def test_any_permutation_of_slots_goes_in_and_comes_out(values, scales, page_size):
    pages = max(2, 64 // page_size)
    pool = Pool(values, scales, page_size, pages)
    slots = np.random.default_rng(page_size).permutation(pages * page_size)[:48]
    records = rows(len(slots), values + scales, seed=values)
    pool.put(slots, records)
    assert np.array_equal(pool.by_formula(slots), records)
    assert np.array_equal(pool.take(slots), records)


def test_padding_between_pages_is_never_written():
    pool = Pool(576, 8, 64, pages=3, pad=64, fill=0xC5)
    assert pool.step == 37_440
    slots = np.random.default_rng(1).permutation(192)
    records = rows(192, 584)
    pool.put(slots, records)
    assert np.array_equal(pool.by_formula(slots), records)
    assert (pool.raw[0, :, 37_376:] == 0xC5).all()
    paged = transfer.import_records(
        pool.pages(), [2, 0], records[:100], pool.plan, implementation="device"
    )
    assert (np.asarray(paged)[0, :, 37_376:] == 0xC5).all()
    for each in ("host", "device"):
        found = transfer.export_records(
            paged, [2, 0], pool.plan, 100, implementation=each
        )
        assert np.array_equal(found, records[:100])


@pytest.mark.parametrize("skip", [0, 5, 12])
def test_negative_slots_and_a_skipped_prefix_leave_rows_as_they_were(skip):
    pool = Pool(128, 4, 16, pages=2)
    slots = np.array([3, -1, 7, -5, 20, 21, -1, 0, 31, -1, 30, 9])
    records, before = rows(12, 132), pool.raw.copy()
    pool.put(slots, records, skip_prefix=skip)
    kept = [i for i in range(skip, 12) if slots[i] >= 0]
    assert np.array_equal(pool.by_formula(slots[kept]), records[kept]) or not kept
    others = sorted(set(range(32)) - set(slots[kept].tolist()))
    fresh = Pool(128, 4, 16, pages=2)
    fresh.raw = before
    assert np.array_equal(pool.by_formula(others), fresh.by_formula(others))
    if skip == 12:
        assert np.array_equal(pool.raw, before)


def test_records_of_negative_slots_are_kept_as_they_are():
    pool = Pool(8, 4, 4, pages=2)
    out = np.full((2, 12), 7, np.uint8)
    found = transfer.take_slots(pool.pages(), [-1, 3], pool.plan, out)
    assert (found[0] == 7).all() and (found[1] == 0xEE).all()


def test_one_slot_for_two_rows_is_refused_and_nothing_changes():
    pool = Pool(128, 4, 16, pages=2)
    before = pool.raw.copy()
    with pytest.raises(errors.InvalidId, match=r"slots \[5\] named more than once"):
        pool.put([5, 6, 5], rows(3, 132))
    assert np.array_equal(pool.raw, before)
    pool.put([5, 6, 5], rows(3, 132), skip_prefix=1)
    assert np.array_equal(pool.by_formula([6, 5]), rows(3, 132)[1:])


def test_slots_behind_the_pool_are_refused():
    pool = Pool(8, 4, 4, pages=2)
    with pytest.raises(errors.InvalidId, match="slots 0 to 7"):
        pool.take([8])
    for none in ([0.5], [[0], [1]]):
        with pytest.raises(errors.InvalidId, match="a slot is an integer"):
            pool.take(none)
    assert pool.take([]).shape == (0, 12)


@pytest.mark.parametrize("values, scales", [(126, 4), (130, 4)])
def test_rows_of_no_whole_words_are_refused(values, scales):
    line = formats.find(14)
    arrays = [np.zeros((2, 16, values + scales), np.uint8)]
    parts = Part("key", 0, values, E4M3), Part("scale", 0, 1, "float32", True)
    spec = LayerSpec("l0", 0, kind="mla", parts=parts, scale=1.0)
    (made,) = group_layers([spec], 16)
    with pytest.raises(errors.FormatMismatch, match="no multiple of 4 on any backend"):
        formats.declare(line, made, arrays)


def test_pages_of_floats_are_refused():
    pool = Pool(8, 4, 4, pages=2)
    with pytest.raises(errors.FormatMismatch, match="a pool is u8"):
        transfer.take_slots(jnp.zeros((1, 2, 48), jnp.float32), [0], pool.plan)


@pytest.mark.case("QNT-05")
def test_a_page_of_four_tokens_has_its_scales_behind_all_values():
    pool = Pool(8, 4, 4, pages=2)
    (env,) = (pool.plan.envelope(0),)
    values, scales = env.entries
    assert env.nbytes == 48
    assert (values.address(2), values.nbytes) == (16, 8)
    assert (scales.address(2), scales.nbytes) == (40, 4)
    pool.raw[...] = np.random.default_rng(2).integers(0, 256, pool.raw.shape)
    before = pool.raw.copy()
    records = pool.take(range(8))
    pool.raw[...] = 0
    pool.put(range(8), records)
    assert np.array_equal(pool.raw, before)


@pytest.mark.case("QNT-07")
def test_scales_of_another_width_are_refused():
    line = formats.find(17)
    parts = Part("key", 0, 128, E4M3), Part("scale", 0, 1, "float32", True)
    spec = LayerSpec("l0", 0, kind="mla", parts=parts, scale=1.0)
    (made,) = group_layers([spec], 16)
    keys = np.zeros((2, 16, 128), np.uint8)
    good, half = np.zeros((2, 16, 1), np.float32), np.zeros((2, 16, 1), np.float16)
    assert formats.declare(line, made, [(keys, good)]).num_pages is None
    with pytest.raises(errors.IncompatiblePlan, match="dtype float16, and the model"):
        formats.declare(line, made, [(keys, half)])
    other = Part("scale", 0, 1, "bfloat16", True)
    (narrow,) = group_layers([LayerSpec(
        "l0", 0, kind="mla", parts=(parts[0], other), scale=1.0)], 16)  # fmt: skip
    assert canonical.format_id([made]) != canonical.format_id([narrow])


@pytest.mark.parametrize(
    "topology", [Topology(2), Topology(2, 2), Topology(4, 2, 2), Topology(8)]
)
@pytest.mark.parametrize("order", ["head_major", "layer | field | token head"])
def test_slots_of_any_pool_are_those_of_its_sequences(oracle, topology, order):
    specs = [LayerSpec(f"l{i}", i, kv_heads=4, head_dim=8) for i in range(2)]
    (made,) = group_layers(specs, 4)
    several = order != "head_major"
    plan = canonical.plan(made, topology, order, num_pages=3 if several else None)
    if several:
        shape = topology.ranks, 3 * sum(p.page_stride for p in plan.planes) // 2
        blank = tuple(jnp.full(shape, 9, jnp.uint8) for _ in range(2))
    else:
        blank = jnp.full((topology.ranks, 3, plan.page_nbytes), 9, jnp.uint8)
    count = plan.page_tokens * 3
    records = rows(count, plan.record_nbytes)
    slots = np.random.default_rng(5).permutation(count)
    pages = transfer.put_slots(blank, slots, records, plan)
    found = transfer.export_records(pages, [0, 1, 2], plan, count, verify_replicas=True)
    assert np.array_equal(found[slots], records)
    assert np.array_equal(transfer.take_slots(pages, slots[:9], plan), records[:9])


@pytest.mark.parametrize("skip", [-2, 1.5, True, None])
def test_a_prefix_that_is_no_count_writes_nothing(skip):
    pool = Pool(8, 4, 4, 3)
    before = pool.raw.copy()
    with pytest.raises(errors.InvalidId, match="skip_prefix = "):
        pool.put([0, 1, 2, 3], rows(4, 12), skip_prefix=skip)
    assert np.array_equal(pool.raw, before)


def test_a_slot_too_large_for_a_signed_integer_is_no_skipped_one():
    pool = Pool(8, 4, 4, 3)
    far = np.array([2**63 + 5, 1], np.uint64)
    with pytest.raises(errors.InvalidId, match="slot 9223372036854775813"):
        pool.put(far, rows(2, 12))
    with pytest.raises(errors.InvalidId, match="the pool has slots 0 to 11"):
        pool.take(far)
