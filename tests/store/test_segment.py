import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

from kvmem.errors import CorruptPage
from kvmem.store import durable, manifest, orbax_save, row_files, segment, sidecar
from kvmem.store import rows as rows_on_disk
from kvmem.store.segment import Facts, Unusable

pytestmark = pytest.mark.usefixtures("a_file_a_row")

FACTS = Facts("m", "f", 4, 96)
NAME = "00000001-0a0b0c0d"


@pytest.fixture
def written(tmp_path, make_chunks):
    chunks = make_chunks(5)
    rows = chunks.records.reshape(5, -1)
    return segment.write(tmp_path / NAME, FACTS, chunks.keys, chunks.tokens, rows)


def read(seg, rows):
    out = np.full((len(rows), FACTS.row_nbytes), 0xEE, np.uint8)
    return rows_on_disk.read(seg, rows, out), out


def test_what_was_written_is_loaded_without_reading_an_array(written, make_chunks):
    chunks = make_chunks(5)
    for path in (written.folder / segment.ORBAX).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    loaded = segment.load(written.folder, FACTS)
    assert loaded.keys == chunks.keys and loaded.checksums == written.checksums
    assert loaded.tokens.dtype == np.int32
    np.testing.assert_array_equal(loaded.tokens, chunks.tokens)
    assert (loaded.name, loaded.nbytes) == (NAME, chunks.records.nbytes)


def test_rows_are_read_in_the_order_asked(written, make_chunks):
    rows = make_chunks(5).records.reshape(5, -1)
    faults, out = read(segment.load(written.folder, FACTS), [3, 0, 4])
    assert faults == [None] * 3
    np.testing.assert_array_equal(out, rows[[3, 0, 4]])


def test_a_row_of_zeros_and_a_row_of_ff_come_back(tmp_path, make_chunks):
    chunks = make_chunks(2)
    rows = np.stack([np.zeros(384, np.uint8), np.full(384, 0xFF, np.uint8)])
    seg = segment.write(tmp_path / NAME, FACTS, chunks.keys, chunks.tokens, rows)
    faults, out = read(seg, [0, 1])
    assert faults == [None, None] and rows_on_disk.inspect(seg) == ()
    np.testing.assert_array_equal(out, rows)


def test_orbax_keeps_one_stacked_uncompressed_array(written):
    array = written.folder / segment.ORBAX / "records"
    about = json.loads((array / "zarr.json").read_text())
    assert about["shape"] == [5 * 384] and about["data_type"] == "uint8"
    assert about["chunk_grid"]["configuration"]["chunk_shape"] == [384]
    codecs = [c["name"] for c in about["codecs"][0]["configuration"]["codecs"]]
    assert codecs == ["bytes"]
    assert sorted(os.listdir(array / "c")) == ["0", "1", "2", "3", "4"]


def test_orbax_itself_restores_the_rows(tmp_path, make_chunks, monkeypatch):
    import orbax.checkpoint as ocp

    monkeypatch.setattr(row_files, "FILE_NBYTES", 2 * FACTS.row_nbytes)
    chunks = make_chunks(5)
    rows = chunks.records.reshape(5, -1)
    seg = segment.write(tmp_path / NAME, FACTS, chunks.keys, chunks.tokens, rows)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(seg.folder / segment.ORBAX)
    assert {name: array.size for name, array in tree.items()} == {
        "records": 4 * 384,
        "rest": 384,
    }
    flat = np.concatenate([tree["records"], tree["rest"]])
    np.testing.assert_array_equal(flat.reshape(5, -1), rows)


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 7, 11, 12, 13])
def test_small_rows_share_files_and_come_back_in_any_order(
    tmp_path, make_chunks, monkeypatch, num
):
    monkeypatch.setattr(row_files, "FILE_NBYTES", 3 * FACTS.row_nbytes + 100)
    chunks = make_chunks(num)
    rows = chunks.records.reshape(num, -1)
    segment.write(tmp_path / NAME, FACTS, chunks.keys, chunks.tokens, rows)
    seg = segment.load(tmp_path / NAME, FACTS)
    assert rows_on_disk.inspect(seg) == ()
    files = (seg.folder / segment.ORBAX).glob("re*/c/*")
    sizes = [path.stat().st_size - orbax_save.TAIL_NBYTES for path in files]
    assert len(sizes) == -(-num // 3)
    assert sum(sizes) == num * FACTS.row_nbytes, "no byte is padding"
    random = np.random.default_rng(num)
    for order in (range(num), range(num)[::-1], random.permutation(num), [num // 2]):
        faults, out = read(seg, list(order))
        assert faults == [None] * len(order)
        np.testing.assert_array_equal(out, rows[list(order)])


def test_a_damaged_shared_file_faults_its_rows_alone(
    tmp_path, make_chunks, monkeypatch
):
    monkeypatch.setattr(row_files, "FILE_NBYTES", 2 * FACTS.row_nbytes)
    chunks = make_chunks(6)
    rows = chunks.records.reshape(6, -1)
    seg = segment.write(tmp_path / NAME, FACTS, chunks.keys, chunks.tokens, rows)
    files = seg.folder / segment.ORBAX / "records" / "c"
    os.truncate(files / "1", 100)
    flipped = bytearray((files / "2").read_bytes())
    flipped[FACTS.row_nbytes] ^= 1
    (files / "2").write_bytes(flipped)
    reasons = [fault and fault[0] for fault in read(seg, list(range(6)))[0]]
    assert reasons == [None, None, "damaged", "damaged", None, "checksum"]


def test_every_file_is_listed_sealed_and_closed_to_others(written):
    body = manifest.unpack((written.folder / manifest.NAME).read_bytes())
    there = {
        p.relative_to(written.folder).as_posix()
        for p in written.folder.rglob("*")
        if p.is_file()
    }
    assert there == set(body["files"]) | {manifest.NAME}
    assert {"orbax/_METADATA", sidecar.NAME} <= there
    for path in [written.folder, *written.folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_the_manifest_comes_last_and_the_folder_is_durable_before(
    tmp_path, make_chunks, monkeypatch
):
    """What is not synced when `write` returns could be lost, so nothing is left out."""
    events = []
    fsync, rename = os.fsync, os.rename

    def note(kind, path):
        events.append((kind, os.path.relpath(path, tmp_path)))

    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (note("sync", os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)),
    )

    def renamed(a, b):
        if str(b).endswith(manifest.NAME):
            note("rename", b)
        return rename(a, b)

    monkeypatch.setattr(os, "rename", renamed)
    chunks = make_chunks(3)
    rows = chunks.records.reshape(3, -1)
    seg = segment.write(tmp_path / NAME, FACTS, chunks.keys, chunks.tokens, rows)
    sealed = {("sync", NAME), ("sync", ".")} | {
        ("sync", os.path.relpath(p, tmp_path))
        for p in seg.folder.rglob("*")
        if p.name != manifest.NAME
    }
    assert set(events[:-3]) == sealed
    assert events[-3:] == [
        ("sync", f"{NAME}/{manifest.NAME}.tmp"),
        ("rename", f"{NAME}/{manifest.NAME}"),
        ("sync", NAME),
    ]


@pytest.mark.parametrize("step", ["save", "pack", "_body"])
def test_a_write_that_fails_leaves_nothing(tmp_path, make_chunks, monkeypatch, step):
    room = {"save": orbax_save, "pack": sidecar, "_body": segment}[step]
    whole = getattr(room, step)

    def fail(*args):
        if step == "save":
            whole(*args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room, step, fail)
    chunks = make_chunks(2)
    rows = chunks.records.reshape(2, -1)
    with pytest.raises(OSError, match="No space"):
        segment.write(tmp_path / NAME, FACTS, chunks.keys, chunks.tokens, rows)
    assert os.listdir(tmp_path) == []


def test_an_unsealed_segment_is_not_there(written):
    (written.folder / manifest.NAME).rename(written.folder / "manifest.json.tmp")
    assert segment.load(written.folder, FACTS).status == "unfinished"


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (Facts("other", "f", 4, 96), "foreign", "written for m/f"),
        (Facts("m", "other", 4, 96), "foreign", "written for m/f"),
        (Facts("m", "f", 4, 97), "format", "4 tokens of 96 bytes"),
        (Facts("m", "f", 8, 96), "format", "asked for 8 of 96"),
    ],
)
def test_another_stores_segment_is_refused(written, facts, status, words):
    refused = segment.load(written.folder, facts)
    assert isinstance(refused, Unusable)
    assert refused.status == status and words in refused.detail


def test_a_segment_under_another_name_is_foreign(written):
    moved = written.folder.rename(written.folder.parent / "00000002-0a0b0c0d")
    assert segment.load(moved, FACTS).status == "foreign"


def test_a_later_layout_version_is_refused(written):
    path = written.folder / manifest.NAME
    body = manifest.unpack(path.read_bytes()) | {"version": 4, "facts": {"new": 1}}
    path.write_bytes(manifest.pack(body))
    refused = segment.load(written.folder, FACTS)
    assert refused.status == "version" and "version 4" in refused.detail


def all_files(seg):
    return sorted(p for p in seg.folder.rglob("*") if p.is_file())


def seen_wrong(seg) -> bool:
    loaded = segment.load(seg.folder, FACTS)
    return isinstance(loaded, Unusable) or bool(rows_on_disk.inspect(loaded))


def test_any_damage_to_any_file_is_seen_by_inspection(written):
    assert not seen_wrong(written)
    for path in all_files(written):
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damaged in (bytes(flipped), data[:-1], data + b"\0", b""):
            path.write_bytes(damaged)
            assert seen_wrong(written), path
        path.unlink()
        assert seen_wrong(written), path
        path.write_bytes(data)
    assert not seen_wrong(written)


def test_two_swapped_files_and_a_stray_file_are_seen(written):
    rows = written.folder / segment.ORBAX / "records" / "c"
    (rows / "0").rename(rows / "x")
    (rows / "1").rename(rows / "0")
    (rows / "x").rename(rows / "1")
    assert seen_wrong(written)
    assert [fault[0] for fault in read(written, [0, 1])[0]] == ["checksum"] * 2
    assert read(written, [2])[0] == [None]


def test_a_stray_file_is_seen(written):
    (written.folder / segment.ORBAX / "stray").touch()
    assert rows_on_disk.inspect(written) == ("orbax/stray: not in the manifest",)


def test_a_faulty_row_leaves_the_others_served(written, make_chunks):
    rows = written.folder / segment.ORBAX / "records" / "c"
    flipped = bytearray((rows / "1").read_bytes())
    flipped[7] ^= 0x10
    (rows / "1").write_bytes(flipped)
    os.truncate(rows / "3", 100)
    faults, out = read(written, [0, 1, 2, 3, 4])
    assert [fault and fault[0] for fault in faults] == [
        None,
        "checksum",
        None,
        "damaged",
        None,
    ]
    expected = make_chunks(5).records.reshape(5, -1)
    np.testing.assert_array_equal(out[[0, 2, 4]], expected[[0, 2, 4]])


@pytest.mark.parametrize("damage", ["gone", "other shape"])
def test_an_array_that_cannot_be_opened_faults_every_row(written, damage):
    about = written.folder / segment.ORBAX / "records" / "zarr.json"
    if damage == "gone":
        about.unlink()
    else:
        about.write_text(about.read_text().replace("[1920]", "[2304]"))
    assert [fault[0] for fault in read(written, [0, 1])[0]] == ["damaged"] * 2


def test_orbax_says_nothing_to_the_user_and_absl_is_left_as_it_was(tmp_path, repo_root):
    code = f"""
import logging, pathlib, numpy as np
from absl import logging as absl_logging
from kvmem.store import chain_keys, segment
tokens = np.arange(8).reshape(2, 4).astype(np.int32)
keys = chain_keys("m/f", tokens.ravel(), 4)
facts = segment.Facts("m", "f", 4, 96)
rows = np.ones((2, 384), np.uint8)
segment.write(pathlib.Path({str(tmp_path)!r}) / "{NAME}", facts, keys, tokens, rows)
absl_logging.warning("heard again")
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.strip().endswith("heard again")
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_checksum_is_of_the_rows_bytes(written, make_chunks):
    rows = make_chunks(5).records.reshape(5, -1)
    assert written.checksums == tuple(durable.digest(row.tobytes()) for row in rows)
    assert len(set(written.checksums)) == 5


# what was put against what the disk got


@pytest.fixture
def meddle(tmp_path, make_chunks, monkeypatch):
    """Write a segment of five rows while somebody changes what Orbax wrote."""
    chunks = make_chunks(5)
    rows = chunks.records.reshape(5, -1)
    whole = orbax_save.save

    def write(change):
        def save(path, arrays):
            whole(path, arrays)
            change(path / "records" / "c" / "2")

        monkeypatch.setattr(orbax_save, "save", save)
        return segment.write(tmp_path / NAME, FACTS, chunks.keys, chunks.tokens, rows)

    return write


def test_a_bit_that_flips_on_the_way_to_the_disk_is_not_sealed_as_right(
    meddle, a_file_a_row
):
    def flip(path):
        data = bytearray(path.read_bytes())
        data[7] ^= 1
        path.write_bytes(data)

    seg = meddle(flip)
    assert rows_on_disk.inspect(seg) == (
        "orbax/records/c/2: digest differs",
        "chunk 2: checksum: the bytes read differ from those written",
    )


@pytest.mark.parametrize(
    "change",
    {
        "shorter": lambda path: os.truncate(path, 100),
        "without an index": lambda path: os.truncate(path, 384),
        "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        "elsewhere": lambda path: path.write_bytes(path.read_bytes()[::-1]),
    }.items(),
    ids=lambda each: each[0],
)
def test_a_file_that_orbax_laid_out_otherwise_is_no_segment(
    meddle, a_file_a_row, tmp_path, change
):
    with pytest.raises(CorruptPage, match="an index of 20 that points at them"):
        meddle(change[1])
    assert os.listdir(tmp_path) == []


def test_the_digests_of_row_files_are_those_of_the_files(written):
    body = manifest.unpack((written.folder / manifest.NAME).read_bytes())
    for name, (nbytes, digest) in body["files"].items():
        data = (written.folder / name).read_bytes()
        assert (len(data), durable.digest(data).hex()) == (nbytes, digest), name
