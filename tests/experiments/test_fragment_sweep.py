"""fragment_sweep runs as a whole on its smoke config, and sees a wrong choice."""

import json
import pathlib

import experiments.__main__ as command
from experiments import fragment_sweep
from kvmem import transfer


def test_the_smoke_config_runs_every_cell(repo_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "fragment_sweep.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    path = pathlib.Path("runs/smoke-fragment_sweep/record.json")
    (record,) = json.loads(path.read_text())["records"]
    assert len(record["checks"]) == 2 * 3
    assert record["measurements"]["export_16_of_256_over_device"] > 0


def test_a_fragment_is_of_the_size_that_was_asked_for():
    cell = fragment_sweep.Cell.make(256, 32)
    assert {run.nbytes for runs in cell.plan.held for run in runs} == {256}
    assert cell.records.nbytes == 32 * 256


def test_a_path_that_loses_bytes_is_seen(monkeypatch):
    cell = fragment_sweep.Cell.make(64, 16)
    assert cell.is_whole("host") and cell.is_whole("device")
    monkeypatch.setattr(transfer, "export_records", lambda *_, out, **__: out)
    assert not cell.is_whole("host")


def test_a_slower_choice_fails_its_check():
    config = fragment_sweep.Config(fragments=(64,), counts=(16,), rounds=2, least=1e9)
    (record,) = fragment_sweep.run(config)
    assert [check.ok for check in record.checks] == [True, False, False]
