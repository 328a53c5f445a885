"""Records on a real S3 server: committed by one put, one writer, verified on read."""

import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorstore

from kvmem import errors, store
from kvmem.store import manifest, object_arrays, object_segment, row_files, writer_lease

CHUNK, RECORD = 4, 96
ROW = CHUNK * RECORD
HOME = "m/f/"


def array_objects(s3) -> list[str]:
    return [name for name in s3.objects().names(HOME) if "/c/" in name]


def manifests(s3) -> list[str]:
    return s3.objects().names(f"{HOME}_segments/")


def test_what_was_put_is_there_for_another_process(open_objects, make_chunks, s3):
    chunks = make_chunks(7)
    with open_objects() as written:
        done = written.put(*chunks)
    assert (done.written, done.already_present, done.nbytes) == (7, 0, 7 * ROW)
    found = open_objects(read_only=True).get(*chunks[:2])
    assert (found.num_hit, found.reason) == (7, None)
    assert (found.records == chunks.records).all()


def test_it_stands_in_a_page_stores_place(open_objects):
    made = open_objects()
    for name in ("facts", "writable", "put", "get", "contains", "stats", "close"):
        assert hasattr(made, name)
    for name in ("num_chunks", "nbytes", "written", "already_present", "hits"):
        assert hasattr(made.stats(), name)


def test_it_is_the_zarr_array_of_a_segment_on_disk(
    open_objects, open_store, make_chunks, s3, tmp_path
):
    chunks = make_chunks(6)
    open_store().put(*chunks)
    open_objects().put(*chunks)
    (about,) = (tmp_path / "root").rglob("zarr.json")
    folder = {"driver": "file", "path": str(about.parent)}
    (name,) = [n for n in s3.objects().names(HOME) if n.endswith("zarr.json")]
    objects = s3.objects().spec(name.removesuffix("zarr.json"))
    disk, made = (
        tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
        for kvstore in (folder, objects)
    )
    assert (made.shape, made.dtype) == (disk.shape, disk.dtype)
    assert made.chunk_layout.write_chunk.shape == disk.chunk_layout.write_chunk.shape
    assert (made.read().result() == disk.read().result()).all()
    assert made.codec.to_json()["codecs"] == [{"name": "bytes"}]  # nothing compressed


def test_rows_share_objects_and_are_read_alone(open_objects, make_chunks, s3):
    chunks = make_chunks(10)
    made = open_objects()
    made.put(*chunks)
    assert len(array_objects(s3)) == 1
    found = made.get(chunks.keys[3:5], chunks.tokens[3:5])
    assert (found.records == chunks.records[3 * CHUNK : 5 * CHUNK]).all()


def test_many_objects_hold_a_large_segment(open_objects, make_chunks, s3, monkeypatch):
    monkeypatch.setattr(row_files, "FILE_NBYTES", 3 * ROW)
    chunks = make_chunks(8)
    made = open_objects()
    made.put(*chunks)
    assert len(array_objects(s3)) == 3
    for rows in (range(8), [1, 2, 3], [7], [0, 7]):
        wanted = np.array(rows)
        faults = object_segment.read(
            made._index.places[chunks.keys[0]].segment,
            list(rows),
            out := np.empty((len(wanted), ROW), np.uint8),
        )
        assert faults == [None] * len(wanted)
        assert (out == chunks.records.reshape(8, ROW)[wanted]).all()


def test_records_of_zeros_are_objects_too(open_objects, make_chunks, s3):
    keys, tokens, records = make_chunks(2)
    made = open_objects()
    made.put(keys, tokens, np.zeros_like(records))
    assert len(array_objects(s3)) == 1
    assert made.get(keys, tokens).num_hit == 2
    assert [r.status for r in made.verify()] == ["ok"]


def test_one_key_names_one_content(open_objects, make_chunks, s3):
    chunks, made = make_chunks(3), open_objects()
    made.put(*chunks.part(0, 2))
    assert made.put(*chunks).written == 1
    assert made.put(*chunks) == store.PutResult(0, 3, 0, None)
    records = chunks.records.copy()
    records[0, 0] ^= 1
    before = s3.objects().names()
    with pytest.raises(errors.Conflict, match="other records"):
        made.put(chunks.keys, chunks.tokens, records)
    assert s3.objects().names() == before


def test_a_partial_hit_says_why_it_ends(open_objects, make_chunks):
    chunks, made = make_chunks(4), open_objects()
    made.put(*chunks.part(0, 2))
    assert made.contains(chunks.keys) == 2
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (2, "not_found")
    other = chunks.tokens.copy()
    other[1, 0] += 1
    assert made.get(chunks.keys, other).reason == "tokens"
    assert made.stats().misses == {"not_found": 1, "tokens": 1}


def test_the_manifest_is_put_last(open_objects, make_chunks, s3, monkeypatch):
    made, order = open_objects(), []
    put, put_new = made._bucket.put, made._bucket.put_new

    def note(name, data, how):
        order.append((name.removeprefix(HOME), len(array_objects(s3))))
        return how(name, data)

    monkeypatch.setattr(made._bucket, "put", lambda n, d: note(n, d, put))
    monkeypatch.setattr(made._bucket, "put_new", lambda n, d: note(n, d, put_new))
    made.put(*make_chunks(3))
    assert order[-1] == ("_segments/00000001.json", 1)
    assert [name for name, _ in order[:-1]] == [f"{_folder(s3)}/chunks.safetensors"]


def _folder(s3) -> str:
    return array_objects(s3)[0].removeprefix(HOME).partition("/")[0]


@pytest.mark.parametrize("step", ["array", "sidecar", "manifest"])
def test_a_put_that_fails_leaves_nothing_that_is_read(
    open_objects, make_chunks, s3, monkeypatch, step
):
    chunks, made = make_chunks(3), open_objects()

    def fail(*_):
        raise OSError(5, "the server went away")

    if step == "array":
        monkeypatch.setattr(object_arrays, "put", fail)
    else:
        verb = "put" if step == "sidecar" else "put_new"
        monkeypatch.setattr(made._bucket, verb, fail)
    with pytest.raises(OSError, match="went away"):
        made.put(*chunks)
    left = s3.objects().names(HOME)
    assert (left == []) == (step != "manifest")  # its answer may only have been lost
    assert open_objects(read_only=True).contains(chunks.keys) == 0
    assert made.contains(chunks.keys) == 0
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert made.put(*chunks).written == 3
    assert [r.status for r in made.verify()] == ["ok"]


def test_a_commit_whose_answer_was_lost_is_whole(
    open_objects, make_chunks, monkeypatch
):
    chunks, made = make_chunks(3), open_objects()
    put_new = made._bucket.put_new

    def lose(name, data):
        put_new(name, data)
        raise OSError(5, "connection reset")

    monkeypatch.setattr(made._bucket, "put_new", lose)
    with pytest.raises(OSError, match="connection reset"):
        made.put(*chunks)
    monkeypatch.setattr(made._bucket, "put_new", put_new)
    assert open_objects(read_only=True).get(*chunks[:2]).num_hit == 3
    assert made.put(*chunks).already_present == 3
    assert made.put(*make_chunks(2, 1)).written == 2
    assert [r.status for r in made.verify()] == ["ok", "ok"]


def test_what_a_dead_writer_left_is_never_read_and_swept_by_the_next(
    open_objects, make_chunks, s3, monkeypatch
):
    chunks = make_chunks(3)
    dead = open_objects()
    monkeypatch.setattr(object_segment, "_commit", _die)
    monkeypatch.setattr(dead._bucket, "delete", _die)
    with pytest.raises(KeyboardInterrupt):
        dead.put(*chunks)
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    left = s3.objects().names(HOME)
    assert len(left) == 3
    reader = open_objects(read_only=True)
    assert reader.contains(chunks.keys) == 0 and s3.objects().names(HOME) == left
    dead._lease.release()
    with open_objects() as following:
        assert len(following.swept) == 3
        assert manifests(s3) == s3.objects().names(HOME)  # only the fence
        # the dead one wakes up, and its commit is refused
        with pytest.raises(errors.StoreLocked):
            object_segment._commit(dead._bucket, dead.facts, 1, b"late")
        following.put(*chunks)
        assert following.get(*chunks[:2]).num_hit == 3
    assert open_objects(read_only=True).get(*chunks[:2]).num_hit == 3


def _die(*_):
    raise KeyboardInterrupt


def test_a_sweep_takes_nothing_that_was_committed(open_objects, make_chunks, s3):
    with open_objects() as first:
        first.put(*make_chunks(3, 0))
        first.put(*make_chunks(3, 1))
    objects = s3.objects()
    objects.put(f"{HOME}_about.json", b"{}")
    held = objects.names()
    with open_objects() as again:
        assert again.swept == ()
    assert [n for n in s3.objects().names() if n != writer_lease.NAME] == [
        n for n in held if n != writer_lease.NAME
    ]


def test_a_segment_that_cannot_be_read_is_not_swept(open_objects, make_chunks, s3):
    with open_objects() as first:
        first.put(*make_chunks(3))
    (name,) = manifests(s3)
    objects = s3.objects()
    data = objects.read(name)
    objects.put(name, data.replace(b"kvmem segment", b"kvmem seqment"))
    held = objects.names(HOME)
    with open_objects() as again:
        assert again.stats().num_unusable_segments == 1
        assert again.contains(make_chunks(3).keys) == 0
        (report,) = again.verify()
        assert report.status == "damaged"
        again.put(*make_chunks(2, 1))
    assert set(held) <= set(objects.names(HOME))


def test_a_root_has_one_writer_at_a_time(open_objects, make_chunks, s3):
    first = open_objects()
    with pytest.raises(errors.StoreLocked, match="process .* is it for .* s more"):
        open_objects()
    assert first.writable
    first.close()
    assert not first.writable
    with pytest.raises(errors.StoreLocked, match="closed"):
        first.put(*make_chunks(1))
    assert open_objects().writable


def test_readers_need_no_lease_and_write_nothing(open_objects, make_chunks, s3):
    open_objects().put(*make_chunks(2))
    before = s3.objects().names()
    reader = open_objects(read_only=True)
    assert not reader.writable
    with pytest.raises(errors.StoreLocked, match="read-only"):
        reader.put(*make_chunks(1, 1))
    assert s3.objects().names() == before


def test_a_silent_writer_is_taken_over_and_cannot_commit_any_more(
    open_objects, make_chunks, s3
):
    stalled = open_objects(lease_s=0.3)
    stalled.put(*make_chunks(1, 0))
    time.sleep(0.4)
    following = open_objects()
    with pytest.raises(errors.StoreLocked, match="one writer at a time"):
        stalled.put(*make_chunks(1, 1))
    assert not stalled.writable
    stalled.close()
    assert following.writable and following.put(*make_chunks(1, 1)).written == 1


def test_a_lease_that_ran_out_and_was_not_taken_is_renewed(open_objects, make_chunks):
    idle = open_objects(lease_s=2)
    time.sleep(2.1)
    assert idle.put(*make_chunks(1)).written == 1
    with pytest.raises(errors.StoreLocked):
        open_objects(lease_s=2)


def test_of_two_writers_that_both_believe_themselves_alone_one_is_refused(
    open_objects, make_chunks, s3
):
    one = open_objects(lease_s=0.1)
    time.sleep(0.2)
    two = open_objects()
    two.put(*make_chunks(2, 0))
    one._lease.renew = lambda: None  # it never looks
    with pytest.raises(errors.StoreLocked, match="given to another writer"):
        one.put(*make_chunks(2, 1))
    assert not one.writable
    assert two.put(*make_chunks(2, 2)).written == 2
    reader = open_objects(read_only=True)
    assert reader.stats().num_segments == 2
    assert [r.status for r in reader.verify()] == ["ok", "ok"]
    assert len({n.split("/")[2] for n in s3.objects().names(HOME)}) == 3


def test_a_store_is_closed_though_its_server_is_gone(open_objects, s3):
    made = open_objects(lease_s=0.3)
    made._lease._bucket = s3._replace(endpoint="http://127.0.0.1:9").objects()
    made.close()
    assert not made.writable
    time.sleep(0.4)
    assert open_objects().writable


def test_a_lease_that_cannot_be_read_has_run_out(open_objects, s3):
    open_objects().close()
    s3.objects().put(writer_lease.NAME, b"\xff not json")
    assert open_objects().writable


def test_a_refresh_finds_what_another_process_committed(open_objects, make_chunks):
    writer, reader = open_objects(), None
    writer.put(*make_chunks(2, 0))
    reader = open_objects(read_only=True)
    writer.put(*make_chunks(3, 1))
    assert reader.contains(make_chunks(3, 1).keys) == 0
    assert reader.refresh() == 1 and reader.refresh() == 0
    assert reader.get(*make_chunks(3, 1)[:2]).num_hit == 3


@pytest.mark.case("PER-10")
@pytest.mark.parametrize("how", ["flip", "truncate", "append", "delete"])
def test_damage_to_any_object_is_a_miss_and_is_named_by_verify(
    open_objects, make_chunks, s3, how
):
    chunks = make_chunks(3)
    with open_objects() as made:
        made.put(*chunks)
    objects = s3.objects()
    for name in objects.names(HOME):
        whole = objects.read(name)
        middle = len(whole) // 2
        spoiled = {
            "flip": whole[:middle] + bytes([whole[middle] ^ 8]) + whole[middle + 1 :],
            "truncate": whole[:middle],
            "append": whole + b"\0",
            "delete": None,
        }[how]
        if spoiled is None:
            objects.delete([name])
        else:
            objects.put(name, spoiled)
        reader = open_objects(read_only=True)
        found = reader.get(*chunks[:2])
        assert (found.records == chunks.records[: found.num_hit * CHUNK]).all(), name
        is_gone = how == "delete" and "_segments/" in name
        statuses = [r.status for r in reader.verify()]
        assert statuses == ([] if is_gone else ["damaged"]), name
        if "zarr.json" not in name:  # an array's description has room for white space
            assert found.num_hit < 3 and found.reason, name
        objects.put(name, whole)
    assert open_objects(read_only=True).get(*chunks[:2]).num_hit == 3


def test_a_damaged_chunk_can_be_put_again(open_objects, make_chunks, s3):
    chunks, made = make_chunks(3), open_objects()
    made.put(*chunks)
    (name,) = array_objects(s3)
    data = bytearray(s3.objects().read(name))
    data[ROW + 7] ^= 1
    s3.objects().put(name, bytes(data))
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.reason) == (1, "checksum")
    assert made.get(*chunks[:2]).reason == "checksum"
    assert made.contains(chunks.keys) == 1
    assert made.put(*chunks).written == 1
    assert made.get(*chunks[:2]).num_hit == 3


def test_objects_swapped_between_segments_are_not_served(open_objects, make_chunks, s3):
    one, two, made = make_chunks(2, 0), make_chunks(2, 1), open_objects()
    made.put(*one)
    made.put(*two)
    objects = s3.objects()
    first, second = array_objects(s3)
    swapped = objects.read(second), objects.read(first)
    objects.put(first, swapped[0])
    objects.put(second, swapped[1])
    for each in (one, two):
        assert made.get(*each[:2]).reason == "checksum"
    assert [r.status for r in made.verify()] == ["damaged", "damaged"]


def test_a_foreign_segment_copied_in_is_not_read(open_objects, make_chunks, s3):
    chunks = make_chunks(2)
    with open_objects(model_id="other") as made:
        made.put(*chunks)
    objects = s3.objects()
    for name in objects.names("other/f/"):
        objects.put(name.replace("other/", "m/", 1), objects.read(name))
    reader = open_objects(read_only=True)
    assert reader.contains(chunks.keys) == 0
    assert [r.status for r in reader.verify()] == ["foreign"]


def test_a_manifest_of_a_later_layout_is_left_alone(open_objects, make_chunks, s3):
    with open_objects() as made:
        made.put(*make_chunks(1))
    (name,) = manifests(s3)
    body = manifest.unpack(s3.objects().read(name)) | {"version": 99}
    s3.objects().put(name, manifest.pack(body))
    (report,) = open_objects(read_only=True).verify()
    assert report.status == "version"


def test_two_models_share_a_bucket_and_no_hit(open_objects, make_chunks):
    chunks = make_chunks(2)
    with open_objects(model_id="a") as made:
        made.put(*chunks)
    with open_objects(model_id="b") as made:
        assert made.get(*chunks[:2]).num_hit == 0


def test_the_chunk_size_belongs_to_the_root(open_objects):
    open_objects().close()
    with pytest.raises(errors.FormatMismatch, match="chunk_tokens=4"):
        open_objects(chunk_tokens=8)
    with pytest.raises(errors.FormatMismatch, match="chunk_tokens=4"):
        open_objects(chunk_tokens=8, read_only=True)


def test_another_record_size_under_the_same_ids_is_refused(open_objects, make_chunks):
    with open_objects() as made:
        made.put(*make_chunks(1))
    with pytest.raises(errors.FormatMismatch, match="record_nbytes=48"):
        open_objects(record_nbytes=48)
    assert open_objects().writable  # the refused one left no lease behind


def test_a_prefix_with_something_else_is_not_made_a_store(open_objects, s3):
    s3.objects().put("thesis.pdf", b"%PDF")
    with pytest.raises(errors.ConfigError, match="something else: thesis.pdf"):
        open_objects()
    assert s3.objects().names() == ["thesis.pdf"]
    with pytest.raises(errors.ConfigError, match="there is no store"):
        open_objects(read_only=True)


def test_a_late_answer_is_a_miss(open_objects, make_chunks, monkeypatch):
    chunks, made = make_chunks(2), open_objects()
    made.put(*chunks)
    monkeypatch.setattr("kvmem.store.index.RETRY_S", 0.0)  # it is asked again at once
    found = made.get(*chunks[:2], deadline_s=0.0)
    assert (found.num_hit, found.reason) == (0, "deadline")
    assert made.get(*chunks[:2], deadline_s=60.0).num_hit == 2


def test_a_server_that_went_away_is_a_miss_and_an_error_of_put(
    open_objects, make_chunks, s3, monkeypatch
):
    chunks, made = make_chunks(2), open_objects()
    made.put(*chunks)
    gone = s3._replace(endpoint="http://127.0.0.1:9").objects()
    monkeypatch.setattr(made._shelf, "bucket", gone)
    for each in {made._index.places[key].segment for key in chunks.keys}:
        object.__setattr__(each, "bucket", gone)
        object_segment._opened.pop(each, None)
    assert made.get(*chunks[:2]).reason == "unreachable"
    with pytest.raises(OSError, match="put: "):
        made.put(*make_chunks(1, 1))


def test_a_url_never_makes_a_folder(open_objects, make_chunks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_objects().put(*make_chunks(2))
    assert list(tmp_path.iterdir()) == []


def test_orbax_has_no_part_in_it(s3, run_python):
    code = f"""
import sys
import numpy as np
from kvmem import store
keys = store.chain_keys("m/f", list(range(8)), 4)
tokens, records = np.arange(8, dtype=np.int32), np.ones((8, 96), np.uint8)
with store.ObjectStore.open({s3.url!r}, "m", "f", 96, 4, **{s3.place!r}) as made:
    made.put(keys, tokens, records)
    print(made.get(keys, tokens).num_hit)
print([name for name in ("orbax", "jax", "boto3") if name in sys.modules])
"""
    assert run_python(code) == "2\n[]\n"


def test_ram_goes_in_front_of_a_bucket(open_objects, make_chunks):
    chunks = make_chunks(5)
    host = store.HostTier(3 * ROW, RECORD, CHUNK)
    made = store.TieredStore(host, open_objects())
    made.put(*chunks)
    found = made.get(*chunks[:2])
    assert (found.num_hit, found.records.tolist()) == (5, chunks.records.tolist())


def test_puts_of_several_threads_are_all_there(open_objects, make_chunks):
    made = open_objects()
    threads = [
        threading.Thread(target=made.put, args=make_chunks(2, seed))
        for seed in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.stats().num_chunks == 10
    assert [r.status for r in made.verify()] == ["ok"] * 5


_KILLED = """
import sys
import numpy as np
from kvmem import store
store.row_files.FILE_NBYTES = 1 << 14
random = np.random.default_rng({seed})
with store.ObjectStore.open({url!r}, "m", "f", 96, 4, lease_s=0.2, **{place!r}) as made:
    for number in range(1000):
        tokens = random.integers(0, 49152, (60, 4), dtype=np.int32)
        records = random.integers(0, 256, (240, 96), dtype=np.uint8)
        made.put(store.chain_keys("m/f", tokens.ravel(), 4), tokens, records)
        print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(6))
def test_what_a_killed_writer_acknowledged_is_there(
    open_objects, s3, repo_root, seed, monkeypatch
):
    code = _KILLED.format(seed=seed, url=s3.url, place=s3.place)
    env = dict(os.environ) | {"PYTHONPATH": str(repo_root)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True
    ) as writer:
        said = writer.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.15))
        writer.kill()
        said += writer.stdout.read()
    acknowledged = int(said.split()[-1]) + 1
    time.sleep(0.25)
    stream = np.random.default_rng(seed)
    with open_objects() as following:
        for number in range(acknowledged + 1):
            tokens = stream.integers(0, 49152, (60, 4), dtype=np.int32)
            records = stream.integers(0, 256, (240, 96), dtype=np.uint8)
            keys = store.chain_keys("m/f", tokens.ravel(), 4)
            found = following.get(keys, tokens)
            assert found.num_hit == 60 or (number == acknowledged and not found.num_hit)
            assert (found.records == records[: 4 * found.num_hit]).all()
        assert {r.status for r in following.verify()} == {"ok"}
        assert following.put(keys, tokens, records).written + found.num_hit == 60
