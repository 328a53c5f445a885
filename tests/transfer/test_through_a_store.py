"""From one topology through a store to another: what meets, and what never does."""

import numpy as np
import pytest

from kvmem import canonical, transfer
from kvmem.geometry import LayerSpec, Topology, group_layers
from kvmem.store import PageStore, chain_keys

CHUNK = 16
NUM_TOKENS = 48


def opened(root, group, model_id="weights-a", format_id=None, **options):
    return PageStore.open(
        root,
        model_id,
        format_id or canonical.format_id((group,)),
        record_nbytes=group.record_nbytes,
        chunk_tokens=CHUNK,
        **options,
    )


def asked(store):
    """Return keys and tokens of one text, as an engine of this store asks."""
    tokens = np.random.default_rng(3).integers(0, 49_152, NUM_TOKENS, np.int32)
    namespace = f"{store.facts.model_id}/{store.facts.format_id}"
    return chain_keys(namespace, tokens, CHUNK), tokens


def written(root, side):
    """Put a side's records; return them."""
    records = transfer.export_records(side.pages, side.page_ids, side.plan, NUM_TOKENS)
    with opened(root, side.plan.group) as store:
        store.put(*asked(store), records)
    return records


@pytest.mark.case("LAY-02")
def test_another_topology_hits_the_same_bytes_and_an_unknown_format_misses(
    build, tmp_path
):
    writer = build.side(Topology(1), "slot_major", page_size=8)
    records = written(tmp_path / "root", writer)
    reader = build.side(Topology(9), "head_major", page_size=2, filled=False)
    with opened(tmp_path / "root", reader.plan.group) as store:
        found = store.get(*asked(store))
    assert found.num_hit == NUM_TOKENS // CHUNK
    assert np.array_equal(found.records, records)
    pages = transfer.import_records(
        reader.pages, reader.page_ids, found.records, reader.plan
    )
    expected = build.side(Topology(9), "head_major", page_size=2)
    held = np.s_[:, reader.page_ids]
    assert np.array_equal(np.array(pages)[held], np.array(expected.pages)[held])
    private = f"private-tp1-{canonical.format_id((writer.plan.group,))}"
    with opened(tmp_path / "root", writer.plan.group, format_id=private) as store:
        found = store.get(*asked(store))
    assert found.num_hit == 0 and found.reason


def layers(dtype):
    spec = LayerSpec("layers.0", 0, kv_heads=3, head_dim=8, dtype=dtype)
    (group,) = group_layers([spec], page_size=4)
    return group


@pytest.mark.case("LAY-03")
def test_another_dtype_or_other_weights_miss_and_the_first_ones_still_hit(
    build, tmp_path
):
    side = build.side(Topology(3), layers=1, dtype="bfloat16")
    assert side.plan.group == layers("bfloat16")
    written(tmp_path / "root", side)
    for group, model_id in [
        (layers("float8_e4m3fn"), "weights-a"),
        (layers("float16"), "weights-a"),  # as wide, and of another meaning
        (layers("bfloat16"), "weights-b"),
    ]:
        with opened(tmp_path / "root", group, model_id) as store:
            found = store.get(*asked(store))
        assert found.num_hit == 0 and found.reason
    with opened(tmp_path / "root", layers("bfloat16")) as store:
        assert store.get(*asked(store)).num_hit == NUM_TOKENS // CHUNK
