"""Only the chunks that are named stay: the bytes of others are on no file any more."""

import numpy as np
import pytest

from kvmem import store
from kvmem.errors import StoreLocked

SECRET = np.frombuffer(b"what nobody may read any more..." * 12, np.uint8)


def files_with(root, needle: bytes) -> list:
    return [p for p in root.rglob("*") if p.is_file() and needle in p.read_bytes()]


def put_with_a_secret(kept, make_chunks, at=5, num=6, seed=0):
    """Put chunks of one text; the one at `at` holds the secret."""
    chunks = make_chunks(num, seed)
    records = chunks.records.reshape(num, -1).copy()
    records[at] = SECRET
    kept.put(chunks.keys, chunks.tokens, records.reshape(chunks.records.shape))
    return chunks, records


def test_the_bytes_of_what_is_not_named_are_on_no_file(
    open_store, make_chunks, tmp_path
):
    kept = open_store()
    chunks, records = put_with_a_secret(kept, make_chunks)
    assert files_with(tmp_path, SECRET[:24].tobytes())  # the search finds it
    erased = kept.retain(chunks.keys[:5])
    assert erased == store.Erased(num_chunks=1)
    assert not files_with(tmp_path, SECRET[:24].tobytes())
    assert not files_with(tmp_path, chunks.tokens[5].tobytes())
    found = kept.get(chunks.keys, chunks.tokens)
    assert (found.num_hit, found.reason) == (5, "evicted")
    assert np.array_equal(found.records.reshape(5, -1), records[:5])


def test_eviction_alone_would_leave_the_bytes(open_store, make_chunks, tmp_path):
    """The twin: one dead row of six is too little for a `gc` to rewrite."""
    kept = open_store()
    chunks, _ = put_with_a_secret(kept, make_chunks)
    kept._index.evict(chunks.keys[5])
    kept.gc()
    assert files_with(tmp_path, SECRET[:24].tobytes())


def test_what_is_named_is_there_after_opening_anew(open_store, make_chunks):
    kept = open_store()
    chunks, records = put_with_a_secret(kept, make_chunks)
    others, _ = put_with_a_secret(kept, make_chunks, seed=1)
    kept.retain([*chunks.keys[:3], *others.keys])
    kept.close()
    again = open_store()
    found = again.get(chunks.keys, chunks.tokens)
    assert (found.num_hit, found.reason) == (3, "not_found")
    assert np.array_equal(found.records.reshape(3, -1), records[:3])
    assert again.contains(others.keys) == 6
    assert all(report.status == "ok" for report in again.verify())


def test_a_damaged_row_goes_and_does_not_keep_its_segment(
    open_store, make_chunks, tmp_path, a_file_a_row
):
    kept = open_store()
    chunks, records = put_with_a_secret(kept, make_chunks)
    hit = records[1][:24].tobytes()
    (victim,) = files_with(tmp_path, hit)
    data = bytearray(victim.read_bytes())
    data[data.index(hit)] ^= 1
    victim.write_bytes(data)
    erased = kept.retain(chunks.keys[:5])
    assert erased == store.Erased(num_chunks=1, num_lost=1)
    assert not files_with(tmp_path, SECRET[:24].tobytes())
    assert kept.contains(chunks.keys) == 1


def test_without_room_for_a_copy_the_rest_goes_too(open_store, make_chunks, tmp_path):
    kept = open_store()
    chunks, _ = put_with_a_secret(kept, make_chunks)
    kept.close()
    size = kept.stats().file_nbytes
    tight = open_store(max_nbytes=size)
    erased = tight.retain(chunks.keys[:5])
    assert erased == store.Erased(num_chunks=1, num_lost=5)
    assert not files_with(tmp_path, SECRET[:24].tobytes())
    assert tight.stats().file_nbytes <= size


def test_a_reader_erases_nothing(open_store, make_chunks):
    kept = open_store()
    put_with_a_secret(kept, make_chunks)
    with pytest.raises(StoreLocked, match="retain"):
        open_store(read_only=True).retain(())
    assert kept.retain(()).num_chunks == 6
    assert kept.stats().num_segments == 0


def test_both_tiers_let_go(open_store, make_chunks):
    behind = open_store()
    host = store.HostTier(1 << 20, 96, 4)
    tiered = store.TieredStore(host, behind)
    chunks, _ = put_with_a_secret(tiered, make_chunks)
    assert tiered.retain(chunks.keys[:2]).num_chunks == 4
    assert host.contains(chunks.keys) == behind.contains(chunks.keys) == 2
