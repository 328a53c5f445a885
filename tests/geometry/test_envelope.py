"""Envelopes: every byte of a page has one meaning, in every order and topology."""

import itertools
import time

import pytest

from kvmem import errors
from kvmem.geometry import LayerSpec, Plane, Topology, envelope, group_layers

T = 4


def group(layers=2, heads=4, dim=8, dtype="float32", page_size=T, v_dim=None):
    specs = [
        LayerSpec(f"l{i}", i, "gqa", heads, dim, v_dim, dtype) for i in range(layers)
    ]
    (made,) = group_layers(specs, page_size)
    return made


def owner_of_each_byte(built):
    """Walk the address rule and name the owner of every byte of a page."""
    owners = [None] * built.nbytes
    for entry, slot in itertools.product(built.entries, range(built.page_size)):
        start = entry.address(slot)
        for at in range(entry.nbytes):
            assert owners[start + at] is None, "two entries own one byte"
            head = entry.head0 + at // entry.field.head_nbytes
            owners[start + at] = (entry.field.layer, entry.field.name, head, slot)
    return owners


@pytest.mark.parametrize("order", envelope.ORDERS)
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 8), ("bfloat16", 4)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_entries_cover_each_local_byte_once_and_the_rest_is_padding(
    order, dtype, dim, tp
):
    made = group(dtype=dtype, dim=dim)
    topology = Topology(tp)
    for rank in range(tp):
        built = envelope.build(made, topology, rank, order)
        owners = owner_of_each_byte(built)
        assert owners.count(None) == built.padding_nbytes
        shard = topology.shard(made.fields[0], rank)
        heads = {owner[2] for owner in owners if owner is not None}
        assert heads == set(range(shard.start, shard.start + shard.count))


@pytest.mark.parametrize("order", envelope.ORDERS)
def test_offsets_strides_and_size_are_multiples_of_sixteen(order):
    built = envelope.build(
        group(dtype="bfloat16", dim=4, heads=3), Topology(), 0, order
    )
    assert built.nbytes % 16 == 0
    for entry in built.entries:
        assert entry.offset % 16 == 0
        assert entry.slot_stride % 16 == 0


@pytest.mark.parametrize("order", envelope.ORDERS)
def test_ranks_differ_in_their_heads_only(order):
    built = [envelope.build(group(), Topology(4), r, order) for r in range(4)]
    places = [[(e.offset, e.slot_stride, e.nheads) for e in b.entries] for b in built]
    assert all(place == places[0] for place in places)
    assert [b.entries[0].head0 for b in built] == [0, 1, 2, 3]


def test_orders_put_their_axes_where_they_say():
    made = group()
    row = 8 * 4
    head_major = envelope.build(made, Topology(), 0, "head_major")
    k0, v0, k1 = head_major.entries[:3]
    assert (k0.offset, v0.offset, k1.offset) == (0, T * row, 2 * T * row)
    assert k0.slot_stride == row and k0.nheads == 1
    token_major = envelope.build(made, Topology(), 0, "token_major")
    k, v = token_major.entries[:2]
    assert (k.nheads, k.slot_stride, v.offset) == (4, 4 * row, T * 4 * row)
    packed = envelope.build(made, Topology(), 0, "packed_nhd")
    k0, v0, k1 = packed.entries[:3]
    assert (v0.offset, k1.offset, k0.slot_stride) == (row, 2 * row, 8 * row)
    slot_major = envelope.build(made, Topology(), 0, "slot_major")
    assert slot_major.entries[0].slot_stride == made.record_nbytes


def test_an_order_without_a_bar_has_one_plane_that_is_the_page():
    for order in envelope.ORDERS:
        built = envelope.build(group(), Topology(2), 1, order)
        assert built.planes == (Plane(0, 0, built.nbytes),)
        assert built.plane_starts == (0,)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_an_array_a_layer_holds_the_page_of_a_group_of_that_layer(tp):
    made = group(layers=3, v_dim=4)
    for order in envelope.ORDERS:
        apart = envelope.build(made, Topology(tp), 0, envelope.apart(order, "layer"))
        alone = envelope.build(group(layers=1, v_dim=4), Topology(tp), 0, order)
        stride = alone.nbytes
        assert apart.planes == tuple(Plane(i, 0, stride) for i in range(3))
        assert apart.plane_starts == (0, stride, 2 * stride)
        assert apart.nbytes == 3 * stride
        for index, layer in enumerate(made.layers):
            for name in ("k", "v"):
                got = apart.entries_of(layer.name, name)
                want = alone.entries_of("l0", name)
                assert {e.plane.index for e in got} == {index}
                assert [(e.offset, e.slot_stride, e.nheads) for e in got] == [
                    (e.offset, e.slot_stride, e.nheads) for e in want
                ]


def laid_down_one_by_one(made, topology, places):
    """Walk every cell of every page in order, and say where each slot begins."""
    arrays, regions, page = places
    together = page[-1] == "head"
    rows = []
    for layer_at, layer in enumerate(made.layers):
        for field_at, field in enumerate(layer.fields):
            heads = topology.shard(field, 0).count
            for head in range(1 if together else heads):
                at = {"layer": layer_at, "field": field_at, "head": head}
                nbytes = field.head_nbytes * (heads if together else 1)
                rows.append((layer.name, field.name, at, -(-nbytes // 16) * 16))
    cells = [(row, slot) for row in rows for slot in range(made.page_size)]

    def place(cell):
        at = cell[0][2] | {"token": cell[1]}
        return [[at[axis] for axis in part] for part in (arrays, regions, page)]

    found, before, end = {}, None, 0
    for (layer, field, at, nbytes), slot in sorted(cells, key=place):
        here = place(((layer, field, at, nbytes), slot))[:2]
        if here != before:
            before, end = here, 0
        found[layer, field, at["head"], slot] = end
        end += nbytes
    return found


LINES = [" ".join(axes) for axes in itertools.permutations(envelope.AXES)]
LINES += ["layer | " + line for line in ("head field token", "token field head")]
LINES += ["layer | field | token head", "field | layer | head token"]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_slots_stand_where_laying_them_down_one_by_one_puts_them(line, page_size):
    made = group(layers=3, heads=4, dim=6, dtype="bfloat16", v_dim=3)
    made = group_layers(made.layers, page_size)[0]
    parts = [tuple(part.split()) for part in line.split("|")]
    places = (*parts[:-1], (), ())[:2] + (parts[-1],)
    num_pages = 7 if len(parts) == 3 else None
    for topology in (Topology(), Topology(2)):
        built = envelope.build(made, topology, 0, line, num_pages)
        found = laid_down_one_by_one(made, topology, places)
        for entry in built.entries:
            for slot in range(page_size):
                key = (entry.field.layer, entry.field.name, entry.head0, slot)
                assert entry.address(slot) == found[key]


def test_the_envelope_of_a_long_page_comes_at_once():
    made = group(layers=32, heads=8, dim=128, page_size=1 << 20)
    start = time.process_time()
    for order in envelope.ORDERS:
        built = envelope.build(made, Topology(), 0, order)
        assert built.nbytes == made.record_nbytes << 20
    assert time.process_time() - start < 2.0


def test_a_region_begins_behind_every_page_of_the_one_before():
    made = group(v_dim=4)
    built = envelope.build(made, Topology(), 0, "layer | field | token head", 10)
    k, v = T * 4 * 32, T * 4 * 16
    assert built.planes == (
        Plane(0, 0, k),
        Plane(0, 10 * k, v),
        Plane(1, 0, k),
        Plane(1, 10 * k, v),
    )
    assert built.planes[1].address(3) == 10 * k + 3 * v
    assert built.nbytes == 2 * (k + v)


@pytest.mark.parametrize(
    "order, num_pages", [("layer | field | token head", None), ("packed_nhd", 10)]
)
def test_regions_and_a_number_of_pages_come_together(order, num_pages):
    with pytest.raises(errors.ConfigError, match="exactly where an order has two bars"):
        envelope.build(group(), Topology(), 0, order, num_pages)


def test_keys_and_values_may_have_different_widths():
    made = group(dim=8, v_dim=4)
    built = envelope.build(made, Topology(2), 1, "head_major")
    assert made.record_nbytes == 2 * 4 * (32 + 16)
    assert built.nbytes == T * made.record_nbytes // 2


def test_a_page_of_one_token_has_an_envelope_in_every_order():
    made = group(page_size=1)
    for order in envelope.ORDERS:
        built = envelope.build(made, Topology(), 0, order)
        assert built.nbytes == made.record_nbytes


def test_an_order_that_is_no_permutation_is_refused():
    with pytest.raises(errors.ConfigError, match="names each of layer"):
        envelope.build(group(), Topology(), 0, "layer head token")
    with pytest.raises(errors.ConfigError, match="topology of 2"):
        envelope.build(group(), Topology(2), 2)


def test_asking_for_a_layer_that_is_not_there_names_it():
    built = envelope.build(group(), Topology(), 0)
    assert [e.head0 for e in built.entries_of("l1", "v")] == [0, 1, 2, 3]
    with pytest.raises(errors.InvalidId, match="layer 'l7'"):
        built.entries_of("l7", "k")
