"""Whole-page families as canonical sides, token shards and replicated rows.

A family is an order like any other. Its tables and digests were made by an index
oracle for vLLM's canonical pages: one layer, 4 slots, rows of 64 bytes; "TP t, DCP d"
there is Topology(t // d, d) here.
"""

import dataclasses
import itertools

import pytest

from kvmem import canonical
from kvmem.canonical.mapping import RECORD
from kvmem.geometry import Field, Lifecycle, LifecycleGroup, Topology

FAMILIES = ["token_major", "split_hnd", "packed_nhd", "packed_hnd"]
SHARD_DIGESTS = {  # S(2048), 2 heads, TP 4, DCP 2: ranks 0..3
    ("token_major", 1): "0fa68d36e6eb 51cc1be7cc2c 0df79d7656e4 dd035ac89b99",
    ("token_major", 2): "1fe36bbc9dff c2f7a5ec604b 625daded77cf a55333783de7",
    ("token_major", 4): "7ada709d02b0 01b35278b91b e2f06e496731 fc434a5058df",
    ("packed_hnd", 1): "5674c7812d73 defaee32cc77 c6218e09f572 a1c95ce7ab65",
}
LATENT_DIGESTS = {  # S(512), one row of 64 bytes a token, DCP 2: ranks 0, 1
    1: "dcd96cda0f32 7dacd4fbccad",
    2: "3c0ea2c3dc2d 9bc8160a964c",
    4: "2a653fb5cf1d c1213a0d86b3",
}


@dataclasses.dataclass(frozen=True)
class Latent:
    """A layer of replicated rows, one a token, the same on every rank."""

    fields: tuple[Field, ...]
    name: str = "latent"
    index: int = 0


@pytest.fixture
def latent():
    field = Field("latent", "row", heads=0, head_nbytes=64, dtype="float8_e4m3fn")
    return LifecycleGroup("full", "target", Lifecycle("full"), (Latent((field,)),), 4)


def fragments(runs):
    return [fragment for run in runs for fragment in run.fragments()]


def pages_of(build, whole, group, topology, order, canonical_order):
    """Return each rank's page of a canonical page."""
    pages = []
    for rank in range(topology.ranks):
        runs = canonical.mapping(group, topology, rank, order, canonical_order)
        page = bytearray(sum(run.total_nbytes for run in runs))
        build.scatter(runs, whole, page)
        pages.append(bytes(page))
    return pages


@pytest.mark.parametrize("order, interleave", SHARD_DIGESTS)
def test_token_shards_of_a_family_hold_the_golden_bytes(
    build, oracle, order, interleave
):
    topology, whole = Topology(2, 2, interleave), oracle.stream(2048).tobytes()
    pages = pages_of(build, whole, build.group(heads=2), topology, order, order)
    digests = SHARD_DIGESTS[order, interleave].split()
    assert [build.digest(page) for page in pages] == digests


@pytest.mark.parametrize("rank, first", [(0, 0), (1, 128), (2, 64), (3, 192)])
def test_a_token_shards_fragments_are_those_of_the_table(build, rank, first):
    group, order = build.group(heads=2), "token_major"
    found = fragments(canonical.mapping(group, Topology(2, 2), rank, order, order))
    keys = [(64 * i, first + 256 * i, 64) for i in range(4)]
    values = [(256 + local, 1024 + whole, 64) for local, whole, _ in keys]
    assert found == keys + values


def test_replicas_hold_one_page_and_share_its_writing(build, oracle):
    group, whole = build.group(heads=2), oracle.stream(1024).tobytes()
    pages = pages_of(build, whole, group, Topology(4), "token_major", "token_major")
    assert pages[0] == pages[1] != pages[2] == pages[3]
    plan = canonical.plan(group, Topology(4), "token_major")
    written = [sum(run.total_nbytes for run in runs) for runs in plan.writers()]
    assert written == [256] * 4  # half of a page of 512 bytes each
    gathered = bytearray(1024)
    records = oracle.stream(1024).tobytes()
    for rank, runs in enumerate(plan.writers()):
        page = bytearray(512)
        build.scatter(plan.runs[rank], records, page)
        build.gather(runs, bytes(page), gathered)
    assert gathered == records


def test_a_replicated_row_stands_once_and_is_whole_on_every_rank(latent):
    for rank in range(2):
        runs = canonical.mapping(latent, Topology(2), rank, "packed_nhd", RECORD)
        assert fragments(runs) == [(0, 0, 256)]
    plan = canonical.plan(latent, Topology(2))
    assert plan.record_nbytes == 64
    written = [sum(run.total_nbytes for run in runs) for runs in plan.writers()]
    assert written == [128, 128]


LATENT_RUNS = {
    (1, 0): [(0, 0, 64), (64, 128, 64), (128, 256, 64), (192, 384, 64)],
    (1, 1): [(0, 64, 64), (64, 192, 64), (128, 320, 64), (192, 448, 64)],
    (2, 0): [(0, 0, 128), (128, 256, 128)],
    (2, 1): [(0, 128, 128), (128, 384, 128)],
    (4, 0): [(0, 0, 256)],
    (4, 1): [(0, 256, 256)],
}


@pytest.mark.parametrize("interleave, rank", LATENT_RUNS)
def test_a_replicated_rows_token_shards_are_those_of_the_table(
    latent, interleave, rank
):
    topology = Topology(1, 2, interleave)
    runs = canonical.mapping(latent, topology, rank, "packed_nhd", RECORD)
    assert fragments(runs) == LATENT_RUNS[interleave, rank]


@pytest.mark.parametrize("interleave", LATENT_DIGESTS)
def test_a_replicated_rows_token_shards_hold_the_golden_bytes(
    build, oracle, latent, interleave
):
    whole = oracle.stream(512).tobytes()
    topology = Topology(1, 2, interleave)
    pages = pages_of(build, whole, latent, topology, "packed_nhd", RECORD)
    digests = LATENT_DIGESTS[interleave].split()
    assert [build.digest(page) for page in pages] == digests


@pytest.mark.parametrize("order", FAMILIES)
@pytest.mark.parametrize(
    "writer, reader", list(itertools.product([1, 2, 4, 8], repeat=2))
)
def test_what_any_tp_writes_any_other_reads(build, oracle, order, writer, reader):
    group, whole = build.group(), oracle.stream(4096).tobytes()
    written = pages_of(build, whole, group, Topology(writer), order, order)
    gathered = bytearray(4096)
    for rank, page in enumerate(written):
        runs = canonical.mapping(group, Topology(writer), rank, order, order)
        build.gather(runs, page, gathered)
    assert gathered == whole
    read = pages_of(build, bytes(gathered), group, Topology(reader), order, order)
    assert read == pages_of(build, whole, group, Topology(reader), order, order)
    assert len(set(read)) == reader


@pytest.mark.parametrize("order", FAMILIES)
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_a_token_sharded_page_is_the_page_of_as_many_tokens(
    build, oracle, order, interleave
):
    logical = oracle.logical(build.group(heads=2), 8)
    long = build.group(heads=2, page_size=8)
    whole = oracle.page(long, logical, Topology(1), 0, order)
    gathered = bytearray(len(whole))
    group, topology = build.group(heads=2), Topology(2, 2, interleave)
    for rank in range(4):
        page = oracle.page(group, logical, topology, rank, order)
        runs = canonical.mapping(group, topology, rank, order, order)
        build.gather(runs, page, gathered)
    assert gathered == whole


@pytest.mark.parametrize("order", FAMILIES)
def test_only_token_records_are_a_page_of_halves_end_to_end(build, oracle, order):
    logical = oracle.logical(build.group(), 8)
    long = build.group(page_size=8)
    whole = oracle.page(long, logical, Topology(1), 0, order)
    halves = [
        oracle.page(build.group(), logical, Topology(1), 0, order, number)
        for number in range(2)
    ]
    assert (whole == b"".join(halves)) == (order == "packed_nhd")


@pytest.mark.parametrize(
    "order, count, nbytes",
    [
        ("token_major", 32, [1024, 512, 256]),
        ("packed_nhd", 16, [2048, 1024, 512]),
        ("split_hnd", 2, [16_384, 8_192, 4_096]),
        ("packed_hnd", 1, [32_768, 16_384, 8_192]),
    ],
)
def test_fragments_of_a_page_of_eight_heads(build, order, count, nbytes):
    group = build.group(heads=8, dim=128, dtype="bfloat16", page_size=16)
    for tp, size in zip([2, 4, 8], nbytes, strict=True):
        found = fragments(canonical.mapping(group, Topology(tp), 1, order, order))
        assert len(found) == count
        assert {fragment[2] for fragment in found} == {size}
        pages, layers = 32 * 1024 // 16, 32
        descriptors = {32: 2_097_152, 16: 1_048_576, 2: 131_072, 1: 65_536}
        assert pages * layers * count == descriptors[count]
    for rank_order in FAMILIES:
        one = canonical.mapping(group, Topology(1), 0, rank_order, rank_order)
        assert fragments(one) == [(0, 0, 65_536)]


@pytest.mark.case("LAY-06")
def test_replicated_and_sharded_rows_are_equally_long_at_every_tp(build, oracle):
    latent = Field("a.latent", "row", 0, 576, "float8_e4m3fn")
    indexer = Field("a.indexer", "row", 0, 132, "float8_e4m3fn")
    heads = build.group(heads=4).layers[0]
    layers = (Latent((latent, indexer), "a", 0), dataclasses.replace(heads, index=1))
    group = LifecycleGroup("full", "target", Lifecycle("full"), layers, 4)
    plans = [canonical.plan(group, Topology(tp)) for tp in (1, 2, 4)]
    assert {plan.record_nbytes for plan in plans} == {576 + 132 + 4 * 2 * 64}
    whole = oracle.stream(4 * plans[0].record_nbytes).tobytes()
    for plan in plans:
        gathered = bytearray(len(whole))
        for rank, runs in enumerate(plan.runs):
            page = bytearray(plan.page_nbytes)
            build.scatter(runs, whole, page)
            build.gather(plan.writers()[rank], bytes(page), gathered)
        assert gathered == whole
