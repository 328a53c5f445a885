"""Pools of other engines through records: each format's bytes by its own expression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, errors, transfer
from kvmem.geometry import LayerSpec, Part, Topology, formats, group_layers

NL, NB, BS, NH, HS = 2, 3, 4, 2, 3
P = BS * NH * HS

# Element of (layer n, key or value c, page b, token t, head h, dim d): which array of
# the list, and where in it. Spelled out, not derived.
ADDRESS = {
    0: lambda n, c, b, t, h, d: (0, ((b * NL + n) * 2 + c) * P + (t * NH + h) * HS + d),
    1: lambda n, c, b, t, h, d: (n, (c * NB + b) * P + (t * NH + h) * HS + d),
    2: lambda n, c, b, t, h, d: (n, (b * 2 + c) * P + (t * NH + h) * HS + d),
    4: lambda n, c, b, t, h, d: (c * NL + n, (b * BS + t) * NH * HS + h * HS + d),
    6: lambda n, c, b, t, h, d: (n, (c * NB + b) * P + (h * BS + t) * HS + d),
    7: lambda n, c, b, t, h, d: (n, (b * 2 + c) * P + (h * BS + t) * HS + d),
    8: lambda n, c, b, t, h, d: (0, ((b * NL + n) * 2 + c) * P + (h * BS + t) * HS + d),
    9: lambda n, c, b, t, h, d: (c * NL + n, b * P + (t * NH + h) * HS + d),
    10: lambda n, c, b, t, h, d: (
        n, b * 2 * P + (h * BS + t) * 2 * HS + c * HS + d),
    11: lambda n, c, b, t, h, d: (
        n, b * 2 * P + (t * NH + h) * 2 * HS + c * HS + d),
    12: lambda n, c, b, t, h, d: (
        n, b * 2 * P + (h * BS + t) * 2 * HS + c * HS + d),
    13: lambda n, c, b, t, h, d: (
        n, b * 2 * P + (t * NH + h) * 2 * HS + c * HS + d),
    15: lambda n, c, b, t, h, d: (n, (c * NB + b) * P + (h * BS + t) * HS + d),
    16: lambda n, c, b, t, h, d: (n * 2 + c, b * P + (t * NH + h) * HS + d),
    "RPA_PACKED": lambda n, c, b, t, h, d: (
        n, b * 2 * P + ((t * NH + h) * 2 + c) * HS + d),
    "RPA_PACKED_HD64": lambda n, c, b, t, h, d: (
        n, b * 2 * P + (t * NH + h) * 2 * HS + c * HS + d),
    "SLOTS_INTERLEAVED": lambda n, c, b, t, h, d: (
        n, (b * BS + t) * 2 * NH * HS + (h * 2 + c) * HS + d),
    "KVMEM_HEAD_MAJOR": lambda n, c, b, t, h, d: (
        0, b * NL * 2 * P + (((n * NH + h) * 2 + c) * BS + t) * HS + d),
    "KVMEM_TOKEN_MAJOR": lambda n, c, b, t, h, d: (
        0, b * NL * 2 * P + (((n * 2 + c) * BS + t) * NH + h) * HS + d),
    "KVMEM_SPLIT_HND": lambda n, c, b, t, h, d: (
        0, b * NL * 2 * P + (((n * 2 + c) * NH + h) * BS + t) * HS + d),
    "KVMEM_PACKED_NHD": lambda n, c, b, t, h, d: (
        0, b * NL * 2 * P + (((n * BS + t) * NH + h) * 2 + c) * HS + d),
    "KVMEM_PACKED_HND": lambda n, c, b, t, h, d: (
        0, b * NL * 2 * P + (((n * NH + h) * BS + t) * 2 + c) * HS + d),
    "KVMEM_SLOT_MAJOR": lambda n, c, b, t, h, d: (
        0, b * NL * 2 * P + (((t * NL + n) * NH + h) * 2 + c) * HS + d),
}  # fmt: skip
# One row a token, unequal widths of planes: latents, index keys, tuples of three.
LATENTS = {
    3: lambda n, w, b, t, d: (n, b * BS * w + t * w + d),
    5: lambda n, w, b, t, d: (n, (b * BS + t) * w + d),
    "MLA_PACKED": lambda n, w, b, t, d: (n, b * BS * w + t * w + d),
}


def keys_and_values():
    specs = [
        LayerSpec(f"l{i}", i, kv_heads=NH, head_dim=HS, dtype="float32")
        for i in range(NL)
    ]
    (group,) = group_layers(specs, BS)
    return group


def rows_of(*widths, dtype="bfloat16", scales=0, page_size=BS, layers=NL):
    parts = [Part(f"part{i}", 0, w, dtype) for i, w in enumerate(widths)]
    parts += [Part("scale", 0, scales, "float32", True)] * bool(scales)
    specs = [
        LayerSpec(f"l{i}", i, kind="mla", parts=tuple(parts), scale=1.0)
        for i in range(layers)
    ]
    (group,) = group_layers(specs, page_size)
    return group


def nested(like, flat):
    """Return arrays of a list in the nesting of `like`."""
    if hasattr(like, "shape"):
        return flat.pop(0).reshape(like.shape).view(like.dtype)
    return type(like)(nested(each, flat) for each in like)


def blank(form, group):
    shapes = formats.shapes(form, group, NB)
    flat = [
        np.zeros(each.shape, each.dtype) for each in formats.flat(form, group, shapes)
    ]
    return nested(shapes, flat)


def opened(form, group, arrays, page_nbytes=None):
    declared = formats.declare(form, group, arrays, page_nbytes)
    plan = canonical.plan(
        group, Topology(), declared.order, num_pages=declared.num_pages
    )
    listed = formats.flat(form, group, arrays)
    return plan, transfer.as_bytes(listed, plan), listed


def gathered(form, group, arrays, implementation="host"):
    plan, pages, _ = opened(form, group, arrays)
    return transfer.export_records(
        pages, [2, 0, 1], plan, NB * BS, implementation=implementation
    )


def expected_keys_and_values():
    """Return f32[token, layer, head, k/v, dim] of pages 2, 0 and 1: a value each."""
    shape = NB * BS, NL, NH, 2, HS
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 0.5


def laid_out(key):
    """Return the arrays of a format with every element where its expression says."""
    group, form = keys_and_values(), formats.find(key)
    arrays = blank(form, group)
    listed = [np.ravel(each) for each in formats.flat(form, group, arrays)]
    tokens = expected_keys_and_values()
    for (i, n, h, c, d), value in np.ndenumerate(tokens):
        page = (2, 0, 1)[i // BS]
        array, at = ADDRESS[key](n, c, page, i % BS, h, d)
        listed[array][at] = value
    return form, group, nested(formats.shapes(form, group, NB), listed)


def test_every_format_of_keys_and_values_has_an_expression():
    group = keys_and_values()
    held = {row.name for row in formats.FORMATS if formats.obstacle(row, group) is None}
    assert held == {formats.find(key).name for key in ADDRESS}
    every = {formats.find(key).name for key in (*ADDRESS, *LATENTS, 14, 17)}
    assert every == {row.name for row in formats.FORMATS}


@pytest.mark.parametrize("key", ADDRESS)
def test_gathered_tokens_equal_the_index_expression(key):
    form, group, arrays = laid_out(key)
    want = expected_keys_and_values().reshape(NB * BS, -1).view(np.uint8)
    assert np.array_equal(gathered(form, group, arrays), want)


@pytest.mark.parametrize("key", ADDRESS)
def test_records_of_any_format_fill_the_pages_of_every_other(key):
    form, group, arrays = laid_out(key)
    records = expected_keys_and_values().reshape(NB * BS, -1).view(np.uint8)
    assert_filled(form, group, arrays, records)


@pytest.mark.parametrize("key", [1, 4, 13])
def test_the_device_moves_the_same_bytes(key):
    form, group, arrays = laid_out(key)
    assert np.array_equal(
        gathered(form, group, arrays, "device"), gathered(form, group, arrays)
    )


@pytest.mark.parametrize("key", LATENTS)
def test_latents_equal_their_expression_in_every_format_of_them(key):
    width, group, form = 24, rows_of(24), formats.find(key)
    tokens = np.arange(NB * BS * NL * width, dtype=np.uint16).reshape(-1, NL, width)
    arrays = blank(form, group)
    listed = [np.ravel(a).view(np.uint16) for a in formats.flat(form, group, arrays)]
    for (i, n, d), value in np.ndenumerate(tokens):
        array, at = LATENTS[key](n, width, (2, 0, 1)[i // BS], i % BS, d)
        listed[array][at] = value
    arrays = nested(formats.shapes(form, group, NB), listed)
    want = tokens.reshape(NB * BS, -1).view(np.uint8)
    assert np.array_equal(gathered(form, group, arrays), want)
    assert_filled(form, group, arrays, want)


def assert_filled(form, group, arrays, records):
    """Assert that records put into blank pages of a format are its arrays."""
    plan, pages, listed = opened(form, group, blank(form, group))
    filled = transfer.import_records(pages, [2, 0, 1], records, plan)
    want = formats.flat(form, group, arrays)
    for found, each in zip(transfer.from_bytes(filled, listed), want, strict=True):
        assert np.asarray(found).tobytes() == np.asarray(each).tobytes()


def test_planes_of_unequal_widths_stand_in_a_tuple_a_layer():
    widths, form = (24, 8, 16), formats.find(17)
    group = rows_of(*widths)
    arrays = blank(form, group)
    rng = np.random.default_rng(3)
    for layer in arrays:
        for each in layer:
            each.view(np.uint16)[...] = rng.integers(0, 1 << 16, each.shape)
    found = gathered(form, group, arrays)
    rows = [each.reshape(NB, BS, -1)[[2, 0, 1]].reshape(NB * BS, -1).view(np.uint8)
            for layer in arrays for each in layer]  # fmt: skip
    assert np.array_equal(found, np.concatenate(rows, axis=1))
    assert_filled(form, group, arrays, found)


def test_blocked_rows_equal_their_expression():
    group, form = rows_of(8, dtype="float8_e4m3fn", scales=1), formats.find(14)
    arrays = blank(form, group)
    raw = np.random.default_rng(4).integers(0, 256, (NL, NB * 48), np.uint8)
    arrays = [raw[i].reshape(NB, BS, 12) for i in range(NL)]
    slots = np.concatenate([np.arange(BS) + page * BS for page in (2, 0, 1)])
    blocked = formats.Blocked(BS, 8, 4)
    want = [
        [
            *raw[n][blocked.value_address(int(s)) :][:8],
            *raw[n][blocked.scale_address(int(s)) :][:4],
        ]
        for s in slots
        for n in range(NL)
    ]
    found = gathered(form, group, arrays)
    assert np.array_equal(found, np.array(want, np.uint8).reshape(NB * BS, -1))
    assert_filled(form, group, arrays, found)


def test_a_nesting_that_is_not_the_formats_is_refused():
    form, group, arrays = laid_out(4)
    with pytest.raises(errors.FormatMismatch, match="nested deeper"):
        formats.declare(formats.find(2), group, arrays)


WRONG_NESTS = {
    "one array of all layers": (2, lambda a: np.stack(a)),
    "the facts of one": (2, lambda a: a[0]),
    "a flat list of keys and values": (9, lambda a: [*a[0], *a[1]]),
    "keys of one layer and values of three": (9, lambda a: [a[0][:1], a[0][1:] + a[1]]),
    "keys and values in one array": (16, lambda a: [np.stack(pair) for pair in a]),
    "a layer of one and one of three": (16, lambda a: [a[0][:1], a[0][1:] + a[1]]),
    "three layers": (16, lambda a: [*a, a[0]]),
}


@pytest.mark.case("LAY-04")
@pytest.mark.parametrize("what", WRONG_NESTS)
def test_as_many_arrays_nested_otherwise_are_not_taken_for_the_formats(what):
    key, wrong = WRONG_NESTS[what]
    form, group, arrays = laid_out(key)
    formats.declare(form, group, arrays)
    with pytest.raises(errors.FormatMismatch, match="a format says how its arrays"):
        formats.declare(form, group, wrong(arrays))


@pytest.mark.parametrize("key", [2, 3, 7, 9, 12, 13, 14, 17])
def test_pages_of_any_format_that_are_padded_are_declared_by_its_name(key):
    latents = {3: rows_of(24), 14: rows_of(8, scales=1), 17: rows_of(24, 8)}
    group, form = latents.get(key, keys_and_values()), formats.find(key)
    arrays, rng = blank(form, group), np.random.default_rng(key)
    for each in formats.flat(form, group, arrays):
        raw = each.view(np.uint8)
        raw[...] = rng.integers(0, 256, raw.shape)
    want = gathered(form, group, arrays)
    tight = {a.nbytes // NB for a in formats.flat(form, group, arrays)}
    step = max(tight) + 48

    def padded(each):
        if isinstance(each, list | tuple):
            return type(each)(map(padded, each))
        found = np.full((NB, step), 0xEE, np.uint8)
        found[:, : each.nbytes // NB] = each.reshape(NB, -1).view(np.uint8)
        return found

    pools = padded(arrays)
    declared = formats.declare(form, group, pools, step)
    plan = canonical.plan(group, Topology(), declared.order)
    pages = transfer.as_bytes(formats.flat(form, group, pools), plan)
    found = transfer.export_records(pages, [2, 0, 1], plan, NB * BS)
    assert np.array_equal(found, want)
    filled = transfer.import_records(pages, [2, 0, 1], np.flip(found), plan)
    kept = filled if isinstance(filled, tuple) else (filled,)
    assert all((np.asarray(a)[0, :, max(tight) :] == 0xEE).all() for a in kept)


def test_tight_pages_of_others_become_aligned_pages_of_our_own():
    form, group, arrays = laid_out(7)
    records = gathered(form, group, arrays)
    plan = canonical.plan(group, Topology())
    pages = jnp.zeros((1, 4, plan.page_nbytes), jnp.uint8)
    filled = transfer.import_records(pages, [3, 1, 2], records, plan)
    again = transfer.export_records(filled, [3, 1, 2], plan, NB * BS)
    assert np.array_equal(records, again) and jax.tree.leaves(filled)


@pytest.mark.parametrize("key", [0, 1, 4, 7, 13, 15, 16, "RPA_PACKED"])
def test_ranks_that_are_stacked_give_the_records_of_the_whole(key):
    form, group, arrays = laid_out(key)
    cells = expected_keys_and_values()
    local, ranks = [], Topology(2)
    for rank in range(2):
        specs = [
            LayerSpec(f"l{i}", i, kv_heads=1, head_dim=HS, dtype="float32")
            for i in range(NL)
        ]
        (mine,) = group_layers(specs, BS)
        plan, pages, listed = opened(form, mine, blank(form, mine))
        own = np.ascontiguousarray(cells[:, :, rank : rank + 1]).reshape(NB * BS, -1)
        filled = transfer.import_records(pages, [2, 0, 1], own.view(np.uint8), plan)
        local.append(transfer.from_bytes(filled, listed))
    stacked = [jnp.stack(pair) for pair in zip(*local, strict=True)]
    shapes = formats.shapes(form, group, NB)
    like = iter(stacked)
    nest = like_of(shapes, like)
    declared = formats.declare(form, group, nest, topology=ranks)
    plan = canonical.plan(group, ranks, declared.order, num_pages=declared.num_pages)
    pages = transfer.as_bytes(stacked, plan)
    found = transfer.export_records(pages, [2, 0, 1], plan, NB * BS)
    assert np.array_equal(found, gathered(form, group, arrays))


def like_of(shapes, stacked):
    """Return arrays in the nesting of shapes, taken one after another."""
    if hasattr(shapes, "shape"):
        return next(stacked)
    return type(shapes)(like_of(each, stacked) for each in shapes)
