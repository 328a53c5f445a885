"""Kernels compile to H200 machine code here, and what is wrong with one is said."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import dispatch, offline
from pallas_kernels import ptx as ptx_text
from pallas_kernels.offline import Report

SOUND = Report((10, 6), 0, 4096, 100, (), 3, 0)


def without_plugin() -> str | None:
    """Say that this environment has no compiler, whatever variables it lacks."""
    refusal = offline.unavailable()
    return refusal if refusal and "plugin is not installed" in refusal else None


@pytest.mark.long
def test_every_kernel_compiles_at_the_sizes_of_models(tmp_path):
    if without_plugin():
        pytest.skip(without_plugin())
    path = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.offline", str(path)],
        env=os.environ | offline.environment(str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert path.exists(), done.stderr
    programs = json.loads(path.read_text())["programs"]
    wrong = {name: found["wrong"] for name, found in programs.items() if found["wrong"]}
    assert wrong == {} and done.returncode == 0
    assert len(programs) > 110
    for operation in dispatch.OPERATIONS:
        for kind in ("", "vmap-", "shard_map-", "4096-"):
            found = [name.startswith(f"{kind}{operation}-") for name in programs]
            assert any(found) or (kind == "4096-" and operation in offline._AS_MANY)


@pytest.mark.long
def test_a_program_with_a_fault_is_found_out(tmp_path, repo_root):
    """A pool of one axis wraps, one that is kept is copied, rows between are memory."""
    if without_plugin():
        pytest.skip(without_plugin())
    broken = repo_root / "tests" / "pallas_kernels" / "broken_programs.py"
    done = subprocess.run(
        [sys.executable, str(broken)],
        env=os.environ
        | offline.environment(str(tmp_path))
        | {"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sound"] == []
    assert found["flat"] == ["1 offsets that wrap in the PTX"]
    assert "B of memory above" in found["staged"][0]
    assert any("is copied" in word for word in found["kept"])


def test_a_sound_program_has_no_objection():
    assert offline.objections(SOUND, 4096, 200) == []


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (Report((), 0, 4096, 0, (), 3, 0), "no kernel of ours"),
        (Report((255,), 160, 4096, 0, (), 3, 0), "160 B of registers spilled"),
        (Report((9,), 0, 0, 0, (), 3, 0), "0 B aliased of 4,096 B"),
        (Report((9,), 0, 4096, 4096, (), 3, 0), "4,096 B of memory above 200 B"),
        (Report((9,), 0, 4096, 0, ("u8[8,512]",), 3, 0), "u8[8,512] is copied"),
        (Report((9,), 0, 4096, 0, (), 0, 0), "no offset of 64 bits"),
        (Report((9,), 0, 4096, 0, (), 3, 2), "2 offsets that wrap"),
    ],
)
def test_what_is_wrong_with_a_program_is_said(report, words):
    (objection,) = offline.objections(report, 4096, 200)
    assert words in objection


def test_every_operation_is_compiled_over_ranks_too():
    found = {case.operation for case in offline.ranked(32 << 30, entries=64)}
    assert found == set(dispatch.OPERATIONS)


@pytest.mark.parametrize(
    ("ptx", "count"),
    [
        ("mul.wide.s32 \t%rd28, %r49, 65536;", 1),
        ("shl.b64 \t%rd72, %rd7, 16;", 1),
        ("mul.wide.u32 \t%rd19, %r1, 16384;", 1),  # in words
        ("mad.lo.s64 \t%rd22, %rd21, 65536, %rd20;", 1),
        ("shl.b32 \t%r57, %r7, 16;", 0),
        ("mul.lo.s32 \t%r55, %r3, 65536;", 0),
        ("mul.wide.s32 \t%rd28, %r49, 655360;", 0),
    ],
)
def test_an_offset_of_64_bits_is_told_from_one_of_32(ptx, count):
    assert ptx_text.wide(65_536, ptx) == count


FLAT = """ld.global.b32 %r20, [%rd10];
shl.b32 \t%r21, %r20, 16;
add.s32 \t%r22, %r5, %r21;
{end}
"""


@pytest.mark.parametrize(
    ("ptx", "count"),
    [
        (FLAT.format(end="cvt.s64.s32 \t%rd11, %r22;"), 1),
        (FLAT.format(end="mul.wide.s32 \t%rd11, %r22, 4;"), 1),  # an index of words
        (FLAT.format(end="mov.b32 %r30, %r22;\ncvt.s64.s32 %rd1, %r30;"), 1),
        (FLAT.format(end="cvt.u64.u32 \t%rd11, %r22;"), 0),  # proved small by LLVM
        (FLAT.format(end="cvt.s64.s32 \t%rd11, %r20;"), 0),  # the id itself
        ("mad.lo.s32 %r2, %r1, 65536, %r9;\ncvt.s64.s32 %rd1, %r2;", 1),
        ("mul.lo.s32 %r2, %r1, 16384;\nmul.wide.s32 %rd1, %r2, 4;", 1),
        ("mul.wide.s32 %rd1, %r1, 65536;", 0),
    ],
)
@pytest.mark.case("IDX-04")
def test_a_product_of_32_bits_is_followed_to_an_address(ptx, count):
    assert ptx_text.wrapping(65_536, ptx) == count


def test_without_the_plugin_or_its_variables_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: None)
    assert "CUDA plugin is not installed" in offline.unavailable()
    monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert "JAX_PLATFORMS=cpu" in offline.unavailable()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("MOSAIC_GPU_DUMP_TO", raising=False)
    assert "MOSAIC_GPU_DUMP_TO" in offline.unavailable()
    assert set(offline.environment("x")) >= {"MOSAIC_GPU_DUMP_TO", "JAX_PLATFORMS"}
