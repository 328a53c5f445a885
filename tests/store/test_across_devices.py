"""Written on eight devices, read where there is one: nothing on disk knows a device."""

import hashlib
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvmem import canonical, mesh, store, transfer
from kvmem.geometry import LayerSpec, Topology, group_layers

TOKENS, PAGE = 24, 4


def layers(heads: int) -> list[LayerSpec]:
    return [LayerSpec(f"layers.{n}", n, "gqa", heads, 8) for n in range(2)]


def sharded(pages: np.ndarray, tp: int) -> jax.Array:
    grid = mesh.make(Topology(tp=tp))
    return jax.device_put(pages, NamedSharding(grid, PartitionSpec("tp")))


def put(root, group, logical, oracle, tp: int) -> np.ndarray:
    """Store the pages of `tp` devices; return the keys' tokens."""
    topology = Topology(tp=tp)
    plan = canonical.plan(group, topology, "head_major")
    pages = sharded(oracle.pages(group, logical, topology, "head_major"), tp)
    ids = np.arange(TOKENS // PAGE)
    records = transfer.export_records(pages, ids, plan, TOKENS)
    tokens = np.arange(TOKENS, dtype=np.int32)
    with store.PageStore.open(root, "m", "f", group.record_nbytes, PAGE) as st:
        st.put(store.chain_keys("m/f", tokens, PAGE), tokens, records)
    return tokens


@pytest.mark.case("PER-01")
def test_a_process_with_one_device_lists_and_loads_what_eight_wrote(
    tmp_path, oracle, run_python
):
    (group,) = group_layers(layers(8), PAGE)
    logical = oracle.logical(group, TOKENS)
    put(tmp_path / "root", group, logical, oracle, tp=8)
    expected = oracle.pages(group, logical, Topology(), "head_major")
    code = f"""
import hashlib, sys
import numpy as np
from kvmem import store
(row,) = store.inspect({str(tmp_path / "root")!r}, verify=True)
print(row.model_id, row.format_id, row.status, row.num_chunks, row.record_nbytes)
print(*row.arrays)
st = store.PageStore.open({str(tmp_path / "root")!r}, "m", "f", row.record_nbytes,
                          row.chunk_tokens, read_only=True)
tokens = np.arange({TOKENS}, dtype=np.int32)
records = st.get(store.chain_keys("m/f", tokens, {PAGE}), tokens).records
assert "jax" not in sys.modules and "orbax" not in sys.modules
import jax
from kvmem import canonical, transfer
from kvmem.geometry import LayerSpec, Topology, group_layers
assert jax.device_count() == 1
layers = [LayerSpec(f"layers.{{n}}", n, "gqa", 8, 8) for n in range(2)]
(group,) = group_layers(layers, {PAGE})
plan = canonical.plan(group, Topology(), "head_major")
pages = jax.numpy.zeros((1, {TOKENS // PAGE}, plan.page_nbytes), np.uint8)
ids = np.arange({TOKENS // PAGE})
pages = transfer.import_records(pages, ids, records, plan)
print(hashlib.sha256(np.asarray(pages).tobytes()).hexdigest())
"""
    said = run_python(code, XLA_FLAGS=None).split("\n")
    chunk_nbytes = PAGE * group.record_nbytes
    assert said[0] == f"m f ok {TOKENS // PAGE} {group.record_nbytes}"
    shape = f"({TOKENS // PAGE * chunk_nbytes},)"
    assert said[1] == (
        f"ArrayReport(path='orbax/records', dtype='uint8', shape={shape})"
    )
    assert said[2] == hashlib.sha256(expected.tobytes()).hexdigest()


@pytest.mark.case("PER-02")
def test_what_tp_4_stored_is_read_at_tp_2_with_the_sharding_asked_for(tmp_path, oracle):
    started = time.monotonic()
    (group,) = group_layers(layers(4), PAGE)
    logical = oracle.logical(group, TOKENS)
    tokens = put(tmp_path / "root", group, logical, oracle, tp=4)
    with store.PageStore.open(
        tmp_path / "root", "m", "f", group.record_nbytes, PAGE, read_only=True
    ) as st:
        found = st.get(store.chain_keys("m/f", tokens, PAGE), tokens)
    plan = canonical.plan(group, Topology(tp=2), "head_major")
    expected = oracle.pages(group, logical, Topology(tp=2), "head_major")
    empty = sharded(np.zeros_like(expected), 2)
    ids = np.arange(TOKENS // PAGE)
    pages = transfer.import_records(empty, ids, found.records, plan)
    np.testing.assert_array_equal(np.asarray(pages), expected)
    assert pages.sharding.is_equivalent_to(sharded(expected, 2).sharding, 3)
    assert time.monotonic() - started < 30
