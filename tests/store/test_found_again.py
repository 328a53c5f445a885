"""What another process finds while somebody writes, and what cleaning up leaves."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("a_file_a_row")

CHUNK, RECORD = 4, 96


@pytest.mark.case("PER-09")
def test_another_process_finds_three_pages_beside_a_file_that_is_being_written(
    tmp_path, make_chunks, run_python, repo_root
):
    """A saves three pages and exits; W is writing a fourth; B asks for all four."""
    chunks, root = make_chunks(4), str(tmp_path / "root")
    save = f"""
import sys, time, numpy as np
from kvmem import store

class Slow(store.Disk):
    def perform(self, step, action):
        if step.verb == "rename" and sys.argv[1] == "slow":
            print("writing", flush=True)
            time.sleep(60)
        return action()

tokens = np.array({chunks.tokens.tolist()}, np.int32)
records = np.frombuffer(bytes.fromhex("{chunks.records.tobytes().hex()}"), np.uint8)
records = records.reshape(-1, {RECORD})
keys = store.chain_keys("m/f", tokens.ravel(), {CHUNK})
count = int(sys.argv[2])
with store.PageStore.open({root!r}, "m", "f", {RECORD}, {CHUNK}, io=Slow()) as st:
    st.put(keys[:count], tokens[:count], records[: count * {CHUNK}])
"""
    ask = f"""
import numpy as np
from kvmem import store
tokens = np.array({chunks.tokens.tolist()}, np.int32)
keys = store.chain_keys("m/f", tokens.ravel(), {CHUNK})
with store.PageStore.open({root!r}, "m", "f", {RECORD}, {CHUNK},
                          read_only=True) as st:
    found = st.get(keys, tokens)
print(found.num_hit, found.reason, found.records.tobytes().hex())
"""
    env = os.environ | {"PYTHONPATH": str(repo_root)}
    command = [sys.executable, "-c", save]
    subprocess.run([*command, "quick", "3"], env=env, check=True, timeout=120)
    with subprocess.Popen(
        [*command, "slow", "4"], stdout=subprocess.PIPE, env=env
    ) as writer:
        try:
            assert writer.stdout.readline() == b"writing\n"
            said = run_python(ask).split()
        finally:
            writer.send_signal(signal.SIGKILL)
    expected = chunks.records[: 3 * CHUNK].tobytes().hex()
    assert said == ["3", "not_found", expected]


@pytest.mark.case("PER-10")
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_cleaning_up_after_damage_keeps_what_was_published_meanwhile(
    open_store, make_chunks, damage
):
    chunks, writer = make_chunks(4), open_store()
    old = writer.put(*chunks).segment
    reader = open_store(read_only=True)
    row = chunks.records[2 * CHUNK : 3 * CHUNK].tobytes()
    files = [p for p in (writer._folder / old).rglob("*") if p.is_file()]
    (path,) = (p for p in files if row in p.read_bytes())
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    seen = reader.get(chunks.keys, chunks.tokens)
    assert (seen.num_hit, seen.reason in ("checksum", "damaged")) == (2, True)
    assert writer.get(chunks.keys, chunks.tokens).num_hit == 2
    newer = writer.put(*chunks).segment
    assert newer not in (None, old)
    done = writer.gc()
    assert newer not in (*done.swept, *done.dropped)
    assert reader.get(chunks.keys, chunks.tokens).num_hit >= 2
    reader.refresh()
    for st in (writer, reader):
        found = st.get(chunks.keys, chunks.tokens)
        assert (found.num_hit, found.reason) == (4, None)
        np.testing.assert_array_equal(found.records, chunks.records)
    writer.close()
    assert open_store().get(chunks.keys, chunks.tokens).num_hit == 4
