"""From one topology through a store to another: what meets, and what never does."""

import time

import numpy as np
import pytest

from kvmem import canonical, errors, transfer
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


@pytest.mark.case("PER-02")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_what_four_devices_stored_is_sharded_as_two_ask(build, tmp_path, kind):
    """Six pages of 4 tokens, 8 heads of 16, keys and values: TP 4, then TP 2."""
    started = time.monotonic()
    facts = {"layers": 1, "heads": 8, "dim": 16, "num_tokens": 24}
    writer = build.side(Topology(4), place=f"4 {kind}", **facts)
    reader = build.side(Topology(2), place=f"2 {kind}", filled=False, **facts)
    assert len(writer.page_ids) == 6
    tokens = np.arange(24, dtype=np.int32)
    keys = chain_keys("m/f", tokens, 8)
    options = {"record_nbytes": writer.plan.record_nbytes, "chunk_tokens": 8}
    records = transfer.export_records(writer.pages, writer.page_ids, writer.plan, 24)
    with PageStore.open(tmp_path, "m", "f", **options) as store:
        store.put(keys, tokens, records)
    with PageStore.open(tmp_path, "m", "f", **options, read_only=True) as store:
        found = store.get(keys, tokens)
    asked = reader.pages.sharding
    pages = transfer.import_records(
        reader.pages, reader.page_ids, found.records, reader.plan
    )
    expected = build.side(Topology(2), **facts)
    held = np.s_[:, reader.page_ids]
    assert np.array_equal(np.array(pages)[held], np.array(expected.pages)[held])
    assert pages.sharding == asked and len(pages.sharding.device_set) == 2
    assert time.monotonic() - started < 30


@pytest.mark.case("PER-12")
@pytest.mark.parametrize("num_pages", [3, 9])
def test_six_pages_are_never_read_into_three_or_nine(build, tmp_path, num_pages):
    """Refused with both sizes, at every step of the way; no byte moves."""
    side = build.side(Topology(3), num_tokens=24, dtype="float32")
    assert len(side.page_ids) == 6
    tokens = np.arange(24, dtype=np.int32)
    keys = chain_keys("m/f", tokens, 4)
    other = np.arange(4 * num_pages, dtype=np.int32)
    with PageStore.open(
        tmp_path, "m", "f", record_nbytes=side.plan.record_nbytes, chunk_tokens=4
    ) as store:
        store.put(keys, tokens, side.records)
        with pytest.raises(errors.FormatMismatch, match=r"6 keys.*\(6, 4\)"):
            store.get(keys, other.reshape(num_pages, 4))
        found = store.get(keys, tokens)
    before = np.array(side.pages)
    out = np.zeros((4 * num_pages, side.plan.record_nbytes), np.uint8)
    sizes = rf"\({4 * num_pages}, {out.shape[1]}\).*\(24, {out.shape[1]}\)"
    with pytest.raises(errors.FormatMismatch, match=sizes):
        transfer.export_records(side.pages, side.page_ids, side.plan, 24, out=out)
    assert not out.any()
    if num_pages == 3:
        with pytest.raises(errors.InvalidId, match="24 from 3 pages"):
            transfer.import_records(
                side.pages, side.page_ids[:3], found.records, side.plan
            )
    assert np.array_equal(np.array(side.pages), before)


@pytest.mark.case("PER-12")
def test_float32_records_are_never_read_as_bfloat16(build, tmp_path):
    """Another width is refused with both numbers, an equal one is another format."""
    wide = build.side(Topology(3), dtype="float32")
    narrow = build.side(Topology(3), dtype="bfloat16", filled=False)
    with pytest.raises(errors.FormatMismatch, match="384 bytes a row.*is 192 bytes"):
        transfer.import_records(
            narrow.pages, narrow.page_ids, wide.records, narrow.plan
        )
    with pytest.raises(errors.FormatMismatch, match="a cast would change them"):
        transfer.import_records(
            wide.pages, wide.page_ids, wide.records.view(np.float32), wide.plan
        )
    as_wide = build.side(Topology(3), dtype="bfloat16", dim=16, filled=False)
    assert as_wide.plan.record_nbytes == wide.plan.record_nbytes
    written(tmp_path / "root", wide)
    with opened(tmp_path / "root", as_wide.plan.group) as store:
        keys, tokens = asked(store)
        assert (store.get(keys, tokens).num_hit, store.contains(keys)) == (0, 0)
