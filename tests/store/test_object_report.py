"""What a bucket holds, for whoever looks at it, and from the console."""

import json

import pytest
import safetensors.numpy

from kvmem import cli, errors, store
from kvmem.store import object_report

CHUNK, RECORD = 4, 96


def rows(s3, verify=False):
    return object_report.inspect(s3.url, verify, **s3.place)


def test_every_segment_has_a_row(open_objects, make_chunks, s3):
    with open_objects() as kept:
        kept.put(*make_chunks(5, 0))
        kept.put(*make_chunks(2, 1))
    with open_objects(model_id="b", format_id="g") as kept:
        kept.put(*make_chunks(3, 2))
    found = rows(s3)
    assert [(r.model_id, r.format_id, r.num_chunks) for r in found] == [
        ("b", "g", 3),
        ("m", "f", 5),
        ("m", "f", 2),
    ]
    assert {r.status for r in found} == {"ok"}
    assert found[1].arrays[0].shape == (5 * CHUNK * RECORD,)
    assert found[1].file_nbytes > found[1].nbytes == 5 * CHUNK * RECORD
    assert rows(s3, verify=True) == found


def test_damage_and_leftovers_are_named(open_objects, make_chunks, s3):
    with open_objects() as kept:
        kept.put(*make_chunks(2, 0))
        kept.put(*make_chunks(2, 1))
        kept.put(*make_chunks(2, 2))
    objects = s3.objects()
    arrays = [name for name in objects.names("m/") if "/c/" in name]
    objects.put(arrays[0], objects.read(arrays[0])[:-1])
    objects.put("m/f/00000009-0a0b0c0d/records/c/0", b"half")
    manifest = objects.names("m/f/_segments/")[2]
    objects.put(manifest, objects.read(manifest)[:-3])
    assert [r.status for r in rows(s3)] == ["ok", "ok", "damaged", "unfinished"]
    found = rows(s3, verify=True)
    assert [r.status for r in found] == ["damaged", "ok", "damaged", "unfinished"]
    assert "767 bytes, written with 768" in found[0].problems[0]
    assert "manifest" in found[2].problems[0]


def test_a_prefix_without_a_store_is_refused(s3):
    with pytest.raises(errors.ConfigError, match="there is no store"):
        rows(s3)


@pytest.fixture
def ask(s3, capsys, monkeypatch):
    """Run `kvmem store` on the bucket; return its exit code and output."""

    monkeypatch.setenv("COLUMNS", "160")

    def ask(action: str, *argv: str) -> tuple[int, str]:
        place = ["--endpoint", s3.endpoint, "--region", s3.region]
        code = cli.main(["store", action, s3.url, *place, *argv])
        said = capsys.readouterr()
        return code, said.out + said.err

    return ask


def test_the_console_lists_and_verifies_a_bucket(open_objects, make_chunks, s3, ask):
    with open_objects() as kept:
        kept.put(*make_chunks(3))
    code, said = ask("ls")
    assert code == 0 and "uint8[1152]" in said and "3 chunks" in said
    assert ask("verify")[0] == 0
    (name,) = [n for n in s3.objects().names("m/") if "/c/" in n]
    s3.objects().put(name, bytes(3 * CHUNK * RECORD))
    code, said = ask("verify", "--json")
    assert code == 1 and json.loads(said)[0]["status"] == "damaged"


def test_the_console_exports_a_chain_of_a_bucket(
    open_objects, make_chunks, ask, tmp_path
):
    chunks = make_chunks(5)
    with open_objects() as kept:
        kept.put(*chunks.part(0, 2))
        kept.put(*chunks.part(2, 5), parent=chunks.keys[1])
    out = tmp_path / "o"
    assert ask("export", "--key", chunks.keys[3].hex(), "-o", str(out))[0] == 0
    tensors = safetensors.numpy.load_file(out)
    assert (tensors["records"] == chunks.records[: 4 * CHUNK]).all()
    assert tensors["tokens"].tolist() == chunks.tokens[:4].ravel().tolist()


def test_the_console_shows_what_the_ids_of_a_bucket_stand_for(
    open_objects, make_chunks, ask
):
    chunks = make_chunks(5)
    with open_objects() as kept:
        kept.put(*chunks.part(0, 2))
        kept.put(*chunks.part(2, 5), parent=chunks.keys[1])
        store.explain(kept, {"layers": 2, "weights": "ab"}, {"fields": ["k", "v"]})
    code, said = ask("show")
    assert code == 1, "these facts are not what m and f digest"
    assert "model id m IS NOT THE DIGEST OF:" in said and "layers = 2" in said
    assert chunks.keys[4].hex()[:16] in said
    (found,) = json.loads(ask("show", "--json")[1])
    assert found["format"]["facts"] == {"fields": ["k", "v"]}
    (chain,) = found["chains"]
    assert (chain["key"], chain["chunks"]) == (chunks.keys[4].hex(), 5)
    assert (chain["tokens"], found["segments"]) == (5 * CHUNK, 2)


def test_the_console_tidies_a_bucket(open_objects, make_chunks, s3, ask):
    chunks, objects = make_chunks(6), s3.objects()
    with open_objects() as kept:
        for at in range(6):
            parent = chunks.keys[at - 1] if at else None
            kept.put(*chunks.part(at, at + 1), parent=parent)
    left = "m/f/00000009-0a0b0c0d/records/c/0"
    objects.put(left, b"half")
    code, said = ask("gc")
    assert code == 0 and left in said and left not in objects.names("m/")
    (done,) = json.loads(ask("gc", "--max-nbytes", "5000", "--json")[1])
    assert len(done["dropped"]) > 2 and done["freed_nbytes"] > 0
    with open_objects() as kept:
        assert 0 < kept.contains(chunks.keys) < 6
        assert kept.stats().file_nbytes <= 5_000
        code, said = ask("gc")
        assert code == 2 and "one writer at a time" in said
