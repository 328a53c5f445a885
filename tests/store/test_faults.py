"""Every file of a root, damaged in every way: each time it is seen, and said.

What a reader gets is then a prefix with the right bytes and a reason; what `verify`
says names the file; and nothing is deleted.
"""

import json
import shutil

import numpy as np
import pytest

from kvmem import store
from kvmem.errors import CorruptPage, FormatMismatch
from kvmem.store import manifest, segment

pytestmark = pytest.mark.usefixtures("a_file_a_row")

CHUNK, RECORD = 4, 96
REASONS = {"checksum", "damaged", "not_found", "format", "model", "evicted"}


def flipped(data: bytes, at: float) -> bytes:
    damaged = bytearray(data)
    damaged[int(at * (len(data) - 1))] ^= 0x10
    return bytes(damaged)


DAMAGES = {
    "a flipped bit at the start": lambda data: flipped(data, 0.0),
    "a flipped bit in the middle": lambda data: flipped(data, 0.5),
    "a flipped bit at the end": lambda data: flipped(data, 1.0),
    "cut in half": lambda data: data[: len(data) // 2],
    "cut by a byte": lambda data: data[:-1],
    "empty": lambda data: b"",
    "an appended byte": lambda data: data + b"\0",
}


@pytest.fixture
def written(open_store, make_chunks):
    """A closed root with two segments of one conversation."""
    chunks, st = make_chunks(5), open_store()
    st.put(*chunks.part(0, 3))
    st.put(*chunks.part(3, 5), parent=chunks.keys[2])
    st.close()
    return chunks, st._folder


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def contents(folder):
    return {path: path.read_bytes() for path in files_of(folder)}


def assert_seen(open_store, chunks, folder, name: str, what: str) -> str | None:
    """A reader gets right bytes and a reason, and verify names what is wrong."""
    before = contents(folder)
    reader = open_store(read_only=True)
    found = reader.get(chunks.keys, chunks.tokens)
    np.testing.assert_array_equal(
        found.records, chunks.records[: found.num_hit * CHUNK], err_msg=f"{name} {what}"
    )
    assert (found.reason in REASONS) == (found.num_hit < 5), (name, what, found)
    bad = [r for r in reader.verify() if r.status != "ok"]
    assert bad, f"{name} {what}: verify saw nothing"
    words = " ".join(problem for report in bad for problem in report.problems)
    assert name.split("/", 1)[-1] in words or bad[0].status == "unfinished", words
    assert contents(folder) == before, "nothing read deletes anything"
    return found.reason


@pytest.mark.case("PER-10")
@pytest.mark.parametrize("what", DAMAGES)
def test_damage_to_any_file_of_a_segment_is_seen(written, open_store, what):
    chunks, folder = written
    reasons = set()
    for path in files_of(folder):
        data = path.read_bytes()
        path.write_bytes(DAMAGES[what](data))
        name = path.relative_to(folder).as_posix()
        reasons.add(assert_seen(open_store, chunks, folder, name, what))
        path.write_bytes(data)
    assert reasons & {"checksum", "damaged"} and "not_found" in reasons
    reader = open_store(read_only=True)
    assert all(report.status == "ok" for report in reader.verify())


@pytest.mark.case("PER-10")
def test_any_file_that_is_gone_is_seen(written, open_store):
    chunks, folder = written
    for path in files_of(folder):
        data = path.read_bytes()
        path.unlink()
        name = path.relative_to(folder).as_posix()
        assert_seen(open_store, chunks, folder, name, "gone")
        path.write_bytes(data)


@pytest.mark.case("PER-10")
def test_any_two_files_of_a_segment_that_are_swapped_are_seen(written, open_store):
    chunks, folder = written
    first = min(folder.iterdir())
    files = files_of(first)
    data = {path: path.read_bytes() for path in files}
    swaps = [(a, b) for a in files for b in files if a < b and data[a] != data[b]]
    assert len(swaps) > 30
    for one, other in swaps[:: max(1, len(swaps) // 12)]:
        one.write_bytes(data[other])
        other.write_bytes(data[one])
        name = one.relative_to(folder).as_posix()
        if manifest.NAME in (one.name, other.name):
            name = manifest.NAME
        assert_seen(open_store, chunks, folder, name, f"swapped with {other.name}")
        one.write_bytes(data[one])
        other.write_bytes(data[other])


@pytest.mark.case("PER-10")
def test_rows_swapped_between_segments_are_never_served(written, open_store):
    chunks, folder = written
    first, second = sorted(folder.iterdir())
    row = f"{segment.ORBAX}/records/c/0"
    one, other = (first / row).read_bytes(), (second / row).read_bytes()
    (first / row).write_bytes(other)
    (second / row).write_bytes(one)
    assert assert_seen(open_store, chunks, folder, row, "swapped") == "checksum"


@pytest.mark.parametrize("made_for", ["model", "format"])
def test_a_foreign_segment_copied_in_is_refused_by_name(
    open_store, make_chunks, made_for
):
    """The same keys, other bytes: only the manifest tells."""
    chunks, foreign = make_chunks(3), make_chunks(3)
    ids = ("other", "f") if made_for == "model" else ("m", "other")
    st = open_store(*ids)
    name = st.put(*foreign).segment
    st.close()
    mine = open_store()
    shutil.copytree(st._folder / name, mine._folder / name)
    mine.close()
    shutil.rmtree(st._folder)
    reader = open_store(read_only=True)
    found = reader.get(chunks.keys, chunks.tokens)
    assert (found.num_hit, found.reason) == (0, made_for)
    (report,) = reader.verify()
    assert report.status == "foreign" and "other" in report.problems[0]
    writer = open_store()
    assert writer.put(*chunks).written == 3
    assert writer.get(chunks.keys, chunks.tokens).num_hit == 3
    assert (mine._folder / name).exists()


def test_two_layout_versions_live_side_by_side(written, open_store):
    """A later kvmem's segment is neither read nor harmed; the miss says why."""
    chunks, folder = written
    first = min(folder.iterdir())
    path = first / manifest.NAME
    body = manifest.unpack(path.read_bytes()) | {"version": manifest.VERSION + 1}
    path.write_bytes(manifest.pack(body))
    before = contents(first)
    st = open_store()
    found = st.get(chunks.keys, chunks.tokens)
    assert (found.num_hit, found.reason) == (0, "format")
    assert "layout version" in found.detail
    assert {r.segment: r.status for r in st.verify()}[first.name] == "version"
    assert st.put(*chunks).written == 3
    assert st.get(chunks.keys, chunks.tokens).num_hit == 5
    st.gc()
    assert contents(first) == before


@pytest.mark.case("LAY-02")
@pytest.mark.case("LAY-03")
def test_only_the_very_model_and_format_hit(open_store, make_chunks):
    """Stored as bf16; asked for as fp8, and as bf16 of other weights."""
    chunks = make_chunks(3)
    for ids in (("w1", "bf16"), ("w1", "fp8"), ("w2", "bf16")):
        with open_store(*ids) as st:
            if ids == ("w1", "bf16"):
                st.put(*chunks)
    reasons = {}
    for ids in (("w1", "bf16"), ("w1", "fp8"), ("w2", "bf16")):
        found = open_store(*ids, read_only=True).get(chunks.keys, chunks.tokens)
        reasons[ids] = (found.num_hit, found.reason)
    assert reasons == {
        ("w1", "bf16"): (3, None),
        ("w1", "fp8"): (0, "format"),
        ("w2", "bf16"): (0, "model"),
    }


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_to_the_roots_own_facts_is_seen(written, open_store, what):
    _, folder = written
    path = folder.parent.parent / "_store.json"
    data = path.read_bytes()
    damaged = DAMAGES[what](data)
    path.write_bytes(damaged)
    try:
        same = json.loads(damaged) == json.loads(data)
    except ValueError:
        same = False
    if same:  # a newline that became another white space
        open_store(read_only=True)
        return
    with pytest.raises((CorruptPage, FormatMismatch)):
        open_store(read_only=True)
    assert path.read_bytes() == damaged


def test_damage_is_reported_for_the_whole_root(written, open_store):
    chunks, folder = written
    root = folder.parent.parent
    rows = store.inspect(root, verify=True)
    assert [(r.model_id, r.format_id, r.status, r.num_chunks) for r in rows] == [
        ("m", "f", "ok", 3),
        ("m", "f", "ok", 2),
    ]
    assert rows[0].arrays == (store.ArrayReport("orbax/records", "uint8", (1152,)),)
    assert rows[0].nbytes == 3 * CHUNK * RECORD
    assert rows[0].file_nbytes == sum(
        p.stat().st_size for p in files_of(folder / rows[0].segment)
    )
    path = folder / rows[1].segment / "orbax" / "_METADATA"
    path.write_bytes(flipped(path.read_bytes(), 0.5))
    (root / "x" / "y" / "00000001-aaaaaaaa").mkdir(parents=True)
    assert [r.status for r in store.inspect(root)] == ["ok", "ok", "unfinished"]
    assert [r.status for r in store.inspect(root, verify=True)] == [
        "ok",
        "damaged",
        "unfinished",
    ]
