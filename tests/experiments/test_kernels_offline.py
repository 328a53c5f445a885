"""A compiler that is not there, and a program that is wrong, are said."""

import json
import pathlib
import subprocess
import sys

import pytest

from experiments import device_moves, kernels_offline
from kvmem import errors

SOUND = {
    "registers": [10],
    "alias_nbytes": 4096,
    "temp_nbytes": 16,
    "allowed_nbytes": 32,
    "wrong": [],
}


def compiler(monkeypatch, programs: dict | None, stderr: str = "") -> None:
    """Put a compiler in the place of the process."""

    def run(command, **more):
        if programs is not None:
            with open(command[-1], "w") as opened:
                json.dump({"jax": "0.12", "programs": programs}, opened)
        return subprocess.CompletedProcess(command, 0, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def test_what_is_wrong_with_a_program_fails_its_check(monkeypatch):
    broken = SOUND | {"wrong": ["160 B of registers spilled"]}
    compiler(monkeypatch, {"gather": SOUND, "scatter": broken})
    (record,) = kernels_offline.run(kernels_offline.Config(environments=("here",)))
    assert [check.ok for check in record.checks] == [True, False]
    assert "10 registers, none spilled" in record.checks[0].detail
    assert record.checks[1].detail == "160 B of registers spilled"


def test_an_environment_that_is_not_there_is_refused_with_the_cure(tmp_path):
    config = kernels_offline.Config(environments=(str(tmp_path / "none"),))
    with pytest.raises(errors.ConfigError, match="no such file.*make test-kernels"):
        list(kernels_offline.run(config))


def test_an_environment_without_the_plugin_is_refused_in_its_own_words(monkeypatch):
    compiler(monkeypatch, None, "jax's CUDA plugin is not installed here\n")
    config = device_moves.Config(mode="compile")
    with pytest.raises(errors.ConfigError, match="CUDA plugin is not installed"):
        list(device_moves.run(config))


def test_a_dry_compile_takes_this_python_if_it_can_else_the_one_that_make_makes(
    monkeypatch,
):
    config = device_moves.Config(mode="compile")
    named = device_moves.Config(mode="compile", environment="elsewhere")
    monkeypatch.setattr(device_moves.offline, "has_plugin", lambda: True)
    assert device_moves._compiler(config) == pathlib.Path(sys.executable)
    assert device_moves._compiler(named).parts[-3:] == ("elsewhere", "bin", "python")
    monkeypatch.setattr(device_moves.offline, "has_plugin", lambda: False)
    assert device_moves._compiler(config).parts[-4:-1] == (".venvs", "cuda", "bin")
