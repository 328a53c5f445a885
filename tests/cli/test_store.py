"""`kvmem store`: what is there, what is wrong, and a chain for whoever has no kvmem."""

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors

from kvmem import canonical, cli, geometry, store

CHUNK, RECORD = 4, 96


def chunks(num: int, seed: int = 0, ids: tuple[str, str] = ("m", "f")):
    """Return keys, tokens and random records of one text."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 49152, (num, CHUNK), dtype=np.int32)
    records = random.integers(0, 256, (num * CHUNK, RECORD), dtype=np.uint8)
    return store.chain_keys("/".join(ids), tokens.ravel(), CHUNK), tokens, records


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "root"


@pytest.fixture
def fill(root):
    """Put one text into the root, explained if facts are given; return its chunks."""

    def fill(num=6, seed=0, ids=("m", "f"), facts=None):
        text = chunks(num, seed, ids)
        with store.PageStore.open(root, *ids, RECORD, CHUNK) as kept:
            kept.put(*text)
            if facts:
                store.explain(kept, *facts)
        return text

    return fill


@pytest.fixture
def ask(root, capsys, monkeypatch):
    """Run `kvmem store ACTION ROOT …`; return its exit code and what it printed."""

    monkeypatch.setenv("COLUMNS", "160")

    def ask(action: str, *argv: str, at=root) -> tuple[int, str]:
        code = cli.main(["store", action, str(at), *argv])
        said = capsys.readouterr()
        return code, said.out + said.err

    return ask


@pytest.fixture
def ask_json(ask):
    """Run it with --json; return the parsed answer."""

    def ask_json(action: str, *argv: str, code: int = 0):
        found, said = ask(action, *argv, "--json")
        assert found == code, said
        return json.loads(said)

    return ask_json


def spoil(root: pathlib.Path, pattern: str) -> pathlib.Path:
    """Flip one bit in the middle of the largest file of that name."""
    path = max(root.rglob(pattern), key=lambda p: p.stat().st_size * p.is_file())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return path


def test_ls_says_ids_shapes_dtypes_sizes_and_ages(fill, ask, ask_json):
    fill(6)
    fill(3, seed=1, ids=("other", "g"))
    one, two = ask_json("ls")
    assert (one["model_id"], one["format_id"], one["status"]) == ("m", "f", "ok")
    assert (one["num_chunks"], one["chunk_tokens"]) == (6, CHUNK)
    (array,) = one["arrays"]
    assert (array["dtype"], array["shape"]) == ("uint8", [6 * CHUNK * RECORD])
    assert one["file_nbytes"] > one["nbytes"] == 6 * CHUNK * RECORD
    assert abs(time.time() - one["created"]) < 60
    assert two["model_id"] == "other"
    code, said = ask("ls")
    assert code == 0
    for part in ("model  m", "format f", "model  other", "uint8[2304]", "ok", " s"):
        assert part in said, part
    assert "6 chunks (4 tokens of 96 B), 24 tokens" in said


def test_ls_of_one_model(fill, ask_json):
    fill(1)
    fill(1, ids=("other", "g"))
    fill(1, ids=("other", "h"))
    assert len(ask_json("ls")) == 3
    assert len(ask_json("ls", "--model", "oth")) == 2
    assert len(ask_json("ls", "--model", "oth", "--format", "h")) == 1


def test_an_empty_store_is_no_fault(root, ask):
    store.PageStore.open(root, "m", "f", RECORD, CHUNK).close()
    assert ask("ls") == (0, "an empty store\n")
    assert ask("verify")[0] == 0


@pytest.mark.parametrize("action", ["ls", "show", "verify", "gc"])
def test_what_is_no_store_is_bad_input(ask, tmp_path, action):
    code, said = ask(action, at=tmp_path)
    assert code == 2 and "there is no store" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("PER-10")
@pytest.mark.parametrize("pattern", ["0", "chunks.safetensors", "manifest.json"])
def test_verify_finds_damage_and_ends_with_1(fill, ask, ask_json, root, pattern):
    fill(6)
    fill(2, seed=1)
    assert ask("verify")[0] == 0
    path = spoil(root, pattern)
    assert ask("ls")[0] == (0 if pattern == "0" else 1)  # ls reads no array
    code, said = ask("verify")
    assert code == 1 and "damaged" in said
    bad = [row for row in ask_json("verify", code=1) if row["status"] != "ok"]
    assert len(bad) == 1 and bad[0]["problems"]
    named = bad[0]["problems"][0].partition(":")[0]
    assert path.as_posix().endswith(named) and named


def test_a_leftover_is_shown_and_is_no_damage(fill, ask, ask_json, root):
    fill(2)
    (root / "m" / "f" / "00000009-0a0b0c0d").mkdir()
    rows = ask_json("verify")
    assert [row["status"] for row in rows] == ["ok", "unfinished"]
    assert "it has no manifest" in ask("ls")[1]


@pytest.fixture
def explained(fill):
    """A root that says what its ids stand for; returns both and the text."""
    layer = geometry.LayerSpec("layers.0", 0, kv_heads=3, head_dim=4, dtype="float32")
    fields = canonical.format_fields(geometry.group_layers([layer], 16))
    model = {"scheme": "kvmem model id 1", "tensors": [["w", "float32", [2], "ab"]]}
    model |= {"numbers": {"rope": {"theta": 1e4}}, "chat_template": None}
    from kvmem.model import loaded

    ids = loaded.id_of(model), canonical.format.id_of(fields)
    return ids, fill(5, ids=ids, facts=(model, fields)), model, fields


def test_show_prints_every_field_of_both_ids(explained, ask, ask_json):
    (model_id, format_id), _, model, fields = explained
    (found,) = ask_json("show")
    assert found["model"] == {"id": model_id, "facts": model, "holds": True}
    assert found["format"] == {"id": format_id, "facts": fields, "holds": True}
    code, said = ask("show")
    assert code == 0
    assert f"model id {model_id} is the digest of:" in said
    assert f"format id {format_id} is the digest of:" in said
    for part in (
        "tensors[0] = ['w', 'float32', [2], 'ab']",
        "numbers.rope.theta = 10000.0",
        "chat_template = None",
        "groups[0].layers[0].index = 0",
        "groups[0].record_nbytes = 96",
    ):
        assert part in said, part


def test_facts_whose_digest_is_another_are_damage(explained, ask, root):
    path = next(root.rglob("_model.json"))
    path.write_text(path.read_text().replace("float32", "float16"))
    code, said = ask("show")
    assert code == 1 and "IS NOT THE DIGEST OF" in said


def test_a_root_that_explains_nothing_says_so(fill, ask):
    fill(2)
    code, said = ask("show")
    assert code == 0 and "the root does not say what it stands for" in said


def test_show_lists_where_chains_end(fill, ask, ask_json, root):
    keys, tokens, records = fill(5)
    with store.PageStore.open(root, "m", "f", RECORD, CHUNK) as kept:
        more = np.concatenate([tokens[:3].ravel(), np.arange(8, dtype=np.int32)])
        branch = store.chain_keys("m/f", more, CHUNK)[3:]
        kept.put(branch, more[12:], records[: 2 * CHUNK], parent=keys[2])
    (found,) = ask_json("show")
    code, said = ask("show")
    assert branch[-1].hex()[:16] in said and keys[-1].hex()[:16] in said
    ends = {chain["key"]: chain["tokens"] for chain in found["chains"]}
    assert ends == {keys[-1].hex(): 20, branch[-1].hex(): 20}


def read_export(path) -> tuple[dict, dict]:
    with safetensors.safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def test_a_chain_is_exported_by_its_last_key(explained, ask, tmp_path):
    ids, (keys, tokens, records), _, fields = explained
    out = tmp_path / "chain.safetensors"
    code, said = ask("export", "--key", keys[3].hex()[:12], "-o", str(out))
    assert (code, said) == (0, f"16 tokens in 4 of 4 chunks to {out}\n")
    tensors, metadata = read_export(out)
    assert (tensors["records"] == records[: 4 * CHUNK]).all()
    assert tensors["tokens"].tolist() == tokens[:4].ravel().tolist()
    assert [bytes(row) for row in tensors["keys"]] == list(keys[:4])
    assert json.loads(metadata.pop("fields")) == fields
    assert metadata == {
        "model_id": ids[0],
        "format_id": ids[1],
        "chunk_tokens": "4",
        "record_nbytes": "96",
        "starts": "at token 0",
    }


@pytest.mark.parametrize("as_json", [True, False])
def test_a_chain_is_exported_by_its_tokens(fill, ask_json, tmp_path, as_json):
    _, tokens, records = fill(3)
    text = [*tokens.ravel().tolist(), 5, 6, 7, 8, 9]
    (tmp_path / "t").write_text(
        json.dumps(text) if as_json else " ".join(map(str, text))
    )
    out = str(tmp_path / "o")
    said = ask_json("export", "--tokens", str(tmp_path / "t"), "--out", out)
    assert (said["chunks"], said["asked"], said["reason"]) == (3, 4, "not_found")
    assert (read_export(out)[0]["records"] == records).all()


def test_a_chain_whose_beginning_is_unknown_says_so(fill, ask, root, tmp_path):
    keys, tokens, records = fill(2)
    salted = store.chain_keys(
        "m/f", tokens.ravel(), CHUNK, [store.Extra("salt", ("x",))]
    )
    with store.PageStore.open(root, "m", "f", RECORD, CHUNK) as kept:
        kept.put(salted, tokens, records)
    out = tmp_path / "o"
    assert ask("export", "--key", salted[-1].hex(), "-o", str(out))[0] == 0
    assert read_export(out)[1]["starts"] == "unknown"


def test_a_damaged_chunk_ends_the_export_with_1(fill, ask, root, tmp_path, monkeypatch):
    monkeypatch.setattr("kvmem.store.row_files.FILE_NBYTES", 1)
    keys, _, records = fill(6)
    files = sorted(p for p in root.rglob("*") if p.parent.name == "c")
    spoil(files[0].parent.parent, "c/2")
    out = tmp_path / "o"
    code, said = ask("export", "--key", keys[-1].hex(), "-o", str(out))
    assert code == 1 and "8 tokens in 2 of 6 chunks" in said and "(checksum)" in said
    assert (read_export(out)[0]["records"] == records[: 2 * CHUNK]).all()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["export", "-o", "x"], "one of --key HEX and --tokens FILE"),
        (["export", "--key", "a", "--tokens", "b", "-o", "x"], "one of --key HEX"),
        (["export", "--key", "a"], "Give --out FILE"),
        (["export", "--key", "zz", "-o", "x"], "0 chunks have a key that starts so"),
        (["export", "--tokens", "nowhere", "-o", "x"], "No such file"),
        (["ls", "--key", "a"], "kvmem store ls with --key: it has no use for that"),
        (["verify", "--max-nbytes", "1"], "with --max-nbytes"),
        (["gc", "--max-nbytes", "1 parsec"], "as a number of bytes"),
    ],
)
def test_bad_input_ends_with_2_and_its_law(fill, ask, root, argv, words):
    fill(1)
    code, said = ask(argv[0], *argv[1:])
    assert code == 2 and words in said


@pytest.mark.parametrize(("text", "words"), [("1 x 2", "'x'"), ("[1, [2]]", "list")])
def test_tokens_that_are_none_are_bad_input(fill, ask, tmp_path, text, words):
    fill(1)
    (tmp_path / "t").write_text(text)
    code, said = ask("export", "--tokens", str(tmp_path / "t"), "-o", "x")
    assert code == 2 and words in said and "JSON list" in said


def test_an_export_of_a_text_that_is_not_there_is_bad_input(fill, ask, tmp_path):
    fill(1)
    (tmp_path / "t").write_text("1 2 3 4")
    code, said = ask("export", "--tokens", str(tmp_path / "t"), "-o", "x")
    assert code == 2 and "none of them can be read (not_found" in said


def test_an_export_names_the_models_to_choose_from(fill, ask, tmp_path):
    keys, *_ = fill(1)
    fill(1, ids=("other", "g"))
    argv = ["export", "--key", keys[0].hex(), "-o", str(tmp_path / "o")]
    code, said = ask(*argv)
    assert code == 2 and "m/f, other/g" in said and "--model and --format" in said
    assert ask(*argv, "--model", "m")[0] == 0


@pytest.mark.case("PER-05")
def test_gc_sweeps_a_leftover_and_says_so(fill, ask, ask_json, root):
    fill(2)
    left = root / "m" / "f" / "00000009-0a0b0c0d"
    left.mkdir()
    (left / "half").write_bytes(b"x")
    (report,) = ask_json("gc")
    assert report["swept"] == [left.name] and not left.exists()
    code, said = ask("gc")
    assert code == 0 and "swept     -" in said and "freed     0 B" in said
    assert [row["status"] for row in ask_json("verify")] == ["ok"]


def test_gc_keeps_to_a_budget(fill, ask_json, root):
    for seed in range(4):
        fill(40, seed)
    before = sum(row["file_nbytes"] for row in ask_json("ls"))
    budget = before // 2
    (report,) = ask_json("gc", "--max-nbytes", str(budget))
    after = sum(row["file_nbytes"] for row in ask_json("verify"))
    assert after <= budget and report["freed_nbytes"] == before - after


def test_gc_waits_for_no_writer(fill, ask, root):
    fill(1)
    with store.PageStore.open(root, "m", "f", RECORD, CHUNK):
        assert ask("ls")[0] == 0 and ask("verify")[0] == 0  # readers need no lock
        code, said = ask("gc")
    assert code == 2 and "one writer at a time" in said


@pytest.mark.parametrize("action", ["ls", "show", "verify", "gc"])
@pytest.mark.parametrize("url", ["gs://bucket/p", "http://host/p"])
def test_a_scheme_that_no_test_covers_is_refused(ask, action, url):
    code, said = ask(action, at=url)
    assert code == 2 and "s3://bucket/prefix, the one scheme that is tested" in said


@pytest.mark.case("PER-01")
@pytest.mark.parametrize("action", ["ls", "show", "verify", "export"])
def test_a_process_with_one_cpu_device_reads_what_eight_wrote(
    explained, root, tmp_path, action
):
    _, (keys, *_), *_ = explained
    out = ["--key", keys[-1].hex(), "-o", str(tmp_path / "o")]
    argv = ["store", action, str(root), *(out if action == "export" else []), "--json"]
    code = (
        f"import sys; from kvmem import cli; code = cli.main({argv!r}); "
        "sys.exit(code or ('jax' in sys.modules))"
    )
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)


@pytest.mark.parametrize("out", ["no/such/folder/x", "."])
def test_an_export_that_cannot_be_written_is_bad_input(fill, ask, tmp_path, out):
    keys, *_ = fill(1)
    code, said = ask("export", "--key", keys[0].hex(), "-o", str(tmp_path / out))
    assert code == 2 and "fault of kvmem" not in said and str(tmp_path) in said


@pytest.mark.parametrize(
    ("text", "words"), [(b"1 2 3", "fewer"), (b"\xac\xff", "Write ids as a JSON list")]
)
def test_a_file_without_a_chunk_of_tokens_is_bad_input(
    fill, ask, tmp_path, text, words
):
    fill(1)
    (tmp_path / "t").write_bytes(text)
    code, said = ask("export", "--tokens", str(tmp_path / "t"), "-o", "x")
    assert code == 2 and words in said


def test_an_export_whose_first_chunk_is_damaged_ends_with_1(fill, ask, root):
    keys, *_ = fill(1)
    (files,) = [p for p in root.rglob("*") if p.parent.name == "c"]
    spoil(files.parent.parent, "c/0")
    code, said = ask("export", "--key", keys[-1].hex(), "-o", "x")
    assert code == 1 and "cannot be read (checksum" in said


def test_an_id_that_is_written_out_is_that_one(fill, ask, tmp_path):
    keys, *_ = fill(1)
    fill(1, ids=("m2", "f"))
    argv = ["export", "--key", keys[0].hex(), "-o", str(tmp_path / "o")]
    assert ask(*argv, "--model", "m")[0] == 0


def test_gc_leaves_folders_alone_that_no_store_made(fill, ask, root):
    fill(1)
    (root / "lost+found" / "x" / "y").mkdir(parents=True)
    assert ask("gc")[0] == 0
    assert (root / "lost+found" / "x" / "y").is_dir()


def test_gc_tidies_the_others_where_one_folder_cannot_be_read(
    fill, ask, root, monkeypatch
):
    fill(1, ids=("a", "f"))
    fill(1)
    folders = store.report._folders

    def closed(folder):
        if folder.name == "a":
            raise PermissionError(13, "Permission denied", str(folder))
        return folders(folder)

    monkeypatch.setattr("kvmem.store.report._folders", closed)
    code, said = ask("gc")
    assert code == 1 and "model  m" in said and "Permission denied" in said
    assert ask("ls")[0] == 1
