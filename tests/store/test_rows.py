"""Reads that do not come in time, and what a reader sees while a segment goes away."""

import os
import time

import numpy as np
import pytest

from kvmem.store import index, rows, segment

pytestmark = pytest.mark.usefixtures("a_file_a_row")

CHUNK, RECORD = 4, 96


@pytest.fixture
def hang(make_chunks):
    """Put a pipe in the place of a row's file: opening it waits for ever."""
    pipes = []

    def replace(st, row):
        (only,) = st._index.segments.values()
        path = only.folder / segment.ORBAX / "records" / "c" / str(row)
        saved = path.with_name("saved")
        path.rename(saved)
        os.mkfifo(path)
        pipes.append((path, saved))
        return path, saved

    yield replace
    for path, _ in pipes:
        if path.is_fifo():  # let the thread that waits go on
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def release(path, saved):
    """Let who waits have an end, and put the file back."""
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    saved.replace(path)


def test_a_reader_that_hangs_is_a_miss_within_the_deadline(
    open_store, make_chunks, hang
):
    chunks, st = make_chunks(5), open_store()
    st.put(*chunks)
    hang(st, 2)
    started = time.monotonic()
    found = st.get(chunks.keys, chunks.tokens, deadline_s=0.5)
    assert 0.4 < time.monotonic() - started < 5
    assert (found.num_hit, found.reason) == (2, "deadline")
    np.testing.assert_array_equal(found.records, chunks.records[: 2 * CHUNK])
    assert st.stats().misses == {"deadline": 1}


def test_the_stores_own_deadline_is_used_where_a_get_names_none(
    open_store, make_chunks, hang
):
    chunks, st = make_chunks(3), open_store(deadline_s=0.3)
    st.put(*chunks)
    hang(st, 0)
    started = time.monotonic()
    assert st.get(chunks.keys, chunks.tokens).reason == "deadline"
    assert time.monotonic() - started < 5


def test_an_array_that_does_not_open_in_time_is_a_miss(open_store, make_chunks):
    chunks, st = make_chunks(3), open_store()
    st.put(*chunks)
    (only,) = st._index.segments.values()
    about = only.folder / segment.ORBAX / "records" / "zarr.json"
    data = about.read_bytes()
    about.unlink()
    os.mkfifo(about)
    found = st.get(chunks.keys, chunks.tokens, deadline_s=0.3)
    os.close(os.open(about, os.O_RDWR | os.O_NONBLOCK))
    assert (found.num_hit, found.reason) == (0, "deadline")
    about.unlink()
    about.write_bytes(data)


def test_a_chunk_that_did_not_answer_is_not_asked_again_at_once(
    open_store, make_chunks, hang, monkeypatch
):
    """A verdict of "held" that stands would make a caller wait again and again."""
    chunks, st = make_chunks(4), open_store()
    st.put(*chunks)
    monkeypatch.setattr(index, "RETRY_S", 0.6)
    path, saved = hang(st, 2)
    assert st.get(chunks.keys, chunks.tokens, deadline_s=0.2).reason == "deadline"
    started = time.monotonic()
    assert st.contains(chunks.keys) == 2
    assert st.get(chunks.keys, chunks.tokens, deadline_s=5).reason == "deadline"
    assert time.monotonic() - started < 0.3, "nothing was waited for"
    release(path, saved)
    time.sleep(0.6)
    assert st.contains(chunks.keys) == 4
    assert st.get(chunks.keys, chunks.tokens).num_hit == 4


def test_a_chunk_that_did_not_answer_may_be_written_afresh(
    open_store, make_chunks, hang
):
    chunks, st = make_chunks(4), open_store()
    st.put(*chunks)
    hang(st, 2)
    st.get(chunks.keys, chunks.tokens, deadline_s=0.2)
    assert st.put(*chunks).written >= 1
    assert st.get(chunks.keys, chunks.tokens).num_hit == 4


def test_a_deadline_in_the_past_is_a_miss_and_no_error(open_store, make_chunks):
    chunks, st = make_chunks(3), open_store()
    st.put(*chunks)
    found = st.get(chunks.keys, chunks.tokens, deadline_s=0)
    assert found.reason in (None, "deadline")
    assert len(found.records) == found.num_hit * CHUNK


@pytest.mark.case("PER-14")
def test_an_entry_evicted_while_it_is_read_is_a_miss_or_whole(
    open_store, make_chunks, monkeypatch
):
    """The segment goes away between the reader's third and fourth row."""
    chunks, writer = make_chunks(6), open_store()
    writer.put(*chunks)
    reader = open_store(read_only=True)
    settle, seen = rows._settle, []

    def settle_and_evict(source, row, future, *rest):
        if row == 3 and not seen:
            seen.append(row)
            segment.drop(source.folder)
        return settle(source, row, future, *rest)

    monkeypatch.setattr(rows, "_settle", settle_and_evict)
    found = reader.get(chunks.keys, chunks.tokens)
    assert seen and found.num_hit in range(3, 7)
    assert found.reason in (None, "evicted")
    np.testing.assert_array_equal(
        found.records, chunks.records[: found.num_hit * CHUNK]
    )
    found = reader.get(chunks.keys, chunks.tokens)
    assert (found.num_hit, found.reason) == (0, "evicted")


@pytest.mark.case("PER-14")
def test_a_reader_with_an_evicted_segment_gets_a_miss(open_store, make_chunks):
    chunks, writer = make_chunks(3), open_store()
    writer.put(*chunks)
    reader = open_store(read_only=True)
    for key in chunks.keys:
        writer._index.evict(key)
    writer.gc()
    found = reader.get(chunks.keys, chunks.tokens)
    assert (found.num_hit, found.reason) == (0, "evicted")
    assert reader.stats().num_segments == 0


@pytest.mark.case("PER-14")
@pytest.mark.parametrize("opened", [True, False])
def test_a_reader_finds_a_chunk_that_was_moved(open_store, make_chunks, opened):
    """The live chunks of a sparse segment are elsewhere; the old files are gone."""
    chunks, writer = make_chunks(6), open_store()
    writer.put(*chunks)
    reader = open_store(read_only=True)
    if opened:
        assert reader.get(chunks.keys, chunks.tokens).num_hit == 6
    for key in chunks.keys[2:]:
        writer._index.evict(key)
    assert writer.gc().rewritten
    found = reader.get(chunks.keys, chunks.tokens)
    assert (found.num_hit, found.reason) == (2, "evicted")
    np.testing.assert_array_equal(found.records, chunks.records[: 2 * CHUNK])


@pytest.mark.case("PER-14")
def test_an_entry_replaced_by_other_bytes_is_never_mixed(open_store, make_chunks):
    """Half of the rows' files are overwritten in place under an open reader."""
    chunks, other = make_chunks(6), make_chunks(6, seed=3)
    writer = open_store()
    writer.put(*chunks)
    reader = open_store(read_only=True)
    (only,) = writer._index.segments.values()
    files = only.folder / segment.ORBAX / "records" / "c"
    for row in range(3, 6):
        path = files / str(row)
        data = bytearray(path.read_bytes())
        data[: CHUNK * RECORD] = other.records[
            row * CHUNK : (row + 1) * CHUNK
        ].tobytes()
        path.write_bytes(data)
    found = reader.get(chunks.keys, chunks.tokens)
    assert (found.num_hit, found.reason) == (3, "checksum")
    np.testing.assert_array_equal(found.records, chunks.records[: 3 * CHUNK])
