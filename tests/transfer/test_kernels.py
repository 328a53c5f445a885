"""What device kernels move by a plan's integers is what the executors move."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import canonical, errors, transfer
from kvmem.geometry import LayerSpec, Part, Rope, Topology, group_layers
from pallas_kernels import (
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


def layout_of(runs):
    return Layout(runs.nbytes, runs.slot_stride, runs.slots)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("order", ["head_major", "token_major", "packed_nhd"])
def test_records_of_a_plan_are_those_of_its_runs(order, tp, build):
    side = build.side(
        Topology(tp), order, page_size=PAGE, heads=2, dim=64, dtype="bfloat16"
    )
    pages, found = np.asarray(side.pages), np.zeros_like(side.records[:TOKENS])
    for rank in range(tp):
        for runs in transfer.tables(side.plan, rank):
            arrays = found, pages[rank], side.page_ids, runs.table, np.int32(0)
            layout = layout_of(runs)
            assert export_records.supports(*arrays, layout=layout) is None
            found = export_records.host(*arrays, layout=layout)
    assert np.array_equal(found, side.records[:TOKENS])


def test_rows_of_several_widths_are_several_tables_and_fields_are_asked_for_alone():
    parts = Part("latent", 0, 64, "bfloat16"), Part("scale", 0, 4, "float32", True)
    layers = [
        LayerSpec(f"l{i}", i, kind="mla", parts=parts, scale=1.0) for i in range(3)
    ]
    (group,) = group_layers(layers, PAGE)
    plan = canonical.plan(group, Topology())
    wide, narrow = transfer.tables(plan)
    assert (wide.nbytes, narrow.nbytes) == (128, 16)
    assert wide.table[:, 1].tolist() == [0, 144, 288]
    assert narrow.table[:, 1].tolist() == [128, 272, 416]
    (alone,) = transfer.tables(plan, fields=("scale",))
    assert np.array_equal(alone.table, narrow.table)


@pytest.mark.parametrize(
    ("topology", "order", "why"),
    [
        (Topology(2, 2, 1), "head_major", "tokens go by turns to 2 ranks"),
        (Topology(1), "layer | head field token", "parted over 2 places"),
    ],
)
def test_pages_whose_slots_are_no_tokens_in_a_row_are_refused(topology, order, why):
    plan = canonical.plan(layers_of(2), topology, order)
    with pytest.raises(errors.IncompatiblePlan, match=why):
        transfer.tables(plan)


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
    (keys,), (values,) = (transfer.tables(plan, fields=(name,)) for name in "kv")
    layout = layout_of(keys)
    first, facts = np.int32(0), {"style": ROPE.style, "dtype": "bfloat16"}
    found = interpret.run(
        import_turned.kernel,
        *(np.zeros_like(want), IDS, keys.table, records, first, cos, sin),
        layout=layout,
        **facts,
    )
    found = import_records.host(
        np.array(found), IDS, values.table, records, first, layout=layout
    )
    exact, near = (part.view(jnp.bfloat16).astype(np.float32) for part in (want, found))
    assert np.abs(near - exact).max() <= np.abs(exact).max() / 128  # one step of bf16
    assert (near == exact).mean() > 0.99
    assert (found != 0).any() and not np.array_equal(turned, records)


def distances():
    deltas = np.random.default_rng(5).integers(-4096, 4096, TOKENS)
    deltas[::5] = 0
    return deltas
