"""Drafts' experiment runs whole, and its picture is drawn from what it measured."""

import json
import pathlib

import pytest

import experiments.__main__ as command
from experiments import speculation
from kvmem import errors


@pytest.mark.long
def test_the_smoke_config_runs_whole(repo_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "speculation.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-speculation/record.json").read_text())
    assert data["ok"] and len(data["checks"]) == 5
    figures = data["measurements"]
    for kind in ("quotes", "chat", "summary", "lessons"):
        for mode in ("ngram", "mtp", "dflash"):
            assert 1 <= figures[f"{kind}_{mode}_tokens_per_step"] <= 3
            assert figures[f"{kind}_{mode}_speedup"] > 0
    assert data["trained"] is False
    assert pathlib.Path(data["picture"]).stat().st_size > 1000


def test_every_kind_has_a_text():
    texts = speculation.Texts(quotes=("a",), chat=("b",))
    with pytest.raises(errors.ConfigError, match="no text of summary, lessons"):
        speculation.Config(model=None, pool=None, serve=None, texts=texts)
