"""The handoff runs whole on a tiny decoder, and every equality it claims can fail."""

import json
import pathlib

import numpy as np
import pytest

import experiments.__main__ as command
from experiments import handoff
from experiments.handoff_roles import Side
from kvmem import errors, store
from kvmem.config import ModelConfig
from kvmem.serve import ServeConfig


@pytest.fixture
def smoke(repo_root, tmp_path, monkeypatch):
    """Run a smoke config in a folder of its own; return the exit code and record."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(repo_root))

    def run(name="handoff", *more):
        path = repo_root / "configs" / "smoke" / f"{name}.toml"
        code = command.main(["run", str(path), "--debug", *more])
        record = pathlib.Path(f"runs/smoke-{name}/record.json")
        return code, json.loads(record.read_text())

    return run


def test_what_two_ranks_wrote_one_and_eight_continue(smoke, capsys):
    code, record = smoke()
    assert code == 0 and record["ok"]
    assert record["store_root"] == "runs/smoke-handoff/store"
    assert pathlib.Path("runs/smoke-handoff/handoff.png").stat().st_size > 10_000
    names = [check["name"] for check in record["checks"]]
    assert len(names) == 1 + 2 * 4 + 4
    assert {"tp1_first_token_resumed_s", "tp8_first_token_prefilled_s"} <= set(
        record["measurements"]
    )
    shown = capsys.readouterr().out
    assert "What does a page" in shown and "records verified" in shown


HYBRIDS = ("qwen3_next", "gpt_oss", "gemma3", "deepseek_v32")


@pytest.mark.long
@pytest.mark.parametrize("name", HYBRIDS)
def test_all_that_the_groups_of_a_model_keep_is_handed_over(smoke, name):
    code, record = smoke(f"handoff_{name}")
    assert code == 0 and record["ok"]
    names = [check["name"] for check in record["checks"]]
    last = "TP=2 DCP=2" if name == "gpt_oss" else "TP=4"
    assert {
        "tokens continued at TP=1 page 16",
        "records verified at TP=1 page 16",
        f"tokens continued at {last} page 4",
        f"records verified at {last} page 4",
    } <= set(names)


@pytest.mark.parametrize(
    ("stem", "experiment"),
    [
        ("handoff", "handoff"),
        ("handoff_gemma3", "handoff"),
        ("handoff_of_mine", "handoff"),
        ("handoffs", None),
        ("bench_serve_mine", "bench_serve"),
        ("bench", None),
    ],
)
def test_a_config_runs_the_experiment_that_its_stem_begins_with(stem, experiment):
    assert command._experiment_of(stem) == experiment


def results(tokens=4, **changes):
    """Return what three processes would say if all were equal."""
    know = {"output_ids": [*range(2 * tokens)], "margins": [0.5] * 2 * tokens}
    write = {"output_ids": [*range(tokens)], "chunks_written": 2}
    read = {
        "output_ids": [*range(tokens, 2 * tokens)],
        "margins": [0.5] * tokens,
        "chunks_read": 2,
        "verified_tokens": 16,
    }
    for result in (know, write, read):
        result.update(predicted_nbytes=100, pool_nbytes=100)
    for place, value in changes.items():
        who, key = place.split("__")
        {"know": know, "write": write, "read": read}[who][key] = value
    return know, write, read


def failed(**changes):
    """Return the names of the checks that fail."""
    know, write, read = results(**changes)
    config = handoff.Config(
        conversation=(),
        model=ModelConfig("tiny"),
        serve=ServeConfig(),
        writer=Side(2, 8, 16),
        readers=(Side(1, 16, 8),),
        tokens=4,
        chunk_tokens=8,
    )
    reads = [(config.readers[0], read)]
    checks = handoff._checks(config, 13, know, write, reads)
    return [check.name for check in checks if not check.ok]


def test_equal_results_pass():
    assert failed() == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"write__output_ids": [0, 1, 2, 9]}, ["tokens written at TP=2"]),
        (
            {"read__output_ids": [4, 5, 6, 9]},
            ["tokens continued at TP=1 page 16"],
        ),
        (
            {"read__margins": [0.5, 0.5, 0.52, 0.5]},
            ["margins continued at TP=1 page 16"],
        ),
        ({"read__chunks_read": 1}, ["chunks read at TP=1 page 16"]),
        ({"read__verified_tokens": 15}, ["records verified at TP=1 page 16"]),
        ({"write__pool_nbytes": 101}, ["pool bytes, written, TP=2 page 8"]),
    ],
)
def test_each_difference_is_seen(changes, names):
    assert failed(**changes) == names


@pytest.fixture
def root(tmp_path) -> pathlib.Path:
    """A page store with a segment in it."""
    root = tmp_path / "store"
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    records = np.arange(2 * 4 * 16, dtype=np.uint8).reshape(2, 4, 16)
    keys = store.chain_keys("m/f", tokens.ravel(), 4)
    with store.PageStore.open(root, "m", "f", 16, 4) as kept:
        kept.put(keys, tokens, records)
        store.explain(kept, {"a": 1}, {"b": 2})
    return root


def files(folder: pathlib.Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def test_a_store_is_removed_whole_and_nothing_is_no_fault(root):
    handoff.remove_store(root)
    assert not root.exists()
    handoff.remove_store(root)


@pytest.mark.parametrize(
    "foreign", ["notes.txt", "m/notes.txt", "m/f/notes.txt", "m/f/photos/1.png"]
)
def test_a_store_with_something_else_in_it_is_left_alone(root, foreign):
    (root / foreign).parent.mkdir(exist_ok=True)
    (root / foreign).write_text("mine")
    before = files(root)
    with pytest.raises(errors.ConfigError, match="is no part of one"):
        handoff.remove_store(root)
    assert files(root) == before


def test_a_folder_that_is_no_store_is_left_alone(tmp_path, root):
    home = tmp_path / "home"
    (home / "_photos").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(errors.ConfigError, match="link is no part of one"):
        handoff.remove_store(link)
    file = tmp_path / "file"
    file.write_text("mine")
    inner = root / "_mine"
    inner.mkdir()
    before = files(tmp_path)
    for path in (home, link, file, root, tmp_path):
        with pytest.raises(errors.ConfigError, match="is no part of one"):
            handoff.remove_store(path)
    assert files(tmp_path) == before


def test_the_experiment_refuses_before_any_process_runs(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("x")
    monkeypatch.setattr(handoff, "run_role", None)
    side = Side(1, 4, 4)
    config = handoff.Config(
        conversation=(),
        model=ModelConfig("nowhere"),
        serve=ServeConfig(),
        writer=side,
        readers=(side,),
        store_root=str(tmp_path),
    )
    with pytest.raises(errors.ConfigError, match="store_root"):
        next(handoff.run(config))
    assert (tmp_path / "mine").read_text() == "x"
