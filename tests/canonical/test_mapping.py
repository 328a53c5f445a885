"""Runs against tables made elsewhere, and against pages sliced from a logical array.

The tables are those of vLLM's canonical pages, recomputed by an index oracle: one
layer, 4 tokens, 64-byte heads. A run is (local, canonical, nbytes, count, local stride,
canonical stride); a single fragment is written without strides.
"""

import numpy as np
import pytest

from kvmem import canonical, errors
from kvmem.canonical.mapping import RECORD
from kvmem.geometry import Topology
from kvmem.geometry.envelope import ORDERS

FAMILIES = {
    "split NHD": "token_major",
    "split HND": "split_hnd",
    "packed NHD": "packed_nhd",
    "packed HND": "packed_hnd",
}
EIGHT_HEADS = {
    ("split NHD", 4, 1): [(0, 128, 128, 4, 128, 512), (512, 2176, 128, 4, 128, 512)],
    ("split NHD", 4, 2): [(0, 256, 128, 4, 128, 512), (512, 2304, 128, 4, 128, 512)],
    ("split NHD", 2, 1): [(0, 256, 256, 4, 256, 512), (1024, 2304, 256, 4, 256, 512)],
    ("split NHD", 1, 0): [(0, 0, 4096, 1)],
    ("split HND", 4, 1): [(0, 512, 512, 1), (512, 2560, 512, 1)],
    ("split HND", 4, 2): [(0, 1024, 512, 1), (512, 3072, 512, 1)],
    ("split HND", 2, 1): [(0, 1024, 1024, 1), (1024, 3072, 1024, 1)],
    ("split HND", 1, 0): [(0, 0, 4096, 1)],
    ("packed NHD", 4, 1): [(0, 256, 256, 4, 256, 1024)],
    ("packed NHD", 4, 2): [(0, 512, 256, 4, 256, 1024)],
    ("packed NHD", 2, 1): [(0, 512, 512, 4, 512, 1024)],
    ("packed NHD", 1, 0): [(0, 0, 4096, 1)],
    ("packed HND", 4, 1): [(0, 1024, 1024, 1)],
    ("packed HND", 4, 2): [(0, 2048, 1024, 1)],
    ("packed HND", 2, 1): [(0, 2048, 2048, 1)],
    ("packed HND", 1, 0): [(0, 0, 4096, 1)],
}
# Digests of each rank's page when the canonical page is S(4096).
DIGESTS = {
    ("split NHD", 2): "f9893101b7b7 e8529be7e1f2",
    ("split NHD", 4): "c8991f142a79 ac14f8e900e8 0729a8daa79d 408b36918c7b",
    ("split NHD", 8): "90ee09ed24a0 3794f8ca76df ae3c5c9539f1 076e1ac5cf79 "
    "b3ee32def2e0 9349a7ca1c66 3e004d8f71dd 798ee733f2f8",
    ("split HND", 2): "449f097abed3 e32efdfea6a2",
    ("split HND", 4): "2c43ced79c43 94f1db1bd902 d562a6415188 d05f8467c0c6",
    ("split HND", 8): "a481112ad5c3 577a170414d4 0d61b07e3be1 db362330a82c "
    "e2d79e79f5ba 67f296236ce3 8fe1f4e1085b 244d701c801b",
    ("packed NHD", 2): "9ffbae571c93 d7ceab95354e",
    ("packed NHD", 4): "7aa263d3ec4a 5174f4d2e65e 7b681afaebce 713886ec3b0f",
    ("packed NHD", 8): "d8dc77ff2bd2 ee047354c953 9d8bd94dd2dd 05246a1f3729 "
    "70a83f68c853 9a4082ceea6a 12212725bfa2 ea36dcdb0509",
    ("packed HND", 2): "ca8a241b09e7 a60c8905d4fd",
    ("packed HND", 4): "cbda13fae46f b496867a7e96 c9cf93d8b073 061b6e290b2c",
    ("packed HND", 8): "f305574eec5b b3bc25728379 c72bb776c4b9 49458dcc6fa6 "
    "402f4de21fb4 bbcb4c7ff4ed 5b4a10d03d20 c0779a2ad421",
    ("split NHD", 1): "85f6dd588e3b",
    ("split HND", 1): "85f6dd588e3b",
    ("packed NHD", 1): "85f6dd588e3b",
    ("packed HND", 1): "85f6dd588e3b",
}


def table(runs):
    rows = []
    for r in runs:
        row = (r.local_offset, r.canonical_offset, r.nbytes, r.count)
        strides = (r.local_stride, r.canonical_stride)
        rows.append(row if r.count == 1 else row + strides)
    return rows


@pytest.mark.parametrize("family, tp, rank", EIGHT_HEADS)
def test_the_runs_of_a_family_are_those_of_the_table(build, family, tp, rank):
    order = FAMILIES[family]
    runs = canonical.mapping(build.group(), Topology(tp), rank, order, order)
    assert table(runs) == EIGHT_HEADS[family, tp, rank]


@pytest.mark.parametrize("tp, rank", [(4, 1), (4, 2), (2, 1), (1, 0)])
def test_token_records_of_one_layer_are_the_packed_token_major_family(build, tp, rank):
    runs = canonical.mapping(build.group(), Topology(tp), rank, "packed_nhd", RECORD)
    assert table(runs) == EIGHT_HEADS["packed NHD", tp, rank]


@pytest.mark.parametrize("rank", range(4))
def test_neighbouring_ranks_are_replicas_when_tp_exceeds_the_heads(build, rank):
    group, order = build.group(heads=2), "token_major"
    runs = canonical.mapping(group, Topology(4), rank, order, order)
    head = 64 * (rank // 2)
    assert table(runs) == [
        (0, head, 64, 4, 64, 128),
        (256, 512 + head, 64, 4, 64, 128),
    ]
    if rank == 2:
        pairs = [fragment for run in runs for fragment in run.fragments()]
        assert pairs[:4] == [(0, 64, 64), (64, 192, 64), (128, 320, 64), (192, 448, 64)]


def test_a_page_is_copied_fragment_by_fragment_as_the_table_says(build):
    group, order = build.group(), "token_major"
    runs = canonical.mapping(group, Topology(4), 2, order, order)
    fragments = [fragment for run in runs for fragment in run.fragments()]
    assert [f[0] for f in fragments] == list(range(0, 1024, 128))
    expected = [256, 768, 1280, 1792, 2304, 2816, 3328, 3840]
    assert [f[1] for f in fragments] == expected
    assert {f[2] for f in fragments} == {128}


@pytest.mark.parametrize("family, tp", DIGESTS)
def test_every_rank_of_a_family_holds_the_golden_bytes(build, oracle, family, tp):
    order, whole = FAMILIES[family], oracle.stream(4096).tobytes()
    digests = []
    for rank in range(tp):
        page = bytearray(4096 // tp)
        runs = canonical.mapping(build.group(), Topology(tp), rank, order, order)
        build.scatter(runs, whole, page)
        digests.append(build.digest(page))
    assert digests == DIGESTS[family, tp].split()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_golden_bytes_hold_for_token_records(build, oracle, tp):
    plan = canonical.plan(build.group(), Topology(tp), "packed_nhd")
    whole, gathered = oracle.stream(4096).tobytes(), bytearray(4096)
    digests = []
    for rank in range(tp):
        page = bytearray(4096 // tp)
        build.scatter(plan.runs[rank], whole, page)
        build.gather(plan.writers()[rank], bytes(page), gathered)
        digests.append(build.digest(page))
    assert digests == DIGESTS["packed NHD", tp].split()
    assert len(set(digests)) == tp
    assert gathered == whole


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize(
    "topology",
    [Topology(1), Topology(2), Topology(3), Topology(6), Topology(12)]
    + [Topology(3, 2, 1), Topology(2, 2, 4), Topology(1, 3, 2)],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_page_sliced_from_the_model_becomes_its_records(
    build, oracle, topology, order, page_size
):
    if topology.dcp > 1 and page_size % topology.interleave:
        pytest.skip("an interleave longer than the page is refused")
    # Widths that are no multiples of 16 have padding in pages and none in records.
    group = build.group(3, 6, dim=9, v_head_dim=5, page_size=page_size)
    logical = oracle.logical(group, page_size * topology.dcp)
    expected = oracle.records(group, logical)
    gathered = bytearray(expected.size)
    plan = canonical.plan(group, topology, order)
    for rank in range(topology.ranks):
        page = oracle.page(group, logical, topology, rank, order)
        assert len(page) == plan.page_nbytes
        build.gather(plan.writers()[rank], page, gathered)
        seen = bytearray(expected.size)
        build.gather(plan.runs[rank], page, seen)
        mine = np.frombuffer(bytes(seen), np.uint8).reshape(expected.shape)
        held = mine != 0
        assert np.array_equal(mine[held], expected[held])
    assert gathered == expected.tobytes()


def records_of(build, oracle, logical, topology, page_size):
    plan = canonical.plan(build.group(), topology, "token_major", page_size)
    page_nbytes = plan.page_tokens * plan.record_nbytes
    for number in range(8 // plan.page_tokens):
        gathered = bytearray(page_nbytes)
        for rank in range(topology.ranks):
            page = oracle.page(
                plan.group, logical, topology, rank, "token_major", number
            )
            build.gather(plan.writers()[rank], page, gathered)
        yield bytes(gathered)


@pytest.mark.parametrize("tp", [1, 2, 16])
def test_records_of_a_page_are_those_of_its_halves_end_to_end(build, oracle, tp):
    logical = oracle.logical(build.group(), 8)
    (whole,) = records_of(build, oracle, logical, Topology(tp), page_size=8)
    halves = list(records_of(build, oracle, logical, Topology(tp), page_size=4))
    assert b"".join(halves) == whole
    (sharded,) = records_of(build, oracle, logical, Topology(tp, 2), page_size=4)
    assert sharded == whole


def test_an_interleave_that_cuts_a_page_is_refused_with_those_that_do_not(build):
    group = build.group(page_size=6)
    with pytest.raises(errors.IncompatiblePlan, match="interleave 1, 2, 3, 6"):
        canonical.mapping(group, Topology(2, 2, 4), 0)


@pytest.mark.case("LAY-13")
def test_heads_that_tp_neither_divides_nor_multiplies_are_refused(build):
    group = build.group(heads=6)
    with pytest.raises(errors.IncompatiblePlan, match="6 KV heads.*TP 4") as refusal:
        canonical.plan(group, Topology(4))
    assert "TP 1, 2, 3, 6 or a multiple of 6" in str(refusal.value)
    for tp in (1, 2, 3, 6, 12):
        assert canonical.plan(group, Topology(tp)).topology.tp == tp


@pytest.mark.case("LAY-06")
def test_a_record_is_equally_long_at_every_tp(build):
    group = build.group(layers=3, heads=4)
    plans = [canonical.plan(group, Topology(tp)) for tp in (1, 2, 4)]
    assert {p.record_nbytes for p in plans} == {3 * 4 * 2 * 64}
