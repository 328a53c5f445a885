"""What a folder's store does, a bucket's does too: turns, pins, a budget, sweeping."""

import threading

import numpy as np
import pytest

from kvmem import errors, store
from kvmem.store import index, object_segment
from kvmem.store.bucket_shelf import BucketShelf

CHUNK, RECORD = 4, 512
HOME = "m/f/"
BUDGET = 80_000


@pytest.fixture
def open_wide(open_objects):
    """Rows of 2 KiB, so that a segment is more than its own table."""
    return lambda **how: open_objects(record_nbytes=RECORD, **how)


@pytest.fixture
def chat():
    """Keys, tokens and records of one conversation a seed."""

    def make(num: int, seed: int = 0):
        random = np.random.default_rng(seed)
        tokens = random.integers(0, 49152, (num, CHUNK), dtype=np.int32)
        records = random.integers(0, 256, (num * CHUNK, RECORD), dtype=np.uint8)
        return store.chain_keys("m/f", tokens.ravel(), CHUNK), tokens, records

    return make


def held(kept, said) -> int:
    """How much of a conversation comes back, whole."""
    found = kept.get(said[0], said[1])
    np.testing.assert_array_equal(found.records, said[2][: found.num_hit * CHUNK])
    return found.num_hit


def nbytes(s3) -> int:
    """What the segments' objects take, fences apart."""
    objects = s3.objects()
    every = [objects.read(name) for name in objects.names(HOME)]
    return sum(len(data) for data in every if b"kvmem fence" not in data)


def test_a_put_behind_the_callers_back_is_there_when_its_future_says_so(
    open_wide, chat, s3
):
    kept, said = open_wide(), chat(3)
    records = said[2].copy()
    future = kept.put_async(said[0], said[1], records)
    records[:] = 0
    assert future.result(30).written == 3
    assert held(open_wide(read_only=True), said) == 3


def test_a_failure_that_nobody_asked_for_is_raised_by_close(
    open_wide, chat, monkeypatch
):
    kept = open_wide()

    def fail(*_):
        raise OSError(5, "the server went away")

    monkeypatch.setattr(object_segment, "_commit", fail)
    kept.put_async(*chat(2))
    with pytest.raises(OSError, match="went away"):
        kept.close()
    assert not kept.writable


def test_the_budget_holds_and_the_least_recently_used_go_first(open_wide, chat, s3):
    kept, chats = open_wide(max_nbytes=BUDGET), [chat(2, seed) for seed in range(20)]
    for said in chats:
        assert kept.put(*said).written == 2
        assert held(kept, chats[0]) == 2, "it is asked for all the time"
        assert nbytes(s3) <= kept.stats().file_nbytes <= BUDGET
    assert held(kept, chats[-1]) == 2 and held(kept, chats[1]) == 0
    stats = kept.stats()
    assert stats.evicted and stats.num_chunks * 2048 == stats.nbytes
    assert kept.get(*chats[1][:2]).reason == "evicted"
    assert all(report.status == "ok" for report in kept.verify())
    kept.close()
    again = open_wide(max_nbytes=BUDGET)
    assert held(again, chats[0]) == 2 and again.stats().num_chunks == stats.num_chunks


def test_suffixes_go_before_their_prefixes(open_wide, chat):
    kept, long = open_wide(max_nbytes=BUDGET), chat(8)
    kept.put(*long)
    for seed in range(1, 12):
        kept.put(*chat(2, seed))
        count = kept.contains(long[0])
        assert all(not kept.contains([key]) for key in long[0][count:])
    assert held(kept, long) < 8


def test_what_is_pinned_stays_and_what_finds_no_room_is_refused(open_wide, chat):
    kept, first = open_wide(max_nbytes=BUDGET), chat(3)
    kept.put(*first)
    assert kept.pin(first[0]) == 3
    for seed in range(1, 14):
        kept.put(*chat(2, seed))
    assert held(kept, first) == 3 and kept.stats().num_pinned == 3
    assert kept.put(*chat(60, 99)).refused > 0
    assert held(kept, first) == 3
    kept.unpin(first[0])
    with pytest.raises(errors.InvalidId, match="unpinned as often"):
        kept.unpin(first[0])
    for seed in range(20, 34):
        kept.put(*chat(2, seed))
    assert held(kept, first) == 0


def half_dead(kept, chat, seed: int = 0):
    """Put a segment of eight chunks of which two live."""
    said = chat(8, seed)
    kept.put(*said)
    for key in said[0][:1:-1]:
        kept._index.evict(key)
    return said


def test_gc_rewrites_what_is_less_than_half_live(open_wide, chat, s3):
    kept = open_wide()
    one, two = half_dead(kept, chat), half_dead(kept, chat, 1)
    before = nbytes(s3)
    done = kept.gc()
    assert (len(done.rewritten), len(done.written), done.kept) == (2, 1, ())
    assert nbytes(s3) == before - done.freed_nbytes == kept.stats().file_nbytes
    assert held(kept, one) == held(kept, two) == 2
    assert kept.gc().freed_nbytes == 0
    kept.close()
    assert held(open_wide(), one) == 2


def test_a_reader_finds_what_was_moved_under_it(open_wide, chat):
    kept = open_wide()
    said = half_dead(kept, chat)
    reader = open_wide(read_only=True)
    kept.gc()
    found = reader.get(said[0][:2], said[1][:2])
    assert (found.num_hit, found.reason) == (2, None)
    assert reader.get(*said[:2]).reason == "evicted"


def test_a_reader_of_what_was_evicted_gets_a_miss(open_wide, chat):
    kept, said = open_wide(), chat(3)
    kept.put(*said)
    reader = open_wide(read_only=True)
    for key in said[0][::-1]:
        kept._index.evict(key)
    assert len(kept.gc().dropped) == 1
    assert reader.get(*said[:2]).reason in ("evicted", "not_found")
    assert reader.stats().num_chunks == 0


def test_a_number_is_given_once_even_when_its_segment_is_gone(open_wide, chat, s3):
    """Or a writer that was taken over could wake up and commit there."""
    kept, said = open_wide(), chat(2)
    kept.put(*said)
    for key in said[0][::-1]:
        kept._index.evict(key)
    kept.gc()
    with pytest.raises(errors.StoreLocked, match="given to another"):
        object_segment._commit(kept._bucket, kept.facts, 1, b"a stalled writer's")
    assert kept.put(*said).segment.startswith("00000002-")


def test_a_crash_while_a_segment_goes_leaves_what_the_next_writer_sweeps(
    open_wide, chat, s3, monkeypatch
):
    kept, said, other = open_wide(), chat(2), chat(2, 1)
    kept.put(*said)
    kept.put(*other)
    for key in said[0][::-1]:
        kept._index.evict(key)
    monkeypatch.setattr(kept._bucket, "delete", lambda names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kept.gc()
    kept._lease.release()
    with open_wide() as following:
        assert len(following.swept) == 3 and held(following, other) == 2
        assert held(following, said) == 0
        assert nbytes(s3) == following.stats().file_nbytes


def test_objects_that_could_not_be_deleted_are_swept_by_the_next_gc(
    open_wide, chat, s3, monkeypatch
):
    kept, said = open_wide(), chat(2)
    kept.put(*said)
    for key in said[0][::-1]:
        kept._index.evict(key)
    delete = kept._bucket.delete
    monkeypatch.setattr(kept._bucket, "delete", lambda names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kept.gc()
    monkeypatch.setattr(kept._bucket, "delete", delete)
    assert len(kept.gc().swept) == 3 and nbytes(s3) == 0
    assert kept.put(*said).written == 2 and held(kept, said) == 2


def test_a_writer_that_was_taken_over_takes_nothing_away(open_wide, chat):
    stale, said = open_wide(lease_s=1e-3), chat(2)
    stale.put(*said)
    following = open_wide()
    stale._lease.renew = lambda: None  # it never looks
    for key in said[0][::-1]:
        stale._index.evict(key)
    with pytest.raises(errors.StoreLocked, match="one writer at a time"):
        stale.gc()
    assert not stale.writable
    assert held(following, said) == 2


def test_gc_sweeps_what_a_failed_put_left_and_keeps_what_it_cannot_read(
    open_wide, chat, s3, monkeypatch
):
    kept, bad, good = open_wide(), chat(2), chat(2, 1)
    kept.put(*bad)
    manifest = object_segment.manifest_name(kept.facts, 1)
    s3.objects().put(manifest, s3.objects().read(manifest)[:-1])
    kept.close()
    kept = open_wide()
    kept.put(*good)
    s3.objects().put(f"{HOME}00000009-0a0b0c0d/records/c/0", b"half")
    there = set(s3.objects().names(HOME))
    done = kept.gc()
    assert done.swept == (f"{HOME}00000009-0a0b0c0d/records/c/0",)
    fence = object_segment.manifest_name(kept.facts, 3)
    assert set(s3.objects().names(HOME)) == there - set(done.swept) | {fence}
    assert held(kept, good) == 2 and kept.stats().num_unusable_segments == 1


def test_what_lost_the_race_for_a_number_is_swept(open_wide, chat, s3):
    kept, said = open_wide(), chat(2)
    (name,) = [kept.put(*said).segment]
    stray = f"{HOME}{name[:9]}deadbeef/records/c/0"
    s3.objects().put(stray, b"the loser's rows")
    assert kept.gc().swept == (stray,) and held(kept, said) == 2


def test_a_late_write_is_overtaken_and_the_lease_is_not_lost(
    open_wide, chat, monkeypatch
):
    kept = open_wide()
    kept._writer._lease_s = 0.3
    reached, go_on = threading.Event(), threading.Event()
    commit = object_segment._commit

    def late(*said):
        monkeypatch.setattr(object_segment, "_commit", commit)
        reached.set()
        assert go_on.wait(30)
        commit(*said)

    monkeypatch.setattr(object_segment, "_commit", late)
    first = kept.put_async(*chat(2))
    assert reached.wait(30)
    with pytest.raises(errors.Busy, match="more than 0.3 s"):
        first.result(30)
    assert kept.put(*chat(2, 1)).written == 2
    go_on.set()
    assert kept.put(*chat(2, 2)).written == 2
    assert kept.writable and kept.contains(chat(2)[0]) == 0
    assert {r.status for r in kept.verify()} == {"ok"}


def test_only_the_writer_pins_and_collects(open_wide, chat):
    open_wide().close()
    reader = open_wide(read_only=True)
    for verb in (reader.gc, lambda: reader.pin(chat(1)[0])):
        with pytest.raises(errors.StoreLocked, match="read-only"):
            verb()


def test_a_budget_below_zero_is_refused(open_wide):
    with pytest.raises(errors.ConfigError, match="max_nbytes=-1"):
        open_wide(max_nbytes=-1)


def test_a_bucket_of_another_layout_says_so(open_wide, s3):
    open_wide().close()
    shelf = BucketShelf(s3.objects(), store.Facts("m", "f", CHUNK, RECORD), None)
    assert shelf.explain(index.Index()) == ("not_found", "")
