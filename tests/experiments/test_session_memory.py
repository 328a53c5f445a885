"""session_memory runs whole on its smoke config, and its checks see what is wrong."""

import dataclasses
import json
import pathlib

import pytest

import experiments.__main__ as command
from experiments import session_memory
from experiments.session_memory import Config, Taken
from experiments.session_memory_prose import Prose
from kvmem import errors, settings

NAMES = ("never", "messages", "turns", "tokens", "resident")


def test_the_smoke_config_runs_whole(repo_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "session_memory.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-session_memory/record.json").read_text())
    assert data["ok"] and len(data["checks"]) == 5
    found = data["measurements"]
    assert len(found) == 2 * 5 * 8
    assert found["tail_resident_doubled_tokens"] == 0
    assert found["tail_never_doubled_tokens"] > 0
    assert found["system_turns_misses"] > found["system_resident_misses"] == 0
    reused = "{}_resident_reused_tokens_a_turn"
    assert found[reused.format("tail")] > found[reused.format("system")]
    assert pathlib.Path(data["picture"]).stat().st_size > 1000


@pytest.fixture
def taken():
    """Turns of which every check holds."""
    one = Taken(100, 80, 80, 10, 0, 0, 0, False, False, 0.01, True)
    places = ("tail", "system")
    return {f"{place}_{name}": (one, one) for place in places for name in NAMES}


def test_sound_turns_pass_every_check(taken):
    assert all(check.ok for check in session_memory._checks(taken))


@pytest.mark.parametrize(
    ("name", "wrong", "failing"),
    [
        ("system_tokens", {"is_same": False}, "prefill"),
        ("tail_never", {"num_excluded": 1}, "without a window"),
        ("tail_resident", {"doubled_tokens": 9}, "twice"),
        ("system_resident", {"is_missed": True}, "out of sight"),
        ("tail_turns", {"reused_tokens": 64}, "whole chunk"),
    ],
)
def test_what_is_wrong_fails_its_check(taken, name, wrong, failing):
    first, second = taken[name]
    taken[name] = (first, dataclasses.replace(second, **wrong))
    (bad,) = [check for check in session_memory._checks(taken) if not check.ok]
    assert failing in bad.name


def test_prose_is_decided_by_its_seed_and_repeats_nothing():
    prose = Prose.draw(20, 100, seed=0)
    assert prose == Prose.draw(20, 100, seed=0)
    assert prose.questions != Prose.draw(20, 100, seed=1).questions
    assert len({question.text for question in prose.questions}) == 100
    assert len(set(prose.memories.values())) == 20
    asked = [question.uri for question in prose.questions]
    assert set(asked) <= prose.memories.keys()
    assert asked[:50] != asked[50:] and 5 < len(set(asked)) <= 20


@pytest.mark.parametrize("wrong", [{"memories": 21}, {"turns": 1}])
def test_more_memories_than_there_are_things_are_refused(wrong):
    with pytest.raises(errors.ConfigError, match="memories"):
        Config(**wrong)


def test_the_full_config_takes_a_hundred_turns(repo_root):
    path = repo_root / "configs" / "session_memory.toml"
    config = settings.read(Config, path).value
    assert (config.turns, config.memories) == (100, 20)
    assert config.model.source == "smollm2-135m-instruct"
