"""What users of other canonical pages met, with kvmem's outcome.

Each test is a small scenario of a fault reported against vLLM's offloaded pages: the
wrong reading that its sizes allow is made here first, so that the test would notice it.
"""

import numpy as np
import pytest

from kvmem import canonical, errors, transfer
from kvmem.geometry import LayerSpec, Topology, group_layers
from kvmem.store import PageStore, chain_keys

CHUNK = 16


def exported(side, count=None, **options):
    count = len(side.records) if count is None else count
    return transfer.export_records(
        side.pages, side.page_ids, side.plan, count, **options
    )


def raw_pages(side):
    """Return each page of a sequence as its bytes lie, rank after rank."""
    return np.array(side.pages)[:, side.page_ids].transpose(1, 0, 2)


def test_rows_of_one_tp_are_never_read_as_those_of_another(build, oracle):
    """vLLM #55191: equal sizes, and TP 2 keeps rank-major what TP 1 keeps in order."""
    layers = [
        LayerSpec(f"l{i}", i, kv_heads=2, head_dim=1, dtype="float8_e5m2")
        for i in range(2)
    ]
    (group,) = group_layers(layers, page_size=1)
    logical = {
        (f"l{la}", field): np.array([[[2 * la + h + add] for h in range(2)]], np.uint8)
        for la in range(2)
        for field, add in (("k", 0), ("v", 16))
    }
    stored, plans, pools = {}, {}, {}
    for tp in (1, 2):
        plan = plans[tp] = canonical.plan(group, Topology(tp))
        pages = oracle.pages(group, logical, Topology(tp), "head_major")
        keys = [
            pages[rank, 0, entry.offset]
            for rank in range(tp)
            for entry in plan.envelope(rank).entries
            if entry.field.name == "k"
        ]
        stored[tp] = [int(key) for key in keys]
        pools[tp] = build.put(pages)
    assert stored == {1: [0, 1, 2, 3], 2: [0, 2, 1, 3]}
    records = [transfer.export_records(pools[tp], [0], plans[tp], 1) for tp in (1, 2)]
    assert records[0].tolist() == records[1].tolist() == [[0, 16, 1, 17, 2, 18, 3, 19]]
    with pytest.raises(errors.IncompatiblePlan, match="2 ranks with a plan for 1"):
        transfer.export_records(pools[2], [0], plans[1], 1)
    misread = records[0][:, [0, 1, 4, 5, 2, 3, 6, 7]]  # heads 0213
    objections = canonical.judge(records[0], misread, group)
    assert {each.law for each in objections} == {"placement"}


def test_a_page_in_one_order_is_converted_exactly_and_not_read_as_another(build):
    """vLLM #55904: token-major pages read head-major, of equal size, and wrong."""
    facts = {"layers": 1, "heads": 8, "dim": 16, "num_tokens": 16}
    written = build.side(Topology(1), "token_major", **facts)
    wanted = build.side(Topology(1), "split_hnd", **facts)
    as_they_lie, right = raw_pages(written), raw_pages(wanted)
    assert as_they_lie.shape == right.shape
    assert (as_they_lie == right).mean() < 0.08  # what a misreading keeps in place
    blank = build.side(Topology(1), "split_hnd", filled=False, **facts)
    pages = transfer.import_records(
        blank.pages, blank.page_ids, exported(written), blank.plan
    )
    converted = np.array(pages)[:, blank.page_ids].transpose(1, 0, 2)
    assert np.array_equal(converted, right)


def test_layer_major_and_slot_major_pages_of_one_size_meet_in_records(build):
    """vLLM #49440: rows of equal length, permuted by layer, under one name."""
    facts = {"layers": 3, "heads": 2, "dim": 16, "num_tokens": 16}
    by_layer = build.side(Topology(2), "head_major", **facts)
    by_slot = build.side(Topology(2), "slot_major", **facts)
    assert by_layer.plan.page_nbytes == by_slot.plan.page_nbytes
    assert sorted(raw_pages(by_layer).ravel()) == sorted(raw_pages(by_slot).ravel())
    assert np.array_equal(exported(by_layer), exported(by_slot))
    misread = transfer.export_records(
        by_slot.pages, by_slot.page_ids, by_layer.plan, 16
    )
    found = canonical.judge(by_layer.records, misread, by_layer.plan.group)
    assert {each.law for each in found} <= {"placement", "bytes"}
    assert {each.layer for each in found} == {"layers.0", "layers.1", "layers.2"}


def opened(root, group, **options):
    return PageStore.open(
        root,
        "weights",
        canonical.format_id((group,)),
        record_nbytes=group.record_nbytes,
        chunk_tokens=CHUNK,
        **options,
    )


def text(count):
    return np.random.default_rng(5).integers(0, 49_152, count, np.int32)


def test_a_hole_ends_the_usable_prefix_and_hides_nothing_behind_it(build, tmp_path):
    """vLLM #46971: of 200 chunks number 31 is missing."""
    group = build.group(layers=1, heads=1)
    tokens = text(200 * CHUNK)
    records = np.arange(200 * CHUNK, dtype=np.uint32).repeat(group.record_nbytes // 4)
    records = records.view(np.uint8).reshape(200 * CHUNK, group.record_nbytes)
    keys = chain_keys("m/f", tokens, CHUNK)

    def part(first, stop):
        span = slice(first * CHUNK, stop * CHUNK)
        return keys[first:stop], tokens[span], records[span]

    with opened(tmp_path, group) as store:
        store.put(*part(0, 31))
        store.put(*part(32, 200))
        found = store.get(keys, tokens)
        assert (found.num_hit, found.reason) == (31, "not_found")
        assert "chunk 31" in found.detail
        assert np.array_equal(found.records, records[: 31 * CHUNK])
        behind = store.get(*part(32, 200)[:2])  # the longest stretch that is held
        assert (behind.num_hit, behind.reason) == (168, None)
        assert np.array_equal(behind.records, records[32 * CHUNK :])
        assert store.contains(keys) == 31 and store.contains(keys[32:]) == 168
        assert store.put(*part(0, 200)).written == 1  # the hole alone is filled
        assert store.get(keys, tokens).num_hit == 200


@pytest.mark.parametrize("page_size", [784, 16, 1000])
def test_a_partial_page_is_kept_to_its_last_whole_chunk(build, tmp_path, page_size):
    """vLLM #49502: 900 tokens in pages of 784 hit 896, and not 784."""
    facts = {"layers": 1, "heads": 1, "num_tokens": 2 * page_size}
    if page_size == 16:
        facts["num_tokens"] = 912
    writer = build.side(Topology(1), page_size=page_size, **facts)
    tokens, whole = text(900), 900 // CHUNK * CHUNK
    assert whole == 896
    keys = chain_keys("m/f", tokens[:whole], CHUNK)
    with opened(tmp_path, writer.plan.group) as store:
        store.put(keys, tokens[:whole], exported(writer, whole))
        found = store.get(chain_keys("m/f", tokens, CHUNK), tokens[:whole])
    assert found.num_hit * CHUNK == 896
    reader = build.side(
        Topology(1), "slot_major", page_size=64, filled=False, layers=1, heads=1,
        num_tokens=960,
    )  # fmt: skip
    pages = transfer.import_records(
        reader.pages, reader.page_ids, found.records, reader.plan
    )
    again = transfer.export_records(pages, reader.page_ids, reader.plan, whole)
    assert np.array_equal(again, writer.records[:whole])


DEVICE_CASES = [(2, 4), (4, 2), (2, 1), (4, 4)]


@pytest.mark.parametrize("writer, reader", DEVICE_CASES)
def test_three_blocks_of_four_heads_cross_as_in_vllms_own_test(
    build, implementation, writer, reader
):
    facts = {"layers": 1, "heads": 4, "dim": 16, "num_tokens": 12}
    written = build.side(Topology(writer), "token_major", **facts)
    assert written.plan.page_nbytes * writer == 2048
    expected = build.side(Topology(reader), "token_major", **facts)
    blank = build.side(Topology(reader), "token_major", filled=False, **facts)
    pages = transfer.import_records(
        blank.pages,
        blank.page_ids,
        exported(written, implementation=implementation),
        blank.plan,
        implementation=implementation,
    )
    held = np.s_[:, blank.page_ids]
    assert np.array_equal(np.array(pages)[held], np.array(expected.pages)[held])


def test_pages_of_ranks_differ_in_every_place_of_these_tests(build):
    """Fills without a period: a periodic one hides a swapped rank in most pairs."""
    side = build.side(Topology(4), layers=2, heads=4, dim=16)
    pages = [page.tobytes() for rank in raw_pages(side) for page in rank]
    assert len(set(pages)) == len(pages)
    assert len(np.unique(side.records.view("u8"))) == side.records.nbytes // 8
