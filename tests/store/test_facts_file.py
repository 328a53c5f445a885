"""Facts beside the segments explain both ids, and nothing depends on them."""

import pytest

from kvmem import store
from kvmem.store import facts_file

MODEL, FORMAT = {"scheme": "x", "tensors": [["w", [2, 3]]]}, {"version": 1, "é": "ü"}


def test_what_was_explained_is_read_without_a_lock(open_store, tmp_path):
    with open_store() as kept:
        store.explain(kept, MODEL, FORMAT)
        assert store.read_facts(tmp_path / "root", "m", "f") == (MODEL, FORMAT)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "root/m").glob("_*")} == {
        0o600
    }


def test_facts_are_written_once_and_anew_when_they_change(open_store, tmp_path):
    kept = open_store()
    store.explain(kept, MODEL, FORMAT)
    files = sorted((tmp_path / "root" / "m").glob("_*.json"))
    assert [f.name for f in files] == ["_format.f.json", "_model.json"]
    inodes = [f.stat().st_ino for f in files]
    store.explain(kept, MODEL, FORMAT)
    assert [f.stat().st_ino for f in files] == inodes
    store.explain(kept, MODEL | {"more": 1}, FORMAT)
    assert store.read_facts(tmp_path / "root", "m", "f").model["more"] == 1


def test_formats_of_one_model_are_explained_side_by_side(open_store, tmp_path):
    with open_store(format_id="f") as kept:
        store.explain(kept, MODEL, {"version": 1})
    with open_store(format_id="g") as kept:
        store.explain(kept, MODEL, {"version": 2})
    said = [store.read_facts(tmp_path / "root", "m", f).format for f in ("f", "g")]
    assert said == [{"version": 1}, {"version": 2}]


@pytest.mark.parametrize("damage", [b"{", b"[1]", b"\xff", None])
def test_a_store_is_read_without_them(open_store, make_chunks, tmp_path, damage):
    chunks = make_chunks(2)
    with open_store() as kept:
        store.explain(kept, MODEL, FORMAT)
        kept.put(*chunks)
    for name in facts_file.names("m", "f"):
        path = tmp_path / "root" / name
        path.unlink() if damage is None else path.write_bytes(damage)
    assert store.read_facts(tmp_path / "root", "m", "f") == (None, None)
    with open_store() as kept:
        assert kept.get(*chunks[:2]).num_hit == 2
        assert all(report.status == "ok" for report in kept.verify())
    rows = store.inspect(tmp_path / "root", verify=True)
    assert [row.status for row in rows] == ["ok"]


def test_a_bucket_is_explained_too(open_objects, make_chunks, s3):
    with open_objects() as kept:
        for _ in range(2):
            store.explain(kept, MODEL, FORMAT)
        kept.put(*make_chunks(2))
    assert b'"tensors"' in s3.objects().read("m/_model.json")
    with open_objects() as again:
        assert again.swept == () and again.contains(make_chunks(2).keys) == 2
    assert s3.objects().read("m/_format.f.json")
