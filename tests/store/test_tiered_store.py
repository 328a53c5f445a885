"""Two tiers: RAM in front answers what the store behind would, and promises no more."""

import numpy as np
import pytest

from kvmem import errors, store

CHUNK, RECORD = 4, 96
ROW = CHUNK * RECORD


@pytest.fixture
def tiers(open_store):
    """Return RAM of `num_chunks` over a page store."""

    def make(num_chunks: int = 8, **options) -> store.TieredStore:
        host = store.HostTier(num_chunks * ROW, RECORD, CHUNK)
        return store.TieredStore(host, open_store(**options))

    return make


def test_it_stands_in_a_page_stores_place(tiers):
    made = tiers()
    names = ("facts", "writable", "put", "get", "contains", "stats", "close")
    for kept in (made, made.host, made.behind):
        assert all(hasattr(kept, name) for name in names)
    counted = ("num_chunks", "nbytes", "written", "already_present", "hits", "misses")
    for kept in (made, made.host, made.behind):
        assert all(hasattr(kept.stats(), name) for name in counted)
    assert made.facts == made.behind.facts
    assert made.writable


def test_a_put_is_in_both_and_a_get_needs_no_disk(tiers, make_chunks, tmp_path):
    chunks, made = make_chunks(5), tiers()
    done = made.put(*chunks)
    assert (done.written, done.segment is not None) == (5, True)
    assert made.behind.contains(chunks.keys) == 5
    for path in (tmp_path / "root").rglob("c/*/*"):  # no array file is left to read
        path.unlink()
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (5, None)
    assert (found.records == chunks.records).all()
    assert made.behind.stats().hits == 0


def test_what_ram_forgot_comes_from_disk_and_is_kept_again(tiers, make_chunks):
    chunks, made = make_chunks(6), tiers(8)
    made.put(*chunks)
    made.put(*make_chunks(5, 1))
    assert 0 < made.host.contains(chunks.keys) < 6
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (6, None)
    assert (found.records == chunks.records).all()
    assert made.host.contains(chunks.keys) == 6
    before = made.behind.stats().hits
    assert (made.get(*chunks[:2]).records == chunks.records).all()
    assert made.behind.stats().hits == before


def test_a_chain_longer_than_ram_is_served_whole(tiers, make_chunks):
    chunks, made = make_chunks(9), tiers(4)
    made.put(*chunks)
    for _ in range(2):
        found = made.get(*chunks[:2])
        assert (found.num_hit, found.reason) == (9, None)
        assert (found.records == chunks.records).all()
        assert made.host.contains(chunks.keys) == 4


def test_another_process_finds_what_ram_had(tiers, make_chunks, open_store):
    chunks, made = make_chunks(3), tiers()
    made.put(*chunks)
    made.close()
    assert not made.writable
    assert open_store(read_only=True).get(*chunks[:2]).num_hit == 3


def test_a_put_that_the_disk_refused_is_not_in_ram(tiers, make_chunks, monkeypatch):
    held, fresh = make_chunks(2, 0), make_chunks(2, 1)
    made = tiers()
    made.put(*held)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made.behind, "put", full)
    keys = [*held.keys, *fresh.keys]
    tokens = np.concatenate([held.tokens, fresh.tokens])
    records = np.concatenate([held.records, fresh.records])
    with pytest.raises(OSError, match="No space left"):
        made.put(keys, tokens, records)
    assert made.contains(keys) == 2
    assert made.get(*fresh[:2]).num_hit == 0
    monkeypatch.undo()
    assert made.put(keys, tokens, records).written == 2


def test_records_that_differ_from_the_disks_are_a_conflict(tiers, make_chunks):
    chunks, made = make_chunks(2), tiers()
    made.behind.put(*chunks)
    records = chunks.records.copy()
    records[0, 0] ^= 1
    with pytest.raises(errors.Conflict):
        made.put(chunks.keys, chunks.tokens, records)
    assert made.host.contains(chunks.keys) == 0
    assert (made.get(*chunks[:2]).records == chunks.records).all()


def test_what_is_held_by_either_counts(tiers, make_chunks):
    chunks, made = make_chunks(6), tiers()
    made.behind.put(*chunks.part(0, 2))
    made.host.put(*chunks.part(2, 4))
    made.behind.put(*chunks.part(4, 5))
    assert made.contains(chunks.keys) == 5
    assert made.contains(chunks.keys[5:]) == 0 == made.contains([])
    assert made.host.contains(chunks.keys) == 0  # asking promotes nothing


def test_misses_are_those_of_both_tiers_together(tiers, make_chunks):
    chunks, made = make_chunks(4), tiers()
    made.put(*chunks.part(0, 3))
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (3, "not_found")
    assert found.detail.startswith("behind 3 chunks in memory")
    made.get(*chunks.part(0, 3)[:2])
    stats = made.stats()
    assert (stats.hits, stats.misses) == (6, {"not_found": 1})
    assert stats.host.hits == 6 and stats.written == 3


def test_other_tokens_are_never_served(tiers, make_chunks):
    chunks, made = make_chunks(3), tiers()
    made.put(*chunks)
    other = chunks.tokens.copy()
    other[1, 0] += 1
    found = made.get(chunks.keys, other)
    assert (found.num_hit, found.reason) == (1, "tokens")


def test_ram_may_hold_a_later_chunk_with_bits_of_its_own(tiers, make_chunks):
    chunks, made = make_chunks(3), tiers()
    made.behind.put(*chunks)
    again = chunks.records.copy()
    again[-1, -1] ^= 1
    made.host.put(*chunks.part(2, 3)[:2], again[2 * CHUNK :])
    assert made.get(*chunks[:2]).num_hit == 3
    found = made.get(*chunks[:2])  # now all of it from RAM
    assert (found.records == again).all()


def test_a_read_only_store_is_warmed_and_takes_no_put(tiers, make_chunks, open_store):
    chunks = make_chunks(3)
    with open_store() as writer:
        writer.put(*chunks)
    made = tiers(read_only=True)
    assert not made.writable
    made.get(*chunks[:2])
    assert made.host.contains(chunks.keys) == 3
    fresh = make_chunks(1, 1)
    with pytest.raises(errors.StoreLocked):
        made.put(*fresh)
    assert made.contains(fresh.keys) == 0


def test_tiers_of_other_chunks_are_refused(open_store):
    with pytest.raises(errors.FormatMismatch, match="4 tokens of 96"):
        store.TieredStore(store.HostTier(10_000, RECORD, 2 * CHUNK), open_store())


def test_the_deadline_is_what_ram_left_of_it(tiers, make_chunks, monkeypatch):
    chunks, made = make_chunks(3), tiers()
    made.put(*chunks.part(0, 2))
    given, get = [], made.behind.get

    def slow(keys, tokens, deadline_s=None):
        given.append(deadline_s)
        return get(keys, tokens)

    monkeypatch.setattr(made.behind, "get", slow)
    made.get(*chunks[:2])
    made.get(*chunks[:2], deadline_s=5.0)
    made.get(*chunks[:2], deadline_s=0.0)
    assert given[0] is None and 4 < given[1] <= 5 and given[2] == 0.0


def test_ram_keeps_nothing_that_the_store_behind_refused(tiers, make_chunks):
    chunks, made = make_chunks(3), tiers(max_nbytes=100)
    assert made.put(*chunks).refused == 3
    assert made.contains(chunks.keys) == 0 == made.host.stats().num_chunks


def test_nothing_is_served_before_it_is_acknowledged(tiers, make_chunks, monkeypatch):
    chunks, made = make_chunks(3), tiers()
    seen, put = [], made.behind.put

    def watched(*said):
        seen.append(made.get(*chunks[:2]).num_hit)
        return put(*said)

    monkeypatch.setattr(made.behind, "put", watched)
    made.put(*chunks)
    assert seen == [0] and made.host.contains(chunks.keys) == 3


def test_bits_that_differ_from_rams_are_a_conflict_before_any_write(tiers, make_chunks):
    chunks, made = make_chunks(2), tiers()
    made.host.put(*chunks)
    other = chunks.records.copy()
    other[0, 0] ^= 1
    with pytest.raises(errors.Conflict):
        made.put(chunks.keys, chunks.tokens, other)
    assert made.behind.contains(chunks.keys) == 0
