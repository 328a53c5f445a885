import asyncio
import concurrent.futures
import os
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from kvmem import store
from kvmem.errors import Conflict, FormatMismatch, InvalidId, StoreLocked
from kvmem.store import folder_shelf, rows, segment

pytestmark = pytest.mark.usefixtures("a_file_a_row")

CHUNK, RECORD = 4, 96


def row_file(st, row, segment_name=None):
    """The file of a row in the store's only or named segment."""
    name = segment_name or next(iter(st._index.segments))
    return st._folder / name / segment.ORBAX / "records" / "c" / str(row)


def flip(path, position=5):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x20
    path.write_bytes(data)


def files_of(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_hits(found, chunks, num_hit, reason=None):
    assert (found.num_hit, found.reason) == (num_hit, reason), found
    assert found.records.dtype == np.uint8 and found.records.flags.c_contiguous
    np.testing.assert_array_equal(found.records, chunks.records[: num_hit * CHUNK])


# put and get


def test_what_was_put_is_got(open_store, make_chunks):
    chunks, st = make_chunks(7), open_store()
    put = st.put(*chunks)
    assert (put.written, put.already_present) == (7, 0)
    assert put.nbytes == chunks.records.nbytes and put.segment
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 7)
    assert st.contains(chunks.keys) == 7


def test_flat_tokens_and_records_with_chunks_first_mean_the_same(
    open_store, make_chunks
):
    chunks, st = make_chunks(3), open_store()
    st.put(chunks.keys, chunks.tokens.ravel(), chunks.records.reshape(3, CHUNK, RECORD))
    assert_hits(st.get(chunks.keys, chunks.tokens.ravel()), chunks, 3)


def test_records_that_are_not_contiguous_are_stored_as_they_read(
    open_store, make_chunks
):
    chunks, st = make_chunks(3), open_store()
    wide = np.repeat(chunks.records, 2, axis=1)[:, ::2]
    assert not wide.flags.c_contiguous
    st.put(chunks.keys, chunks.tokens, wide)
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 3)


def test_the_callers_arrays_stay_the_callers(open_store, make_chunks):
    chunks, st = make_chunks(3), open_store()
    tokens, records = chunks.tokens.copy(), chunks.records.copy()
    st.put(chunks.keys, tokens, records)
    tokens[:] = 0
    records[:] = 0
    found = st.get(chunks.keys, chunks.tokens)
    assert_hits(found, chunks, 3)
    found.records[:] = 0
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 3)


def test_chunks_of_several_segments_come_back_in_one_array(open_store, make_chunks):
    chunks, st = make_chunks(9), open_store()
    for start, stop in ((4, 9), (0, 1), (1, 4)):
        st.put(*chunks.part(start, stop))
    assert len(st._index.segments) == 3
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 9)
    assert_hits(st.get(*chunks.part(2, 6)[:2]), chunks.part(2, 6), 4)


def test_get_returns_the_leading_chunks_and_says_why_it_stops(open_store, make_chunks):
    chunks, st = make_chunks(6), open_store()
    st.put(*chunks.part(0, 2))
    st.put(*chunks.part(3, 6))
    assert st.contains(chunks.keys) == 2
    found = st.get(chunks.keys, chunks.tokens)
    assert_hits(found, chunks, 2, "not_found")
    assert "chunk 2" in found.detail
    assert_hits(st.get(*chunks.part(2, 6)[:2]), chunks, 0, "not_found")
    assert_hits(st.get(*chunks.part(3, 6)[:2]), chunks.part(3, 6), 3)


def test_nothing_put_and_nothing_asked_is_nothing_done(open_store, make_chunks):
    chunks, st = make_chunks(0), open_store()
    assert st.put(*chunks) == store.PutResult(0, 0, 0, None)
    assert list(st._folder.iterdir()) == []
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 0)
    assert st.contains(()) == 0


def test_a_put_inside_a_running_event_loop_works(open_store, make_chunks):
    """A notebook's cells run inside one."""
    chunks, st = make_chunks(2), open_store()

    async def cell():
        return st.put(*chunks)

    assert asyncio.run(cell()).written == 2
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 2)


def test_puts_from_several_threads_write_each_chunk_once(open_store, make_chunks):
    chunks, st = make_chunks(6), open_store()
    spans = [(0, 3), (1, 4), (2, 6), (0, 6)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        puts = list(pool.map(lambda span: st.put(*chunks.part(*span)), spans))
    assert sum(put.written for put in puts) == 6
    assert sum(put.already_present for put in puts) == 10
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 6)


# the same chunk twice


def test_chunks_put_twice_are_written_once(open_store, make_chunks):
    chunks, st = make_chunks(4), open_store()
    st.put(*chunks.part(0, 3))
    before = files_of(st._folder)
    assert st.put(*chunks.part(0, 3)) == store.PutResult(0, 3, 0, None)
    assert files_of(st._folder) == before
    put = st.put(*chunks)
    assert (put.written, put.already_present) == (1, 3)
    assert put.nbytes == CHUNK * RECORD
    assert len(st._index.segments[put.segment].keys) == 1
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 4)


def test_a_chunk_repeated_in_one_put_is_written_once(open_store, make_chunks):
    chunks, st = make_chunks(2), open_store()
    twice = [
        chunks.keys + chunks.keys,
        np.concatenate([chunks.tokens] * 2),
        np.concatenate([chunks.records] * 2),
    ]
    put = st.put(*twice)
    assert (put.written, put.already_present) == (2, 2)
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 2)


@pytest.mark.parametrize("what", ["records", "tokens"])
@pytest.mark.parametrize("where", ["stored", "same put"])
def test_one_key_with_two_contents_is_a_conflict_and_writes_nothing(
    open_store, make_chunks, what, where
):
    chunks, st = make_chunks(3), open_store()
    other = make_chunks(3, seed=1)
    tokens, records = chunks.tokens.copy(), chunks.records.copy()
    if what == "tokens":
        tokens[1] = other.tokens[1]
    else:
        records[CHUNK + 1, 50] ^= 1
    if where == "stored":
        st.put(*chunks.part(1, 2))
        request = chunks.keys, tokens, records
    else:
        request = (
            chunks.keys + chunks.keys,
            np.concatenate([chunks.tokens, tokens]),
            np.concatenate([chunks.records, records]),
        )
    before = files_of(st._folder)
    with pytest.raises(Conflict, match=f"other {what}"):
        st.put(*request)
    assert files_of(st._folder) == before
    assert st.contains(chunks.keys) == 0


# what is served


def test_a_key_held_for_other_tokens_is_a_miss(open_store, make_chunks):
    chunks, st = make_chunks(3), open_store()
    st.put(*chunks)
    asked = chunks.tokens.copy()
    asked[1, 3] += 1
    assert_hits(st.get(chunks.keys, asked), chunks, 1, "tokens")
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 3)


@pytest.mark.case("PER-10")
def test_a_flipped_byte_is_a_miss_by_checksum_and_nothing_is_deleted(
    open_store, make_chunks
):
    chunks, st = make_chunks(5), open_store()
    st.put(*chunks)
    for again in range(2):
        flip(row_file(st, 2))
        before = files_of(st.root)
        assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 2, "checksum")
        assert files_of(st.root) == before
        if again:
            break
        assert st.contains(chunks.keys) == 2
        assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 2, "checksum")
        assert_hits(st.get(*chunks.part(3, 5)[:2]), chunks.part(3, 5), 2)
        flip(row_file(st, 2))
        st.close()
        st = open_store()
        assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 5)


@pytest.mark.case("PER-10")
def test_a_truncated_file_is_a_miss_and_nothing_is_deleted(open_store, make_chunks):
    chunks, st = make_chunks(5), open_store()
    st.put(*chunks)
    path = row_file(st, 1)
    os.truncate(path, path.stat().st_size // 2)
    before = files_of(st.root)
    found = st.get(chunks.keys, chunks.tokens)
    assert_hits(found, chunks, 1, "damaged")
    assert next(iter(st._index.segments)) in found.detail
    assert files_of(st.root) == before


def test_a_file_that_is_gone_is_a_miss(open_store, make_chunks):
    """TensorStore reads a missing chunk as zeros; the checksum is what sees it."""
    chunks, st = make_chunks(3), open_store()
    st.put(*chunks)
    row_file(st, 1).unlink()
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 1, "checksum")


@pytest.mark.case("PER-10")
def test_a_damaged_chunk_can_be_written_afresh_and_then_counts(open_store, make_chunks):
    chunks, st = make_chunks(4), open_store()
    old = st.put(*chunks).segment
    flip(row_file(st, 2))
    st.get(chunks.keys, chunks.tokens)
    put = st.put(*chunks)
    assert (put.written, put.already_present) == (1, 3)
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 4)
    st.close()
    again = open_store()
    assert_hits(again.get(chunks.keys, chunks.tokens), chunks, 4)
    assert {r.segment: r.status for r in again.verify()} == {
        old: "damaged",
        put.segment: "ok",
    }


def test_without_verification_the_flipped_byte_would_have_been_served(
    open_store, make_chunks
):
    """The twin: TensorStore alone hands the damaged row out."""
    chunks, st = make_chunks(3), open_store()
    st.put(*chunks)
    flip(row_file(st, 1))
    (only,) = st._index.segments.values()
    flat = rows.open_arrays(only)[0].array.read().result()
    assert np.sum(flat != chunks.records.reshape(-1)) == 1


@pytest.mark.case("PER-11")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_of_narrow_floats_comes_back(open_store, monkeypatch, dtype):
    monkeypatch.undo()  # files of their natural size
    kind = np.dtype(getattr(ml_dtypes, dtype))
    every = np.arange(2 ** (8 * kind.itemsize), dtype=f"u{kind.itemsize}")
    every = np.resize(every, -(-every.nbytes // (CHUNK * RECORD)) * CHUNK * RECORD)
    values = every.view(kind)[: len(every) // 2 * 2]
    assert np.isnan(values.astype(np.float32)).any()
    records = values.view(np.uint8).reshape(-1, RECORD)
    tokens = np.arange(len(records), dtype=np.int32)
    keys = store.chain_keys("m/f", tokens, CHUNK)
    st = open_store()
    st.put(keys, tokens, records)
    back = st.get(keys, tokens).records.reshape(-1).view(kind)
    assert back.dtype == values.dtype
    np.testing.assert_array_equal(back.view(np.uint8), values.view(np.uint8))


# other processes


@pytest.mark.case("PER-09")
def test_another_process_finds_what_was_acknowledged(
    open_store, make_chunks, run_python, tmp_path
):
    chunks, st = make_chunks(3), open_store()
    st.put(*chunks)
    st.close()
    (st._folder / "00000009-abababab" / segment.ORBAX).mkdir(parents=True)
    code = f"""
import sys, numpy as np
from kvmem import store
tokens = np.array({chunks.tokens.tolist()}, np.int32)
keys = store.chain_keys("m/f", tokens.ravel(), {CHUNK})
st = store.PageStore.open({str(tmp_path / "root")!r}, "m", "f", {RECORD}, {CHUNK},
                          read_only=True)
found = st.get(keys, tokens)
assert "jax" not in sys.modules and "orbax" not in sys.modules
print(found.num_hit, found.reason, found.records.tobytes().hex())
"""
    expected = f"3 None {chunks.records.tobytes().hex()}"
    assert run_python(code).strip() == expected


def test_a_reader_takes_no_lock_and_writes_nothing(open_store, make_chunks):
    chunks, writer = make_chunks(4), open_store()
    reader = open_store(read_only=True)
    assert_hits(reader.get(chunks.keys, chunks.tokens), chunks, 0, "not_found")
    writer.put(*chunks)
    assert reader.contains(chunks.keys) == 0
    assert (reader.refresh(), reader.refresh()) == (1, 0)
    assert_hits(reader.get(chunks.keys, chunks.tokens), chunks, 4)
    with pytest.raises(StoreLocked, match="read-only"):
        reader.put(*chunks)


def test_a_root_has_one_writer_whatever_it_writes(open_store, make_chunks):
    chunks, first = make_chunks(1), open_store()
    with pytest.raises(StoreLocked, match="one writer at a time.*read_only=True"):
        open_store("other", "format")
    first.close()
    second = open_store("other", "format")
    with pytest.raises(StoreLocked, match="closed"):
        first.put(*chunks)
    assert second.put(*chunks).written == 1


def test_a_store_is_closed_at_the_end_of_with(open_store):
    with open_store() as st:
        assert st._lock.is_held
    assert not st._lock.is_held


@pytest.mark.case("PER-05")
def test_what_a_killed_writer_left_is_reported_and_never_read(
    tmp_path, open_store, make_chunks, repo_root
):
    """The process dies after Orbax has committed and before the manifest is there."""
    chunks, st = make_chunks(4), open_store()
    kept = st.put(*chunks.part(0, 2)).segment
    st.close()
    code = f"""
import os, numpy as np
from kvmem import store
from kvmem.store import durable
durable.seal_tree = lambda *_: os._exit(9)
tokens = np.array({chunks.tokens.tolist()}, np.int32)
keys = store.chain_keys("m/f", tokens.ravel(), {CHUNK})
records = np.frombuffer(bytes.fromhex("{chunks.records.tobytes().hex()}"), np.uint8)
st = store.PageStore.open({str(tmp_path / "root")!r}, "m", "f", {RECORD}, {CHUNK})
st.put(keys, tokens, records.reshape(-1, {RECORD}))
"""
    env = os.environ | {"PYTHONPATH": str(repo_root)}
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=120)
    assert done.returncode == 9
    reader = open_store(read_only=True)
    assert_hits(reader.get(chunks.keys, chunks.tokens), chunks, 2, "not_found")
    statuses = {report.segment: report.status for report in reader.verify()}
    assert len(statuses) == 2 and statuses.pop(kept) == "ok"
    (left,) = statuses
    assert statuses[left] == "unfinished"
    assert row_file(reader, 0, left).exists() and reader.swept == ()
    st = open_store()
    assert st.swept == (left,)
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 2, "not_found")
    assert [(r.segment, r.status) for r in st.verify()] == [(kept, "ok")]
    put = st.put(*chunks)
    assert (put.written, put.already_present) == (2, 2)
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 4)


# identity and sizes


def test_models_and_formats_never_share_a_hit(open_store, make_chunks):
    chunks, st = make_chunks(3), open_store("model-a", "format-a")
    st.put(*chunks)
    st.close()
    for ids, reason in (
        (("model-b", "format-a"), "model"),
        (("model-a", "format-b"), "format"),
    ):
        other = open_store(*ids)
        found = other.get(chunks.keys, chunks.tokens)
        assert_hits(found, chunks, 0, reason)
        assert f"{reason}-a" in found.detail
        other.close()
    same = open_store("model-a", "format-a", read_only=True)
    assert_hits(same.get(chunks.keys, chunks.tokens), chunks, 3)


def test_a_segment_moved_to_another_model_is_not_served(open_store, make_chunks):
    chunks, st = make_chunks(2), open_store("model-a")
    put = st.put(*chunks)
    st.close()
    other = open_store("model-b")
    other.close()
    (st._folder / put.segment).rename(other._folder / put.segment)
    other = open_store("model-b", read_only=True)
    assert other.contains(chunks.keys) == 0
    (report,) = other.verify()
    assert report.status == "foreign" and "model-a" in report.problems[0]


@pytest.mark.case("PER-12")
def test_another_record_size_is_refused_with_both_numbers(open_store, make_chunks):
    st = open_store()
    st.put(*make_chunks(2))
    st.close()
    for read_only in (False, True):
        with pytest.raises(FormatMismatch, match=f"=192.*{CHUNK} tokens of {RECORD} "):
            open_store(record_nbytes=2 * RECORD, read_only=read_only)
    open_store().close()


@pytest.mark.case("PER-12")
def test_another_chunk_size_is_refused_with_both_numbers(open_store):
    open_store().close()
    with pytest.raises(FormatMismatch, match=f"chunk_tokens=16.*chunk_tokens={CHUNK}"):
        open_store(chunk_tokens=16)


@pytest.mark.case("PER-12")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r[:-1], r"uint8\[11, 96\].*uint8\[12, 96\]"),
        (lambda r: r[:, :-1], r"uint8\[12, 95\].*uint8\[12, 96\]"),
        (lambda r: r.reshape(-1), r"uint8\[1152\].*uint8\[12, 96\]"),
        (lambda r: r.view(np.float32), r"float32\[12, 24\]"),
        (lambda r: r.view(np.int8), r"int8\[12, 96\].*uint8\[12, 96\]"),
        (lambda r: r.reshape(4, 3, 96), r"uint8\[4, 3, 96\]"),
    ],
)
def test_records_of_another_shape_or_type_are_refused(
    open_store, make_chunks, change, words
):
    chunks, st = make_chunks(3), open_store()
    with pytest.raises(FormatMismatch, match=words):
        st.put(chunks.keys, chunks.tokens, change(chunks.records))
    assert list(st._folder.iterdir()) == []


@pytest.mark.parametrize("verb", ["put", "get"])
def test_keys_and_tokens_must_match(open_store, make_chunks, verb):
    chunks, st = make_chunks(3), open_store()
    records = (chunks.records,) if verb == "put" else ()
    ask = getattr(st, verb)
    with pytest.raises(FormatMismatch, match=r"shape \(2, 4\) for 3 keys.*\(3, 4\)"):
        ask(chunks.keys, chunks.tokens[:2], *records)
    with pytest.raises(FormatMismatch, match="integers"):
        ask(chunks.keys, chunks.tokens.astype(float), *records)
    with pytest.raises(InvalidId, match="page key of 3 bytes"):
        ask([b"abc"] * 3, chunks.tokens, *records)


# verify and stats


def test_verify_of_a_clean_store_is_clean(open_store, make_chunks):
    chunks, st = make_chunks(5), open_store()
    st.put(*chunks.part(0, 3))
    st.put(*chunks.part(3, 5))
    reports = st.verify()
    assert [(r.status, r.num_chunks, r.problems) for r in reports] == [
        ("ok", 3, ()),
        ("ok", 2, ()),
    ]
    assert sum(r.nbytes for r in reports) == chunks.records.nbytes


def test_verify_names_what_is_wrong(open_store, make_chunks):
    chunks, st = make_chunks(3), open_store()
    st.put(*chunks)
    flip(row_file(st, 1))
    (report,) = st.verify()
    assert report.status == "damaged"
    assert report.problems == (
        "orbax/records/c/1: digest differs",
        "chunk 1: checksum: the bytes read differ from those written",
    )
    os.truncate(row_file(st, 1), 100)
    row_file(st, 2).unlink()
    (report,) = st.verify()
    assert report.problems[:2] == (
        "orbax/records/c/1: 100 bytes, written with 404",
        "orbax/records/c/2: missing",
    )
    assert report.problems[2].startswith("chunk 1: damaged: ")
    assert report.problems[3].startswith("chunk 2: checksum: ")


@pytest.mark.case("PER-10")
@pytest.mark.parametrize("damage", ["manifest.json", "chunks.safetensors"])
def test_a_damaged_manifest_or_sidecar_takes_its_segment_out_of_reach(
    open_store, make_chunks, damage
):
    chunks, st = make_chunks(4), open_store()
    bad = st.put(*chunks.part(2, 4)).segment
    st.put(*chunks.part(0, 2))
    st.close()
    flip(st._folder / bad / damage, 60)
    st = open_store()
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 2, "not_found")
    assert [r.status for r in st.verify()] == ["damaged", "ok"]
    assert st.stats().num_unusable_segments == 1
    assert st.put(*chunks).written == 2
    assert_hits(st.get(chunks.keys, chunks.tokens), chunks, 4)


def test_stats_count_what_happened_and_what_is_held(open_store, make_chunks):
    chunks, st = make_chunks(4), open_store()
    st.put(*chunks.part(0, 3))
    st.put(*chunks.part(0, 3))
    st.get(chunks.keys, chunks.tokens)
    st.get(*chunks.part(0, 3)[:2])
    flip(row_file(st, 0))
    st.get(chunks.keys, chunks.tokens)
    (only,) = st._index.segments
    files = files_of(st._folder / only).values()
    assert st.stats() == store.StoreStats(
        file_nbytes=sum(map(len, files)),
        num_segments=1,
        num_chunks=2,
        nbytes=2 * CHUNK * RECORD,
        num_masked=1,
        num_unusable_segments=0,
        written=3,
        already_present=3,
        hits=6,
        misses={"not_found": 1, "checksum": 1},
    )


# cost


@pytest.mark.case("PER-08")
def test_two_thousand_chunks_cost_about_what_one_stacked_array_does(
    tmp_path, make_chunks, monkeypatch
):
    monkeypatch.undo()
    many = make_chunks(2000)
    tokens = many.tokens.reshape(1, -1)
    keys = store.chain_keys("m/f", tokens.ravel(), tokens.size)

    def put_seconds(name, chunk_tokens, *request):
        sizes = {"record_nbytes": RECORD, "chunk_tokens": chunk_tokens}
        with store.PageStore.open(tmp_path / name, "m", "f", **sizes) as st:
            start = time.perf_counter()
            put = st.put(*request)
            seconds = time.perf_counter() - start
            assert len(list((st._folder / put.segment).rglob("zarr.json"))) == 1
            assert st.get(*request[:2]).num_hit == len(request[0])
        return seconds

    put_seconds("warm", CHUNK, *make_chunks(1))
    times = [
        (
            put_seconds(f"many{i}", CHUNK, *many),
            put_seconds(f"one{i}", tokens.size, keys, tokens, many.records),
        )
        for i in range(3)
    ]
    split, stacked = (min(column) for column in zip(*times, strict=True))
    assert split < 5 * stacked, (split, stacked)


def test_a_put_names_no_segment_twice(open_store, make_chunks):
    chunks, st = make_chunks(4), open_store()
    names = [st.put(*chunks.part(i, i + 1)).segment for i in range(4)]
    assert [name.split("-")[0] for name in names] == [f"{i:08d}" for i in (1, 2, 3, 4)]
    assert sorted(names) == names
    assert folder_shelf.number(names[-1]) == 4
