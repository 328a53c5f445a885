"""A byte budget on disk: who goes, who stays, and what happens to the bytes."""

import os
import time

import numpy as np
import pytest

from kvmem import store
from kvmem.errors import ConfigError, InvalidId, StoreLocked
from kvmem.store import keeper, row_files, segment
from kvmem.store.io import Disk

CHUNK, RECORD = 4, 512
ROW = CHUNK * RECORD


@pytest.fixture
def open_wide(open_store):
    """Rows of 2 KiB, so that a segment is more than its own table."""
    return lambda **limits: open_store(record_nbytes=RECORD, **limits)


@pytest.fixture
def chat():
    """Chains of chunks: one conversation a seed."""

    def make(num: int, seed: int = 0):
        random = np.random.default_rng(seed)
        tokens = random.integers(0, 49152, (num, CHUNK), dtype=np.int32)
        records = random.integers(0, 256, (num * CHUNK, RECORD), dtype=np.uint8)
        return Chat(store.chain_keys("m/f", tokens.ravel(), CHUNK), tokens, records)

    return make


class Chat(tuple):
    """Keys, tokens and records of one conversation."""

    def __new__(cls, *parts):
        return super().__new__(cls, parts)

    keys = property(lambda self: self[0])
    tokens = property(lambda self: self[1])
    records = property(lambda self: self[2])

    def part(self, start, stop):
        rows = slice(start * CHUNK, stop * CHUNK)
        return Chat(self[0][start:stop], self[1][start:stop], self[2][rows])

    def before(self, start):
        return self.keys[start - 1] if start else None


def held(st, chat) -> int:
    """How much of a conversation comes back, whole."""
    found = st.get(chat.keys, chat.tokens)
    np.testing.assert_array_equal(found.records, chat.records[: found.num_hit * CHUNK])
    return found.num_hit


def on_disk(st) -> int:
    return sum(p.stat().st_size for p in st._folder.rglob("*") if p.is_file())


class Watching(Disk):
    """Notes the most bytes that the files of sealed segments ever took."""

    def __init__(self):
        self.most, self.folder = 0, None

    def perform(self, step, action):
        result = action()
        if self.folder is not None and step.verb in ("orbax", "write", "rename"):
            files = self.folder.rglob("*")
            sizes = [p.stat().st_size for p in files if p.is_file()]
            self.most = max(self.most, sum(sizes))
        return result


def test_the_least_recently_used_conversation_goes_first(open_wide, chat):
    chats = [chat(4, seed) for seed in range(3)]
    st = open_wide(max_nbytes=120_000)
    for each in chats:
        st.put(*each)
    assert held(st, chats[0]) == 4, "and asking makes it the latest"
    number = 10
    while st.contains(chats[1].keys) == 4:
        assert st.contains(chats[0].keys) == 4 and number < 40
        st.put(*chat(4, number))
        number += 1
    assert st.contains(chats[0].keys) == 4 == st.contains(chats[2].keys)
    found = st.get(chats[1].keys, chats[1].tokens)
    assert found.reason == "evicted" and st.stats().misses == {"evicted": 1}
    assert st.stats().evicted == 4 - found.num_hit


def test_the_files_never_take_more_than_the_budget(open_wide, chat, tmp_path):
    disk = Watching()
    budget = 400_000
    st = open_wide(max_nbytes=budget, io=disk)
    disk.folder = st._folder
    random = np.random.default_rng(3)
    for seed in range(20):
        num = int(random.integers(1, 40))
        each = chat(num, seed)
        cut = int(random.integers(0, num + 1))
        st.put(*each.part(0, cut))
        st.put(*each.part(cut, num), each.before(cut))
        st.get(*chat(5, int(random.integers(0, seed + 1)))[:2])
        assert on_disk(st) <= budget
    assert st.stats().evicted > 50
    assert budget / 2 < disk.most <= budget
    st.gc()
    assert on_disk(st) <= budget
    assert all(report.status == "ok" for report in st.verify())


def test_suffixes_go_before_their_prefixes(open_wide, chat):
    """What is left of a conversation is always its beginning."""
    st = open_wide(max_nbytes=200_000)
    long = chat(40)
    for at in range(0, 40, 4):
        st.put(*long.part(at, at + 4), long.before(at))
    seen = set()
    for seed in range(1, 25):
        st.put(*chat(3, seed))
        kept = [key for key in long.keys if st.contains([key])]
        assert kept == list(long.keys[: len(kept)])
        seen.add(len(kept))
    assert len(seen) > 5, seen


def test_a_chunk_stays_while_anything_continues_it(open_wide, chat):
    """Two conversations share a beginning that only the older of them put."""
    st = open_wide(max_nbytes=150_000)
    shared = chat(6)
    st.put(*shared)
    random = np.random.default_rng(9)
    tokens = random.integers(0, 49152, (4, CHUNK), dtype=np.int32)
    records = random.integers(0, 256, (4 * CHUNK, RECORD), dtype=np.uint8)
    keys = store.chain_keys("m/f", np.concatenate([shared.tokens, tokens]), CHUNK)
    branch = Chat(keys[6:], tokens, records)
    st.put(*branch, parent=shared.keys[-1])
    st.close()
    st = open_wide(max_nbytes=150_000)
    for seed in range(1, 30):
        st.put(*chat(2, seed))
        if st.contains([branch.keys[0]]):
            assert st.contains(shared.keys) == 6
            st.contains([branch.keys[0]]) and st.get(*branch.part(0, 1)[:2])
    assert st.contains(shared.keys) == 6


def test_pinned_chunks_and_what_they_continue_stay(open_wide, chat):
    st = open_wide(max_nbytes=150_000)
    kept, loose = chat(6, 100), chat(6, 101)
    st.put(*kept)
    st.put(*loose)
    assert st.pin(kept.keys[4:5]) == 1
    for seed in range(40):
        st.put(*chat(4, seed))
    assert held(st, kept) >= 5 and st.contains(loose.keys) == 0
    st.unpin(kept.keys[4:5])
    with pytest.raises(InvalidId, match="as often as it was pinned"):
        st.unpin(kept.keys[4:5])
    for seed in range(40, 80):
        st.put(*chat(4, seed))
    assert st.contains(kept.keys) == 0


def test_a_pin_covers_the_leading_chunks_that_are_held(open_wide, chat):
    st, some = open_wide(), chat(5)
    st.put(*some.part(0, 3))
    assert st.pin(some.keys) == 3 and st.stats().num_pinned == 3
    assert st.pin(some.keys[:1]) == 1
    st.unpin(some.keys[:3])
    assert st.stats().num_pinned == 1
    reader = open_wide(read_only=True)
    with pytest.raises(StoreLocked, match="pin"):
        reader.pin(some.keys)


@pytest.mark.parametrize("budget", [0, 5_000])
def test_a_budget_that_holds_nothing_refuses_every_chunk(open_wide, chat, budget):
    st = open_wide(max_nbytes=budget)
    put = st.put(*chat(3))
    assert (put.written, put.refused, put.segment) == (0, 3, None)
    assert on_disk(st) == 0 and st.stats().refused == 3


def test_when_all_is_pinned_a_put_is_refused_and_nothing_raised(open_wide, chat):
    st = open_wide(max_nbytes=60_000)
    for number in range(20):
        each = chat(4, number)
        refused = st.put(*each).refused
        st.pin(each.keys)
        if refused == 4:
            break
    assert 1 < number < 19
    before = on_disk(st)
    put = st.put(*chat(20, 1000))
    assert put.refused == 20 and put.written == 0 and put.evicted == 0
    assert on_disk(st) == before


def test_of_a_chain_that_is_too_long_the_beginning_is_kept(open_wide, chat):
    st, long = open_wide(max_nbytes=100_000), chat(100)
    put = st.put(*long)
    assert 20 < put.written < 60 and put.refused == 100 - put.written
    assert held(st, long) == put.written
    assert on_disk(st) <= 100_000


def test_a_segment_less_than_half_live_is_rewritten(open_wide, chat):
    st, long = open_wide(), chat(10)
    old = st.put(*long).segment
    with st._index.lock:
        for key in long.keys[4:]:
            st._index.evict(key)
    before = on_disk(st)
    done = st.gc()
    assert done.rewritten == (old,) and len(done.written) == 1
    assert done.freed_nbytes == before - on_disk(st) > 5 * ROW
    assert not (st._folder / old).exists()
    assert held(st, long) == 4
    assert st.get(*long[:2]).reason == "evicted"
    assert [r.status for r in st.verify()] == ["ok"]
    st.close()
    again = open_wide()
    assert held(again, long) == 4
    assert again._index.segments[done.written[0]].parents[1:] == long.keys[:3]


def test_a_segment_half_live_is_left_alone_and_a_dead_one_goes(open_wide, chat):
    st, first, second = open_wide(), chat(4), chat(4, 1)
    half, dead = st.put(*first).segment, st.put(*second).segment
    for key in first.keys[2:] + second.keys:
        st._index.evict(key)
    done = st.gc()
    assert (done.dropped, done.rewritten) == ((dead,), ())
    assert [p.name for p in st._folder.iterdir()] == [half]


def test_live_chunks_of_several_sparse_segments_meet_in_one(open_wide, chat):
    st, chats = open_wide(), [chat(8, seed) for seed in range(3)]
    for each in chats:
        st.put(*each)
        for key in each.keys[3:]:
            st._index.evict(key)
    done = st.gc()
    assert len(done.rewritten) == 3 and len(done.written) == 1
    assert [held(st, each) for each in chats] == [3, 3, 3]


def test_a_chunk_that_cannot_be_read_keeps_its_segment(open_wide, chat, monkeypatch):
    """A read error never deletes data: the bytes may be read another day."""
    monkeypatch.setattr(row_files, "FILE_NBYTES", 1)
    st, long = open_wide(), chat(10)
    old = st.put(*long).segment
    for key in long.keys[4:]:
        st._index.evict(key)
    path = st._folder / old / "orbax" / "records" / "c" / "1"
    data = path.read_bytes()
    path.write_bytes(data[:-7])
    done = st.gc()
    assert done.kept == (old,) and done.rewritten == ()
    assert st.get(*long[:2]).reason == "damaged"
    path.write_bytes(data)
    assert st.gc().kept == (old,), "it is masked, and kept as it is"
    st.close()
    assert held(open_wide(), long) == 10


def test_a_damaged_chunk_that_was_read_again_is_served_after_gc(open_wide, chat):
    st, long = open_wide(), chat(4)
    old = st.put(*long).segment
    st._index.mask(long.keys[2], "checksum", st._index.places[long.keys[2]])
    new = st.put(*long).segment
    assert {new, old} == {p.name for p in st._folder.iterdir()}
    st.gc()
    assert held(st, long) == 4


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_recency_survives_reopening(open_wide, chat, end):
    chats = [chat(4, seed) for seed in range(5)]
    st = open_wide(max_nbytes=140_000)
    for each in chats[:4]:
        st.put(*each)
    st.get(*chats[0][:2])
    st.put(*chats[4])
    if end == "closed":
        st.close()
    else:
        st._lock.release()
    st = open_wide(max_nbytes=140_000)
    number = 100
    while all(st.contains(each.keys) == 4 for each in chats):
        st.put(*chat(4, number))
        number += 1
    assert st.contains(chats[1].keys) < 4
    assert st.contains(chats[0].keys) == 4


def test_chunks_that_go_in_circles_can_be_evicted_all_the_same(open_wide, chat):
    """No digest does; keys that a caller mixed up might."""
    st, one, other = open_wide(max_nbytes=60_000), chat(1, 1), chat(1, 2)
    st.put(*one, parent=other.keys[0])
    st.put(*other, parent=one.keys[0])
    for seed in range(10, 25):
        st.put(*chat(4, seed))
    assert st.contains(one.keys) == st.contains(other.keys) == 0


def test_circles_that_another_kvmem_wrote_are_evicted(open_wide, chat, monkeypatch):
    ring, st = chat(2), open_wide()
    monkeypatch.setattr(keeper.Keeper, "_parents", lambda *_: dict(enumerate(ring[0])))
    st.put(*ring)
    st.close()
    monkeypatch.undo()
    with open_wide(max_nbytes=0) as st:
        assert st.contains(ring.keys) == 2
        assert len(st.gc().dropped) == 1
        assert st.contains(ring.keys) == 0


def test_the_least_recently_used_goes_first_after_the_clock_went_back(open_wide, chat):
    with open_wide(max_nbytes=60_000) as st:
        for seed in range(3):
            st.put(*chat(4, seed))
    ahead = time.time() + 1e7
    for path in st._folder.glob("*/manifest.json"):
        os.utime(path, (ahead, ahead))
    st, hot = open_wide(max_nbytes=60_000), chat(4, 100)
    st.put(*hot)
    for seed in range(101, 111):
        st.put(*chat(4, seed))
        assert held(st, hot) == 4
    assert st.contains(chat(4, 0).keys) == 0


def test_what_is_rewritten_is_no_more_recent_for_it(open_wide, chat):
    st, old, new = open_wide(), chat(10), chat(4, 1)
    st.put(*old)
    st.put(*new)
    for key in old.keys[4:]:
        st._index.evict(key)
    before = {key: st._index.used_ns[key] for key in old.keys[:4]}
    (written,) = st.gc().written
    assert {key: st._index.used_ns[key] for key in old.keys[:4]} == before
    st.close()
    again = open_wide()
    assert again._index.used_ns[old.keys[0]] < again._index.used_ns[new.keys[0]]
    assert written in again._index.segments


@pytest.mark.case("PER-05")
def test_gc_sweeps_leftovers_and_leaves_strangers_alone(open_wide, chat):
    st = open_wide()
    st.put(*chat(2))
    left = st._folder / "00000007-abcdef01"
    (left / "orbax.orbax-checkpoint-tmp").mkdir(parents=True)
    (st._folder / "notes.txt").touch()
    (st._folder / "thesis").mkdir()
    assert st.gc().swept == (left.name,)
    assert not left.exists()
    assert (st._folder / "notes.txt").exists() and (st._folder / "thesis").exists()
    assert st.gc().swept == ()


def test_gc_names_the_segments_that_a_budget_took(open_wide, chat):
    st = open_wide()
    names = [st.put(*chat(4, seed)).segment for seed in range(6)]
    st.close()
    before = on_disk(st)
    with open_wide(max_nbytes=34_000) as st:
        done = st.gc()
        assert done.dropped == tuple(names[: len(done.dropped)]) and done.dropped
        assert done.freed_nbytes == before - on_disk(st)
        assert st.gc().dropped == ()


def test_a_damaged_segment_is_never_swept(open_wide, chat):
    st = open_wide()
    bad = st.put(*chat(2)).segment
    st.close()
    path = st._folder / bad / "manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    st = open_wide()
    assert st.swept == () and st.gc().swept == ()
    assert [(r.segment, r.status) for r in st.verify()] == [(bad, "damaged")]


def test_only_the_writer_collects(open_wide, chat):
    open_wide().close()
    with pytest.raises(StoreLocked, match="gc"):
        open_wide(read_only=True).gc()


@pytest.mark.parametrize("limit", ["max_nbytes", "lease_s", "deadline_s"])
def test_a_limit_below_zero_is_refused(open_wide, limit):
    with pytest.raises(ConfigError, match=f"{limit}=-1"):
        open_wide(**{limit: -1})


@pytest.mark.parametrize("num", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("record", [96, 512, 46_080])
def test_an_estimate_is_never_less_than_the_files(tmp_path, num, record):
    facts = segment.Facts("m" * 100, "f" * 100, CHUNK, record)
    if num * record > 2_000_000:
        num = 2_000_000 // record
    tokens = np.arange(num * CHUNK, dtype=np.int32).reshape(num, CHUNK)
    keys = store.chain_keys("m/f", tokens, CHUNK)
    rows = np.ones((num, facts.row_nbytes), np.uint8)
    folder = tmp_path / "00000001-aaaaaaaa"
    written = segment.write(folder, facts, keys, tokens, rows)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert written.file_nbytes == size == segment.load(folder, facts).file_nbytes
    assert size <= segment.estimate(facts, num) <= size + 5000 + num * 100
