"""Golden bytes: the folder is named by the format version, and changes with it.

tests/golden/v1/records.bin holds the records of 8 tokens of a model with 2 layers,
3 heads, float32 keys of 9 and values of 5 elements, filled from the SHAKE-128 stream
`kvmem-canon-v1/<layer>/<field>`; format.json holds the id of that model and of the demo
model, with the facts that each id digests. Whoever changes what a record's bytes are
raises FORMAT_VERSION and adds a folder; the old one stays, and so do its digests here.
"""

import hashlib
import json

import numpy as np
import pytest

from kvmem import canonical
from kvmem.geometry import LayerSpec, Rope, Topology, group_layers

SEALED = {  # version -> file -> SHA-256; a version that was released never changes
    1: {
        "records.bin": "395a62ff6adeda91fa24803a10e9fd2c"
        "b0efad528d574751f0c28aacaa26bbe0",
        "format.json": "ebde5c47a8c9c8f2813399f8260a829c"
        "421c47c65c6fc0053edee12810e558af",
    },
}


@pytest.fixture
def golden(repo_root):
    return repo_root / "tests" / "golden" / f"v{canonical.FORMAT_VERSION}"


@pytest.fixture
def group(build):
    return build.group(2, 3, dim=9, v_head_dim=5, page_size=4)


@pytest.mark.parametrize("tp, dcp", [(1, 1), (3, 1), (9, 1), (3, 2)])
@pytest.mark.parametrize("order", ["head_major", "token_major"])
def test_records_are_the_golden_bytes(build, oracle, golden, group, tp, dcp, order):
    plan = canonical.plan(group, Topology(tp, dcp), order)
    logical, records = oracle.logical(group, 8), b""
    for number in range(8 // plan.page_tokens):
        gathered = bytearray(plan.page_tokens * plan.record_nbytes)
        for rank, runs in enumerate(plan.writers()):
            page = oracle.page(group, logical, plan.topology, rank, order, number)
            build.gather(runs, page, gathered)
        records += gathered
    assert records == (golden / "records.bin").read_bytes()


def test_the_oracle_agrees_with_the_golden_bytes(oracle, golden, group):
    records = oracle.records(group, oracle.logical(group, 8))
    found = np.fromfile(golden / "records.bin", np.uint8)
    assert np.array_equal(records.reshape(-1), found)


def test_format_ids_are_the_golden_ones(golden, group):
    demo = [
        LayerSpec(f"layers.{i}", i, kv_heads=3, head_dim=64, rope=Rope(100_000.0))
        for i in range(30)
    ]
    facts = {"small": (group,), "demo": group_layers(demo, page_size=16)}
    found = {
        name: {
            "id": canonical.format_id(groups),
            "fields": canonical.format_fields(groups),
        }
        for name, groups in facts.items()
    }
    assert found == json.loads((golden / "format.json").read_text())


def test_the_files_of_a_version_never_change_and_every_version_has_its_own(repo_root):
    folders = sorted((repo_root / "tests" / "golden").glob("v*"))
    assert [f.name for f in folders] == [f"v{version}" for version in SEALED]
    assert max(SEALED) == canonical.FORMAT_VERSION
    for folder, (version, files) in zip(folders, SEALED.items(), strict=True):
        found = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.iterdir()
        }
        assert found == files, f"v{version} changed: raise FORMAT_VERSION instead"


def test_the_version_is_part_of_every_id(monkeypatch, group):
    first = canonical.format_id((group,))
    monkeypatch.setattr("kvmem.canonical.format.FORMAT_VERSION", 2)
    second = canonical.format_id((group,))
    assert first.startswith("v1-") and second.startswith("v2-")
    assert first[3:] != second[3:]
