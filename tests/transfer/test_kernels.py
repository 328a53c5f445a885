"""What device kernels move by a plan's integers is what the executors move."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, transfer
from kvmem.geometry import LayerSpec, Rope, Topology, envelope, group_layers
from pallas_kernels import (
    dispatch,
    export_records,
    import_records,
    import_turned,
    interpret,
    rotation,
)
from pallas_kernels.records import Layout

ROPE = Rope(theta=100.0)
PAGE, TOKENS, IDS = 16, 27, np.int32([3, 1])


def layers_of(count=1):
    specs = [
        LayerSpec(f"a{i}", i, kv_heads=2, head_dim=64, dtype="bfloat16", rope=ROPE)
        for i in range(count)
    ]
    (group,) = group_layers(specs, PAGE)
    return group


def tables(group, order, name=None):
    """Return {Layout: i32[K, 2]} of a rank's page: a run a layer, field and head."""
    built = envelope.build(group, Topology(), 0, order)
    whole = canonical.canonical_envelope(group, 1).entries
    record = {(e.field.layer, e.field.name, e.head0): e.offset for e in whole}
    found = collections.defaultdict(list)
    for entry in built.entries:
        if name not in (None, entry.field.name):
            continue
        nbytes = entry.field.head_nbytes
        for head in range(entry.nheads):
            at = entry.offset + head * nbytes
            key = entry.field.layer, entry.field.name, entry.head0 + head
            found[Layout(nbytes, entry.slot_stride, PAGE)].append([at, record[key]])
    return {layout: np.int32(rows) for layout, rows in found.items()}, built.nbytes


@pytest.mark.parametrize("order", ["head_major", "token_major", "packed_nhd"])
def test_records_of_a_plan_are_those_of_its_runs(order, oracle):
    group = layers_of(2)
    layouts, nbytes = tables(group, order)
    plan = canonical.plan(group, Topology(), order)
    pages = oracle.stream(5 * nbytes).reshape(5, nbytes)
    want = transfer.export_records(jnp.asarray(pages[None]), IDS, plan, TOKENS)
    found = np.zeros_like(want)
    for layout, table in layouts.items():
        found = export_records.host(
            found, pages, IDS, table, np.int32(0), layout=layout
        )
        shapes = found, pages, IDS, table, np.int32(0)
        assert dispatch.choose("export_records", *shapes, layout=layout).reason
        assert export_records.supports(*shapes, layout=layout) is None
    assert np.array_equal(found, want)


def test_records_that_turn_on_their_way_are_those_that_were_turned_before():
    group, order = layers_of(), "head_major"
    rng, delta = np.random.default_rng(4), distances()
    rows = rng.standard_normal((TOKENS, group.record_nbytes // 2))
    records = rows.astype(jnp.bfloat16).view(np.uint8)
    plan = canonical.plan(group, Topology(), order)
    blank = jnp.zeros((1, 5, plan.page_nbytes), jnp.uint8)
    turned = transfer.rerotate(records, group, delta)
    want = np.asarray(transfer.import_records(blank, IDS, turned, plan))[0]

    by_slot = np.zeros((len(IDS), PAGE), np.int64)
    by_slot.reshape(-1)[:TOKENS] = delta
    cos, sin = rotation.tables(by_slot, ROPE.inverse_frequencies(64))
    ((layout, keys),) = tables(group, order, "k")[0].items()
    ((_, values),) = tables(group, order, "v")[0].items()
    first, facts = np.int32(0), {"style": ROPE.style, "dtype": "bfloat16"}
    found = interpret.run(
        import_turned.kernel,
        *(np.zeros_like(want), IDS, keys, records, first, cos, sin),
        layout=layout,
        **facts,
    )
    found = import_records.host(
        np.array(found), IDS, values, records, first, layout=layout
    )
    exact, near = (part.view(jnp.bfloat16).astype(np.float32) for part in (want, found))
    assert np.abs(near - exact).max() <= np.abs(exact).max() / 128  # one step of bf16
    assert (near == exact).mean() > 0.99
    assert (found != 0).any() and not np.array_equal(turned, records)


def distances():
    deltas = np.random.default_rng(5).integers(-4096, 4096, TOKENS)
    deltas[::5] = 0
    return deltas
