"""Draft layers learn, their training goes on where it was stopped, and they draft."""

import json
import pathlib

import numpy as np
import pytest

import experiments.__main__ as command
from experiments import tiny_decoder, train_draft
from experiments.draft_training import Trainer
from kvmem import errors
from kvmem.config import ModelConfig
from kvmem.model import draft_layers, mtp


def ran(smoke, *more):
    assert command.main(["run", str(smoke), "--debug", *more]) == 0
    return json.loads(pathlib.Path("runs/smoke-train_draft/record.json").read_text())


@pytest.mark.long
def test_training_goes_on_where_it_was_stopped(repo_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "train_draft.toml"
    whole = ran(smoke, "--set", "folder=runs/whole")
    ran(smoke, "--set", "steps=4")
    rest = ran(smoke)
    assert whole["ok"] and whole["resumed_at"] == 0 and rest["resumed_at"] == 4
    assert rest["measurements"] == whole["measurements"]
    assert pathlib.Path("runs/whole/layers.safetensors").stat().st_size > 1000
    assert (
        pathlib.Path("runs/whole/layers.safetensors").read_bytes()
        == pathlib.Path(rest["layers"]).read_bytes()
    )
    _, model = tiny_decoder.load(ModelConfig("tiny", kv_dtype="float32"))
    layers = draft_layers.load(rest["layers"], model)
    drawn = mtp.draw(model)
    moved = np.abs(layers.params["mtp.fuse.weight"] - drawn.params["mtp.fuse.weight"])
    assert moved.max() > 1e-3


def test_layers_that_learned_nothing_are_those_that_it_began_with(tiny_model):
    _, model = tiny_model
    drawn = mtp.draw(model, layers=2, seed=3)
    trainer = Trainer(model, drawn, learning_rate=1e-3, depth=2)
    same = trainer.layers(trainer.start())
    assert same.params.keys() == drawn.params.keys()
    for name, rows in drawn.params.items():
        np.testing.assert_array_equal(same.params[name], rows)


def test_prompts_are_held_out():
    with pytest.raises(errors.ConfigError, match="held_out = 1 of 1"):
        train_draft.Config(model=None, pool=None, serve=None, prompts=("a",))
