"""Blending's experiment runs whole, and its picture is drawn from what it measured."""

import json
import pathlib

import pytest

import experiments.__main__ as command
from experiments import blend
from kvmem import errors


@pytest.mark.long
def test_the_smoke_config_runs_whole(repo_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "blend.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-blend/record.json").read_text())
    assert data["ok"] and len(data["checks"]) == 3
    figures = data["measurements"]
    assert figures["agreement_at_1.0"] == 1 and figures["kl_at_1.0"] == 0
    assert figures["speedup_chunk_64"] == 1
    reused = data["reused_and_recomputed"]
    assert reused["0.0"] == [72, 0] and reused["0.25"] == [72, 18]
    assert reused["1.0"] == [0, 0]
    assert pathlib.Path(data["picture"]).stat().st_size > 1000


def test_what_is_to_be_reached_is_measured():
    with pytest.raises(errors.ConfigError, match=r"targets.ratio = 0.15"):
        blend.Config(model=None, pool=None, serve=None, ratios=(0.0, 1.0))


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"rounds": 0}, "rounds below 1"),
        ({"tokens": 0, "answer": 0}, "tokens, answer below 1"),
        ({"ratios": (0.15, 2.0)}, "0 <= ratio <= 1"),
    ],
)
def test_a_run_that_would_measure_nothing_is_refused_before_it_begins(changes, word):
    with pytest.raises(errors.ConfigError, match=word):
        blend.Config(model=None, pool=None, serve=None, **changes)
