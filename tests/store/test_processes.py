"""Several processes on one root: one writes, any number read, and nobody waits.

Real processes: a writer that puts and evicts all the time, readers that check every
byte they are served, and a kill in the middle of it.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvmem.errors import StoreLocked

CHUNK, RECORD = 4, 96

COMMON = f"""
import json, sys, time
import numpy as np
from kvmem import store

def chat(seed, num=6):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 49152, (num, {CHUNK}), dtype=np.int32)
    records = random.integers(0, 256, (num * {CHUNK}, {RECORD}), dtype=np.uint8)
    return store.chain_keys("m/f", tokens.ravel(), {CHUNK}), tokens, records
"""

WRITER = """
st = store.PageStore.open({root!r}, "m", "f", RECORD, CHUNK, max_nbytes=60_000)
st.put(*chat(0))
st.pin(chat(0)[0])
print("ready", flush=True)
seed = 0
while True:
    seed += 1
    st.put(*chat(seed % 40))
    print(seed, flush=True)
"""

READER = """
st = store.PageStore.open({root!r}, "m", "f", RECORD, CHUNK, read_only=True)
end, slowest, seen, reasons = time.monotonic() + {seconds}, 0.0, 0, set()
while time.monotonic() < end:
    st.refresh()
    for seed in range(40):
        keys, tokens, records = chat(seed)
        started = time.perf_counter()
        found = st.get(keys, tokens)
        slowest = max(slowest, time.perf_counter() - started)
        assert (found.records == records[: found.num_hit * CHUNK]).all(), seed
        assert found.reason in (None, "not_found", "evicted"), found
        seen += found.num_hit
        reasons.add(found.reason)
assert "jax" not in sys.modules
print(json.dumps([seen, slowest, st.get(*chat(0)[:2]).num_hit]))
"""


@pytest.fixture
def start(repo_root, tmp_path):
    """Start code in a process of its own; every one is ended."""
    processes = []

    def run(code: str, **facts) -> subprocess.Popen:
        facts = {"root": str(tmp_path / "root")} | facts
        code = code.replace("CHUNK", str(CHUNK)).replace("RECORD", str(RECORD))
        command = [sys.executable, "-c", COMMON + code.format(**facts)]
        env = os.environ | {"PYTHONPATH": str(repo_root)}
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_readers_never_block_and_never_see_a_half_written_chunk(
    start, open_store, tmp_path
):
    writer = start(WRITER)
    assert writer.stdout.readline() == "ready\n"
    with pytest.raises(StoreLocked, match=f"process {writer.pid}"):
        open_store()
    readers = [start(READER, seconds=2.5) for _ in range(2)]
    while any(reader.poll() is None for reader in readers):
        assert writer.poll() is None
        last = writer.stdout.readline()
    assert int(last) > 5, "the writer went on all the while"
    for reader in readers:
        assert reader.wait() == 0
        seen, slowest, pinned = json.loads(reader.stdout.read())
        assert seen > 100 and slowest < 5
        assert pinned == 6


def test_a_killed_writers_lock_is_free_and_its_chunks_are_whole(
    start, open_store, tmp_path
):
    writer = start(WRITER)
    assert writer.stdout.readline() == "ready\n"
    for _ in range(5):
        last = int(writer.stdout.readline())
    time.sleep(0.03)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    st = open_store()
    assert len(st.swept) <= 2
    assert all(report.status == "ok" for report in st.verify())
    assert st.stats().num_chunks >= 6 and last >= 5
