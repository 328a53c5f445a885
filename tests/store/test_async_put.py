"""Puts behind the caller's back: what they copy, when they count, how they fail."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.errors import Busy, Conflict, FormatMismatch, StoreLocked
from kvmem.store import orbax_save
from kvmem.store.io import Disk

CHUNK, RECORD = 4, 96


class Hooked(Disk):
    """A disk on which something happens before a step of one kind."""

    def __init__(self, verb="orbax"):
        self.verb, self.hook = verb, lambda: None

    def perform(self, step, action):
        if step.verb == self.verb:
            self.hook()
        return action()


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def whole(found, chunks):
    assert (found.num_hit, found.reason) == (len(chunks.keys), None), found
    np.testing.assert_array_equal(found.records, chunks.records)


def test_a_future_says_what_the_put_did(open_store, make_chunks):
    chunks, st = make_chunks(5), open_store()
    first = st.put_async(*chunks.part(0, 3))
    second = st.put_async(*chunks)
    assert (second.result().written, second.result().already_present) == (2, 3)
    assert first.done() and first.result().written == 3
    whole(st.get(*chunks[:2]), chunks)


def test_a_chunk_counts_only_once_it_is_durable(open_store, make_chunks, gate):
    chunks, disk = make_chunks(2), Hooked("rename")
    st = open_store(io=disk)
    disk.hook = lambda: gate.wait(30)
    future = st.put_async(*chunks)
    time.sleep(0.3)
    assert not future.done() and st.contains(chunks.keys) == 0
    assert st.stats().in_flight == 1
    assert st.get(*chunks[:2]).reason == "not_found"
    gate.set()
    future.result()
    assert st.contains(chunks.keys) == 2 and st.stats().in_flight == 0


def test_a_get_does_not_wait_for_a_put(open_store, make_chunks, gate):
    chunks, disk = make_chunks(4), Hooked()
    st = open_store(io=disk)
    st.put(*chunks.part(0, 2))
    disk.hook = lambda: gate.wait(30)
    st.put_async(*chunks.part(2, 4))
    whole(st.get(*chunks.part(0, 2)[:2]), chunks.part(0, 2))


@pytest.mark.case("PER-06")
def test_a_pool_may_be_donated_while_its_records_are_saved(
    open_store, make_chunks, gate
):
    """The records handed over are a view of the pool's own buffer: nothing is safe."""
    chunks, disk = make_chunks(4), Hooked()
    st = open_store(io=disk)
    pool = jax.device_put(jnp.asarray(chunks.records), jax.devices("cpu")[0])
    view = np.asarray(pool)
    disk.hook = lambda: gate.wait(30)
    future = st.put_async(chunks.keys, chunks.tokens, view)
    del view
    step = jax.jit(lambda pages: pages * 0 + 7, donate_argnums=0)
    pool = step(pool)
    assert (np.asarray(pool) == 7).all()
    gate.set()
    future.result()
    whole(st.get(*chunks[:2]), chunks)


@pytest.mark.case("PER-06")
def test_arrays_may_be_changed_as_soon_as_put_async_returns(
    open_store, make_chunks, gate
):
    chunks, disk = make_chunks(4), Hooked()
    st = open_store(io=disk)
    disk.hook = lambda: gate.wait(30)
    tokens, records = chunks.tokens.copy(), chunks.records.copy()
    future = st.put_async(chunks.keys, tokens, records)
    tokens[:], records[:] = 0, 0
    gate.set()
    future.result()
    whole(st.get(*chunks[:2]), chunks)


@pytest.mark.case("PER-03")
@pytest.mark.parametrize("asked", ["future", "close"])
def test_a_failed_save_is_raised_and_the_next_one_works(
    open_store, make_chunks, monkeypatch, asked
):
    """Orbax fails after it has staged the arrays."""
    chunks, st = make_chunks(4), open_store()
    st.put(*chunks.part(0, 2))
    save = orbax_save.save

    def fail(*args):
        save(*args)
        raise RuntimeError("the commit failed")

    monkeypatch.setattr(orbax_save, "save", fail)
    future = st.put_async(*chunks.part(2, 4))
    if asked == "future":
        with pytest.raises(RuntimeError, match="the commit failed"):
            future.result()
        assert st.contains(chunks.keys) == 2
        monkeypatch.undo()
        assert st.put(*chunks).written == 2
        st.close()
    else:
        with pytest.raises(RuntimeError, match="the commit failed"):
            st.close()
        assert not st.writable, "the lock is given back all the same"
        st.close()
        monkeypatch.undo()
        st = open_store()
        assert st.contains(chunks.keys) == 2
        assert st.put(*chunks).written == 2
    assert [report.status for report in st.verify()] == ["ok", "ok"]


def test_close_waits_for_puts_in_flight(open_store, make_chunks):
    chunks, disk = make_chunks(2), Hooked()
    st = open_store(io=disk)
    disk.hook = lambda: time.sleep(0.3)
    future = st.put_async(*chunks)
    st.close()
    assert future.done() and st.contains(chunks.keys) == 2
    with pytest.raises(StoreLocked, match="closed"):
        st.put_async(*chunks)


def test_what_is_wrong_with_a_request_is_said_at_once(open_store, make_chunks):
    chunks, st = make_chunks(2), open_store()
    with pytest.raises(FormatMismatch):
        st.put_async(chunks.keys, chunks.tokens, chunks.records[:-1])
    st.put(*chunks)
    other = chunks.records.copy()
    other[0] ^= 1
    conflict = st.put_async(chunks.keys, chunks.tokens, other)
    with pytest.raises(Conflict):
        conflict.result()


def test_a_future_can_be_awaited(open_store, make_chunks):
    chunks, st = make_chunks(2), open_store()

    async def serve():
        return await asyncio.wrap_future(st.put_async(*chunks))

    assert asyncio.run(serve()).written == 2


def test_a_write_that_hangs_ends_with_its_lease_and_is_never_seen(
    open_store, make_chunks, gate
):
    """Sharers of a block must not wait for ever for a writer that lost its way."""
    chunks, disk = make_chunks(3), Hooked("rename")
    st = open_store(io=disk, lease_s=0.3)
    waits = iter([lambda: gate.wait(30)])
    disk.hook = lambda: next(waits, lambda: None)()
    hung = st.put_async(*chunks)
    again = st.put_async(*chunks)
    assert again.result().written == 3
    with pytest.raises(Busy, match="lease"):
        hung.result()
    whole(st.get(*chunks[:2]), chunks)
    gate.set()
    deadline = time.monotonic() + 10
    while len(list(st._folder.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    st.close()
    assert [report.status for report in st.verify()] == ["ok"]
    whole(open_store(read_only=True).get(*chunks[:2]), chunks)


@pytest.mark.case("PER-04")
def test_only_what_was_committed_counts_before_and_after_a_kill(
    tmp_path, open_store, make_chunks, repo_root
):
    """Save one, start a second that hangs in its commit, look; kill, look again."""
    chunks = make_chunks(4)
    code = f"""
import time
import numpy as np
from kvmem import store

class Slow(store.Disk):
    def perform(self, step, action):
        if step.verb == "rename" and slow:
            print("committing", flush=True)
            time.sleep(60)
        return action()

random = np.random.default_rng(0)
tokens = random.integers(0, 49152, (4, {CHUNK}), dtype=np.int32)
records = random.integers(0, 256, (4 * {CHUNK}, {RECORD}), dtype=np.uint8)
keys = store.chain_keys("m/f", tokens.ravel(), {CHUNK})
slow = False
st = store.PageStore.open({str(tmp_path / "root")!r}, "m", "f", {RECORD}, {CHUNK},
                          io=Slow())
st.put(keys[:2], tokens[:2], records[:{2 * CHUNK}])
slow = True
st.put_async(keys[2:], tokens[2:], records[{2 * CHUNK}:]).result()
"""
    env = os.environ | {"PYTHONPATH": str(repo_root)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as writer:
        assert writer.stdout.readline() == b"committing\n"
        reader = open_store(read_only=True)
        assert reader.contains(chunks.keys) == 2
        writer.send_signal(signal.SIGKILL)
    reader.refresh()
    assert reader.contains(chunks.keys) == 2
    st = open_store()
    assert st.contains(chunks.keys) == 2 and len(st.swept) == 1


def test_a_write_that_was_given_up_never_gets_its_name(open_store, make_chunks, gate):
    """Its caller was told Busy, and may have put other bytes where the records were."""
    chunks, disk = make_chunks(2), Hooked("mkdir")
    st = open_store(io=disk, lease_s=0.3)
    disk.hook = lambda: gate.wait(30)
    named, gone = threading.Event(), threading.Event()
    records, perform = chunks.records.copy(), disk.perform

    def noting(step, action):
        if step.verb == "rename":
            named.set()
        try:
            return perform(step, action)
        finally:
            if step.verb == "remove":
                gone.set()

    disk.perform = noting
    with pytest.raises(Busy):
        st.put(chunks.keys, chunks.tokens, records)
    records[:] = records[::-1].copy()
    gate.set()
    assert gone.wait(60)
    assert list(st._folder.iterdir()) == [] and not named.is_set()


def test_records_that_changed_after_the_call_are_not_sealed_as_right(
    open_store, make_chunks
):
    """A caller that stopped waiting has its buffer back while the write goes on."""
    chunks, disk = make_chunks(2), Hooked("mkdir")
    st, records = open_store(io=disk), chunks.records.copy()

    def change():
        time.sleep(0.5)  # the caller has said by then what they are
        records[0] ^= 1

    disk.hook = change
    assert st.put(chunks.keys, chunks.tokens, records).written == 2
    found = st.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (0, "checksum")
