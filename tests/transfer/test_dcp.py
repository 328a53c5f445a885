"""Tokens dealt to ranks: what each writes is certified, and copies are elected once."""

import dataclasses

import jax
import numpy as np
import pytest

from kvmem import canonical, transfer
from kvmem import mesh as meshes
from kvmem.errors import CorruptPage
from kvmem.geometry import LayerSpec, Spread, Topology, group_layers
from kvmem.model import attention

SPECS = [LayerSpec("a", 0, kv_heads=2, head_dim=2, dtype="float32")]


def full(topology, page_size=4):
    (group,) = group_layers(SPECS, page_size)
    return canonical.plan(group, topology)


def window(topology, domain="target"):
    specs = [dataclasses.replace(spec, window=8) for spec in SPECS]
    (group,) = group_layers(specs, 4, domain=domain)
    return canonical.plan(group, topology)


@pytest.mark.parametrize(
    ("topology", "on_mesh"),
    [(Topology(2, 2, 2), True), (Topology(1, 3), False)],
    ids=["mesh", "stacked"],
)
def test_a_write_path_that_deals_tokens_to_ranks_is_certified(topology, on_mesh):
    plan = full(topology)
    write = attention.writer(Spread.of(plan.group, topology))
    mesh = meshes.make(topology) if on_mesh else None
    assert transfer.certify(plan, write, mesh=mesh, deals=True) == ()


@pytest.mark.parametrize(
    "spread",
    [Spread(2, 1), Spread(2, 4), Spread(2, is_whole=True)],
    ids=["narrow", "wide", "whole"],
)
def test_tokens_dealt_by_another_rule_are_named(spread):
    plan = full(Topology(1, 2, 2))
    found = transfer.certify(plan, attention.writer(spread), deals=True)
    assert {"layer a" in str(each) for each in found} == {True}


def filled(plan, seed=0):
    """Pages of random bytes, copies of a head equal on every rank that holds them."""
    records = np.random.default_rng(seed).integers(0, 256, (8, plan.record_nbytes))
    records = records.astype(np.uint8)
    pages = np.zeros((plan.topology.ranks, 3, plan.page_nbytes), np.uint8)
    ids = [2, 0][: 8 // plan.page_tokens]
    pages = transfer.import_records(jax.device_put(pages), ids, records, plan)
    return pages, ids, records


@pytest.mark.case("LAY-08")
@pytest.mark.parametrize("domain", ["target", "draft"])
def test_a_group_kept_whole_has_one_writer_a_byte_among_its_token_shards(domain):
    plan = window(Topology(2, 2), domain)
    assert plan.page_tokens == 4  # slot = position: no rank's page holds more
    assert canonical.check(plan) == ()
    written = [sum(run.nbytes * run.count for run in own) for own in plan.writers()]
    assert written == [4 * plan.record_nbytes // 4] * 4
    pages, ids, records = filled(plan)
    again = transfer.export_records(pages, ids, plan, 8, verify_replicas=True)
    np.testing.assert_array_equal(again, records)
    held = np.asarray(pages).reshape(2, 2, 3, -1)
    np.testing.assert_array_equal(held[:, 0], held[:, 1])


def test_a_token_shard_whose_copy_differs_is_named_with_its_twin():
    plan = window(Topology(2, 2))
    pages, ids, _ = filled(plan)
    broken = np.array(pages)
    broken[3, 2, 5] ^= 1
    with pytest.raises(CorruptPage, match=r"rank 3 differs from ranks \[2\]"):
        transfer.export_records(
            jax.device_put(broken), ids, plan, 8, verify_replicas=True
        )


@pytest.mark.parametrize("implementation", ["host", "device"])
def test_a_window_on_token_shards_is_read_by_a_single_rank(implementation):
    wrote, reads = window(Topology(2, 2)), window(Topology())
    pages, ids, records = filled(wrote)
    found = transfer.export_records(pages, ids, wrote, 8, implementation=implementation)
    blank = jax.device_put(np.zeros((1, 3, reads.page_nbytes), np.uint8))
    there = transfer.import_records(
        blank, [1, 2], found, reads, implementation=implementation
    )
    back = transfer.export_records(there, [1, 2], reads, 8)
    np.testing.assert_array_equal(back, records)
