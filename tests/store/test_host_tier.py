"""The host tier: bytes under a bound, answers as from disk, suffixes first to go."""

import threading

import numpy as np
import pytest

from kvmem import errors, store
from kvmem.store import host_memory, host_tier

CHUNK, RECORD = 4, 96
ROW = CHUNK * RECORD


def tier(num_chunks: float = 8, **options) -> store.HostTier:
    return store.HostTier(int(num_chunks * ROW), RECORD, CHUNK, **options)


@pytest.fixture(params=["pageable", "pinned_host"])
def memory(request) -> str:
    return request.param


def test_what_was_put_comes_back(make_chunks, memory):
    chunks = make_chunks(5)
    made = tier(memory=memory)
    assert made.put(*chunks) == store.PutResult(5, 0, 5 * ROW, None)
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (5, None)
    assert (found.records == chunks.records).all()
    assert made.stats().memory == memory
    assert made.contains(chunks.keys) == 5


def test_records_may_come_in_chunks_and_be_changed_afterwards(make_chunks, memory):
    chunks = make_chunks(3)
    made, given = tier(memory=memory), chunks.records.copy()
    made.put(chunks.keys, chunks.tokens.ravel(), given.reshape(3, CHUNK, RECORD))
    given[:] = 0
    assert (made.get(*chunks[:2]).records == chunks.records).all()
    made.get(*chunks[:2]).records[:] = 0
    assert (made.get(*chunks[:2]).records == chunks.records).all()


@pytest.mark.parametrize("kind", ["pageable", "pinned_host"])
def test_a_row_is_copied_wherever_it_stands(kind):
    """A backend may take rows at addresses that suit it as its own."""
    made = host_memory.make(kind, 1, ROW)
    room = np.zeros(ROW + 128, np.uint8)
    for shift in (-room.ctypes.data % 64, -room.ctypes.data % 64 + 16):
        row = room[shift : shift + ROW]
        row[:] = 7
        made.write(0, row)
        row[:] = 8
        made.read([0], out := np.empty((1, ROW), np.uint8))
        assert (out == 7).all()


@pytest.mark.parametrize("num_slots", [1, 2, 7])
def test_its_bytes_never_exceed_the_bound(make_chunks, memory, num_slots):
    made = tier(num_slots + 0.9, memory=memory)
    for seed in range(6):
        made.put(*make_chunks(5, seed))
        stats = made.stats()
        assert stats.nbytes <= num_slots * ROW <= stats.max_nbytes
        assert stats.num_chunks == min(num_slots, 5 * (seed + 1))


def test_a_pageable_tier_reserves_no_more_than_the_bound():
    made = tier(7.9)
    assert made._memory._slab.nbytes == 7 * ROW


def test_pinned_memory_is_given_back_when_a_chunk_goes(make_chunks):
    made = tier(2, memory="pinned_host")
    made.put(*make_chunks(2, 0))
    made.put(*make_chunks(1, 1))
    assert len(made._memory._rows) == 2
    made.close()
    assert len(made._memory._rows) == 0


def test_pinned_rows_are_where_they_were_asked_for(make_chunks):
    made = tier(memory="pinned_host")
    made.put(*make_chunks(2))
    kinds = {row.sharding.memory_kind for row in made._memory._rows.values()}
    assert kinds == {"pinned_host"}


def test_memory_that_the_backend_lacks_is_refused_in_words(monkeypatch):
    import jax

    class Device:
        device_kind, platform = "toy", "none"

        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})]

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(errors.ConfigError, match="its memories are device"):
        tier(memory="pinned_host")
    with pytest.raises(errors.ConfigError, match="kinds are pageable"):
        tier(memory="fast")


def test_an_ordinary_tier_loads_no_jax(run_python):
    code = (
        "import sys; from kvmem import store; store.HostTier(1000, 10, 4);"
        "print('jax' in sys.modules)"
    )
    assert run_python(code) == "False\n"


def test_the_longest_used_suffix_makes_room(make_chunks):
    old, new = make_chunks(4, 0), make_chunks(2, 1)
    made = tier(5)
    made.put(*old)
    assert made.put(*new).evicted == 1
    assert made.contains(old.keys) == 3 and made.contains(new.keys) == 2
    assert made.stats().evicted == 1
    assert made.get(*old[:2]).reason == "evicted"
    made.get(*old.part(0, 3)[:2])
    made.put(*make_chunks(1, 2))
    assert made.contains(old.keys) == 3 and made.contains(new.keys) == 1


def test_a_continuation_put_by_itself_keeps_its_prefix(make_chunks):
    chunks = make_chunks(4, 0)
    made = tier(4)
    made.put(*chunks.part(0, 3))
    made.put(*chunks.part(3, 4), parent=chunks.keys[2])
    made.put(*make_chunks(1, 1))
    assert made.contains(chunks.keys) == 3
    assert not made.contains(chunks.keys[3:])


def test_of_a_text_that_does_not_fit_the_leading_chunks_are_kept(make_chunks):
    chunks = make_chunks(9)
    made = tier(6)
    done = made.put(*chunks)
    assert (done.written, done.already_present, done.refused) == (6, 0, 3)
    assert made.contains(chunks.keys) == 6
    assert made.stats().refused == 3 and made.stats().evicted == 0
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (6, "not_found")
    assert (found.records == chunks.records[: 6 * CHUNK]).all()


def test_pinned_chunks_stay_whatever_comes(make_chunks):
    chunks = make_chunks(3, 0)
    made = tier(4)
    made.put(*chunks)
    assert made.pin([*chunks.keys, *make_chunks(1, 5).keys]) == 3
    for seed in range(1, 5):
        made.put(*make_chunks(3, seed))
        assert made.contains(chunks.keys) == 3
    assert made.stats().num_pinned == 3
    made.unpin(chunks.keys)
    made.put(*make_chunks(3, 9))
    assert made.contains(chunks.keys) < 3
    with pytest.raises(errors.InvalidId, match="none left"):
        made.unpin(chunks.keys)


def test_a_partial_hit_says_why_it_ends(make_chunks):
    chunks, made = make_chunks(4), tier()
    made.put(*chunks.part(0, 2))
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (2, "not_found")
    assert "chunk 2" in found.detail
    other = chunks.tokens.copy()
    other[1, 3] += 1
    found = made.get(chunks.keys, other)
    assert (found.num_hit, found.reason) == (1, "tokens")
    assert made.stats().misses == {"not_found": 1, "tokens": 1}
    assert made.stats().hits == 3


def test_bytes_that_changed_in_memory_are_not_served(make_chunks):
    chunks, made = make_chunks(3), tier()
    made.put(*chunks)
    made._memory._slab[made._held[chunks.keys[1]].slot, 5] ^= 1
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (1, "checksum")
    assert made.get(*chunks[:2]).reason == "not_found"
    made.put(*chunks)
    assert made.get(*chunks[:2]).num_hit == 3


def test_one_key_names_one_content(make_chunks):
    chunks, made = make_chunks(3), tier()
    made.put(*chunks)
    assert made.put(*chunks) == store.PutResult(0, 3, 0, None)
    records = chunks.records.copy()
    records[-1, -1] ^= 1
    with pytest.raises(errors.Conflict, match="put of chunk 2"):
        made.put(chunks.keys, chunks.tokens, records)
    tokens = chunks.tokens.copy()
    tokens[0, 0] ^= 1
    with pytest.raises(errors.Conflict, match="put of chunk 0"):
        made.put(chunks.keys, tokens, chunks.records)
    twice = [*chunks.keys[:2], chunks.keys[0]]
    fresh = tier()
    with pytest.raises(errors.Conflict, match="put of chunk 2"):
        fresh.put(twice, chunks.tokens, chunks.records)
    assert fresh.stats().num_chunks == 0


def test_the_same_chunk_twice_in_one_call_is_kept_once(make_chunks):
    one, made = make_chunks(1), tier()
    twice = np.concatenate([one.records, one.records])
    done = made.put([*one.keys, *one.keys], np.tile(one.tokens, (2, 1)), twice)
    assert (done.written, done.already_present) == (1, 1)
    made.put(*make_chunks(8, 1))
    assert not made.contains(one.keys)  # it does not hold itself


@pytest.mark.parametrize("bad", ["tokens", "records", "dtype"])
def test_shapes_are_the_stores_own(make_chunks, bad):
    keys, tokens, records = make_chunks(3)
    if bad == "tokens":
        tokens = tokens[:2]
    elif bad == "records":
        records = records[:-1]
    else:
        records = records.view(np.int8)
    with pytest.raises(errors.FormatMismatch):
        tier().put(keys, tokens, records)


def test_a_bound_below_one_chunk_is_refused_with_the_number():
    with pytest.raises(errors.ConfigError, match=f"at least {ROW} B"):
        store.HostTier(ROW - 1, RECORD, CHUNK)
    assert store.HostTier(ROW, RECORD, CHUNK).max_nbytes == ROW


def test_questions_change_nothing(make_chunks):
    old, new = make_chunks(2, 0), make_chunks(2, 1)
    made = tier(4)
    made.put(*old)
    made.put(*new)
    for _ in range(3):
        made.contains(old.keys)
        made.stats()
    made.put(*make_chunks(1, 2))
    assert made.contains(old.keys) == 1 and made.contains(new.keys) == 2


def test_random_histories_agree_with_a_plain_dict(make_chunks, memory):
    random = np.random.default_rng(3)
    texts = [make_chunks(6, seed) for seed in range(8)]
    made = tier(10, memory=memory)
    for _ in range(300):
        text = texts[random.integers(len(texts))]
        stop = int(random.integers(1, 7))
        if random.random() < 0.5:
            made.put(*text.part(0, stop))
        else:
            found = made.get(*text.part(0, stop)[:2])
            assert (found.records == text.records[: found.num_hit * CHUNK]).all()
            assert found.num_hit == made.contains(text.keys[:stop])
        held = [k in made._held for t in texts for k in t.keys]
        assert sum(held) == made.stats().num_chunks <= 10
        for t in texts:  # a held chunk's prefix is held
            inside = [key in made._held for key in t.keys]
            assert inside == sorted(inside, reverse=True)


def test_threads_share_a_tier(make_chunks):
    made, faults = tier(20), []

    def work(seed: int) -> None:
        text = make_chunks(6, seed % 3)
        for _ in range(40):
            made.put(*text)
            found = made.get(*text[:2])
            if not (found.records == text.records[: found.num_hit * CHUNK]).all():
                faults.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and made.stats().num_chunks == 18


def test_the_words_for_a_small_tier_name_both_sizes():
    said = host_tier._too_small(1000, store.HostTier(ROW, RECORD, CHUNK).facts)
    assert "1,000 B" in said and "384 B" in said


def test_a_prefix_may_push_out_the_suffix_that_it_came_back_to(make_chunks):
    chunks, kept = make_chunks(3), tier(2)
    kept.put(*chunks.part(1, 3), parent=chunks.keys[0])
    done = kept.put(*chunks)
    assert (done.written, done.already_present, done.evicted) == (1, 2, 1)
    assert kept.contains(chunks.keys) == kept.stats().num_chunks == 2


def test_memory_that_fails_leaves_the_tier_as_it_was(make_chunks, monkeypatch):
    chunks, kept = make_chunks(2), tier(2)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(kept._memory, "write", fail)
        with pytest.raises(MemoryError):
            kept.put(*chunks)
    assert len(kept._chains) == kept.stats().num_chunks == 0
    assert kept.put(*chunks).written == 2
    assert kept.get(*chunks[:2]).num_hit == 2
