"""session_load runs whole on its smoke config, and its judge sees what is wrong."""

import json
import pathlib

import pytest

import experiments.__main__ as command
from experiments.session_clients import misplaced
from experiments.session_load import Config
from kvmem import errors

SENT = {0: ["a0", "a1", "a2"], 1: ["b0", "b1"]}


def test_the_smoke_config_runs_whole(repo_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "session_load.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-session_load/record.json").read_text())
    assert data["ok"] and len(data["checks"]) == 6 + 3
    assert data["kills"] == 1 and data["messages"] > 0
    assert {"append_p50_ms", "push_p99_ms", "requests_per_s"} <= set(
        data["measurements"]
    )


def test_messages_of_clients_may_alternate_and_no_more():
    assert misplaced(SENT, ["b0", "a0", "a1", "b1", "a2"]) == ()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (["a0", "a1", "a2", "b0"], "'b1' is there 0 times"),
        (["a0", "a1", "a1", "a2", "b0", "b1"], "'a1' is there 2 times"),
        (["a0", "a2", "a1", "b0", "b1"], "client 0 are out of order"),
        (["a0", "a1", "a2", "b0", "b1", "c0"], "'c0' was sent by nobody"),
    ],
)
def test_what_is_lost_doubled_moved_or_strange_is_seen(found, words):
    assert any(words in wrong for wrong in misplaced(SENT, found))


def test_clients_that_do_not_divide_are_refused():
    with pytest.raises(errors.ConfigError, match="multiples"):
        Config(users=3, clients=32)
