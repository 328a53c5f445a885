"""`kvmem store` on a root of parts: each part has its rows, the whole its meaning."""

import json

import numpy as np
import pytest
import safetensors

from kvmem import canonical, cli, store
from kvmem.geometry import LayerSpec, group_layers, kinds
from kvmem.model import loaded

CHUNK = 4
GROUPS = group_layers(
    [
        LayerSpec("a", 0, kv_heads=2, head_dim=8),
        LayerSpec("b", 1, kv_heads=2, head_dim=8, window=6),
        kinds.gated_delta(
            "c", 2, key_heads=2, value_heads=2, key_dim=3, value_dim=5, conv_kernel=2
        ),
    ],
    page_size=16,
)
FORMAT = canonical.format_id(GROUPS)
FACTS = {"of": "a test"}
MODEL = loaded.id_of(FACTS)


@pytest.fixture
def text(tmp_path):
    """Put a text of five chunks, explained; return its keys and tokens, and rows."""
    rng, parts = np.random.default_rng(0), store.parts_of(GROUPS)
    tokens = rng.integers(0, 49_152, (5, CHUNK), np.int32)
    keys = store.chain_keys(f"{MODEL}/{FORMAT}", tokens.ravel(), CHUNK)
    rows = {}
    for part in parts:
        at = part.needed(5, CHUNK)
        values = rng.integers(0, 256, (len(at), part.row_nbytes(CHUNK)), np.uint8)
        rows[part.name] = store.Rows(at, values)
    with store.PartedStore.open(tmp_path / "root", MODEL, FORMAT, parts, CHUNK) as kept:
        kept.put(keys, tokens, rows)
        store.explain(kept, FACTS, canonical.format_fields(GROUPS))
    return keys, tokens, rows


@pytest.fixture
def ask_json(tmp_path, capsys):
    def ask(action, *argv, code=0):
        found = cli.main(["store", action, str(tmp_path / "root"), *argv, "--json"])
        said = capsys.readouterr()
        assert found == code, said.err
        return json.loads(said.out)

    return ask


def test_each_part_is_listed_verified_and_tidied(text, ask_json):
    for action in ("ls", "verify"):
        rows = ask_json(action)
        names = [row["format_id"].rpartition(".")[2] for row in rows]
        assert names == ["base", "state", "window6"]
        assert [row["num_chunks"] for row in rows] == [5, 1, 2]
        assert all(row["status"] == "ok" for row in rows)
    reports = ask_json("gc")
    assert [report["dropped"] for report in reports] == [[], [], []]


def test_the_format_of_a_part_is_that_of_the_whole_model(text, ask_json):
    found = ask_json("show")
    assert len(found) == 3
    for part in found:
        assert part["format"]["holds"]
        assert len(part["format"]["facts"]["groups"]) == 3


def test_damage_of_one_part_is_found_and_named(text, ask_json, tmp_path):
    (folder,) = (tmp_path / "root").glob("*/*.state")
    path = max(
        (p for p in folder.rglob("*") if p.is_file() and "orbax" in p.parts),
        key=lambda p: p.stat().st_size,
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    bad = [row for row in ask_json("verify", code=1) if row["problems"]]
    assert [row["format_id"] for row in bad] == [f"{FORMAT}.state"]


def test_the_base_of_a_text_is_exported_by_its_tokens(text, ask_json, tmp_path):
    keys, tokens, rows = text
    (tmp_path / "ids").write_text(json.dumps(tokens.ravel().tolist()))
    out = tmp_path / "chain.safetensors"
    said = ask_json(
        "export",
        *("--format", f"{FORMAT}.base", "--tokens", str(tmp_path / "ids")),
        *("--out", str(out)),
    )
    assert (said["chunks"], said["asked"], said["reason"]) == (5, 5, None)
    with safetensors.safe_open(out, "numpy") as file:
        assert file.metadata()["starts"] == "at token 0"
        found = file.get_tensor("records").reshape(5, -1)
    assert np.array_equal(found, rows["base"].rows)
