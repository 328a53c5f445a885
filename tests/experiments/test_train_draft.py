"""Draft layers learn, their training goes on where it was stopped, and they draft."""

import json
import pathlib

import numpy as np
import pytest

import experiments.__main__ as command
from experiments import tiny_decoder, train_draft
from kvmem import errors, settings
from kvmem.config import ModelConfig
from kvmem.model import draft_layers


def ran(smoke, *more):
    assert command.main(["run", str(smoke), "--debug", *more]) == 0
    return json.loads(pathlib.Path("runs/smoke-train_draft/record.json").read_text())


@pytest.mark.long
def test_training_goes_on_where_it_was_stopped(repo_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "train_draft.toml"
    whole = ran(smoke, "--set", "folder=runs/whole")
    ran(smoke, "--set", "until=4")
    rest = ran(smoke)
    assert whole["ok"] and whole["resumed_at"] == 0 and rest["resumed_at"] == 4
    times = {"step_ms"}
    figures = [
        {name: x for name, x in each["measurements"].items() if name not in times}
        for each in (whole, rest)
    ]
    assert figures[0] == figures[1] and figures[0]["tokens_per_step"] >= 1
    assert (
        pathlib.Path("runs/whole/layers.safetensors").read_bytes()
        == pathlib.Path(rest["layers"]).read_bytes()
    )
    _, model = tiny_decoder.load(ModelConfig("tiny", kv_dtype="float32"))
    layers = draft_layers.load(rest["layers"], model)
    assert layers.params["model.layers.0.mlp.down_proj.weight"].any()


def test_every_text_is_read_once_a_turn():
    config = asked(batch=4)
    turn = np.concatenate([train_draft.texts_of(step, 6, config) for step in range(3)])
    assert sorted(turn[:6]) == sorted(turn[6:]) == list(range(6))
    assert (turn[:6] != turn[6:]).any()


def test_topics_are_held_out_and_every_prompt_asks_about_each():
    config = asked(prompts=("What is {}?", "{}!"), topics=("a", "b"))
    assert config.questions == ["What is a?", "a!", "What is b?", "b!"]
    with pytest.raises(errors.ConfigError, match="held_out = 2 of 2 topics"):
        asked(topics=("a", "b"), held_out=2)
    with pytest.raises(errors.ConfigError, match="until = 9 of 8 steps"):
        asked(steps=8, until=9)
    with pytest.raises(errors.ConfigError, match="'No place.' has no {}"):
        asked(prompts=("{}?", "No place."))


def asked(**facts):
    """A config of a few facts, without a model."""
    few = {"prompts": ("{}?",), "topics": ("a", "b")}
    return train_draft.Config(model=None, pool=None, serve=None, **few | facts)


@pytest.mark.long
def test_stored_layers_of_smollm2_draft_well(repo_root):
    """Layers in the repository, asked about topics that they were not trained on."""
    loaded = settings.read(
        train_draft.Config, repo_root / "configs" / "train_draft.toml", (), {}
    )
    config = loaded.value
    _, model = tiny_decoder.load(config.model)
    held_out = config.held_out * len(config.prompts)
    prompts = train_draft.questions_of(config, model)[-held_out:][: config.answered]
    path = repo_root / "experiments" / "drafts" / "smollm2_mtp.safetensors"
    assert path.stat().st_size < 5e6
    record = train_draft.drafted(config, model, prompts, path)
    assert record.measurements["tokens_per_step"] >= config.least
