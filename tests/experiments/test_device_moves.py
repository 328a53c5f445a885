"""device_moves says which bytes are wrong, and that there is no device."""

import json
import pathlib
import subprocess

import pytest

from experiments import __main__ as command
from experiments import device_moves, device_worker
from pallas_kernels import dispatch


def test_the_smoke_config_interprets_kernels(repo_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "device_moves.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-device_moves/record.json").read_text())
    names = [check["name"] for check in data["checks"]]
    assert "bytes of gather_pages-tiny_half" in names
    assert "append_tokens came to its end" in names
    assert all("0 of" in c["detail"] for c in data["checks"] if "bytes" in c["name"])


@pytest.fixture
def on_a_device(monkeypatch):
    """Let a run take this machine for one with a device."""
    monkeypatch.setattr(device_moves, "_require_device", lambda: None)


def test_a_machine_without_a_device_is_refused_with_the_dry_runs(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    words = "mode=device on cpu.*mode=interpret"
    with pytest.raises(device_moves.errors.ConfigError, match=words):
        list(device_moves.run(config(mode="device")))


def config(**changes) -> device_moves.Config:
    one = {"operations": ("gather_pages",), "models": ("tiny_half",)}
    return device_moves.Config(**{"mode": "interpret"} | one | changes)


def test_a_wrong_byte_fails_the_run(monkeypatch):
    right = dispatch.OPERATIONS["gather_pages"].reference
    module = dispatch.OPERATIONS["gather_pages"]
    monkeypatch.setattr(module, "reference", lambda *a: right(*a).at[0, 7].add(1))
    (record,) = device_moves.run(config())
    wrong = [check for check in record.checks if not check.ok]
    assert [check.detail.split()[0] for check in wrong] == ["1"]


def test_a_worker_that_dies_is_a_failed_check_with_its_last_word(
    monkeypatch, on_a_device
):
    dead = subprocess.CompletedProcess([], 134, '{"case": "x"', "a\nmisaligned address")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: dead)
    records = list(device_moves.run(config(mode="device")))
    (check,) = records[0].checks
    assert not check.ok and check.detail == "exit status 134: misaligned address"


def test_findings_and_figures_of_a_worker_become_records(
    monkeypatch, capsys, on_a_device
):
    figures = {"kernel_us": 5.0, "moved_nbytes": 10, "tb_per_s": 4.0}
    figures |= {"of_copy": 0.9, "of_xla": 1.5}
    lines = [
        {"case": "gather", "wrong_nbytes": 0, "of_nbytes": 10},
        {"case": "gather", "timed": figures},
    ]
    said = "".join(json.dumps(line) + "\n" for line in lines) + '{"cut'
    done = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)
    checked, timed = device_moves.run(config(mode="device"))
    assert all(check.ok for check in checked.checks) and len(checked.checks) == 2
    assert timed.measurements["gather_of_copy"] == 0.9
    assert "0.9" in capsys.readouterr().out


def test_what_had_no_time_left_is_said(on_a_device):
    records = list(device_moves.run(config(mode="device", budget_s=0.0)))
    (check,) = records[0].checks
    assert not check.ok and "time was over" in check.detail


def test_unknown_names_are_refused(tmp_path):
    for changes in ({"operations": ("fly",)}, {"models": ("gpt",)}):
        with pytest.raises(device_moves.errors.ConfigError, match="no such name"):
            list(device_moves.run(config(**changes)))


@pytest.fixture
def job_without_a_device(monkeypatch):
    """A job whose kernels are their references, as there is no device here."""
    job = device_moves._job(config(mode="device", repetitions=2), "export_records")
    module = dispatch.OPERATIONS["export_records"]
    monkeypatch.setattr(module, "kernel", module.reference)
    sizes = {"pool_nbytes": 1 << 14, "payload_nbytes": 1 << 12}
    return device_worker.dataclasses.replace(job, models=("tiny_half",), **sizes)


def test_a_worker_times_a_kernel_beside_xlas_programs_and_a_copy(job_without_a_device):
    checked, timed = device_worker.perform(job_without_a_device)
    assert checked["wrong_nbytes"] == checked["wrong_nbytes_of_transpose"] == 0
    figures = timed["timed"]
    assert set(figures) >= {"kernel_us", "reference_us", "transpose_us", "copy_us"}
    best = min(figures["reference_us"], figures["transpose_us"])
    assert figures["of_xla"] == pytest.approx(best / figures["kernel_us"], rel=0.02)


@pytest.mark.parametrize(("patience_s", "calls"), [(60.0, 1 + 5 + 7), (0.0, 3)])
def test_a_program_that_takes_long_is_called_less_often(patience_s, calls, monkeypatch):
    monkeypatch.setattr(device_worker, "_PATIENCE_S", patience_s)
    job, called = device_moves._job(config(repetitions=7), "gather_pages"), []

    def run(pages):
        called.append(pages)
        return pages

    seconds = device_worker._elapsed(job, run, device_worker.jnp.zeros(4), [], True)
    assert len(called) == calls and 0 < seconds < 1


def test_a_peer_that_moves_other_bytes_fails_its_check(
    job_without_a_device, monkeypatch
):
    wrong = staticmethod(lambda operation, even, **facts: lambda into, *rest: into)
    monkeypatch.setattr(device_worker.specs.peers, "of", wrong)
    checked, _ = device_worker.perform(job_without_a_device)
    check = device_moves._check(checked)
    assert not check.ok and "of XLA's transpose" in check.detail


def test_what_a_device_answers_of_a_field_report_is_a_check():
    twice = {"case": "JAX-11 a pool is held once", "objection": "2 B, not 1"}
    assert device_moves._check(twice) == device_moves.Check(
        "JAX-11 a pool is held once", False, "2 B, not 1"
    )
    assert device_moves._check(twice | {"objection": None}).ok


def test_a_run_that_compared_nothing_is_no_proof(monkeypatch):
    (record,) = device_moves.run(config(operations=("rows_of_blocks",)))
    (check,) = record.checks  # a model without blocks
    assert not check.ok and "nothing was compared" in check.detail
    module = dispatch.OPERATIONS["gather_pages"]
    monkeypatch.setattr(module, "supports", lambda *a, **k: "a width of its own")
    (record,) = device_moves.run(config())
    *_, check = record.checks
    assert not check.ok and "nothing was compared" in check.detail
