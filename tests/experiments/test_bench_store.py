"""bench_store runs as a whole on its smoke config, and its parts see breaks."""

import json
import pathlib

import numpy as np
import pytest

import experiments.__main__ as command
from experiments import bench_store, store_race
from experiments.store_race import Sizes
from kvmem import settings


def test_the_smoke_config_runs_every_part(repo_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "bench_store.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-bench_store/record.json").read_text())
    assert [record["name"] for record in data["records"]] == [
        "same_batch",
        "batches_against_tensorstore",
        "conversation_against_one_array",
        "misses_against_a_dict",
        "opening_a_root",
    ]
    assert len(data["checks"]) == 2 + 2 + 1 + 2 + 2


@pytest.fixture
def race(tmp_path):
    return store_race.BatchRace(Sizes(3, 96), tmp_path)


def test_both_sides_hold_the_same_bytes(race):
    assert race.equal == {"store": True, "tensorstore": True}


def test_bytes_that_differ_are_seen_on_either_side(race):
    race._rows = race._rows[::-1].copy()
    assert not race._got_equal() and not race._read_equal()


def test_every_put_of_the_race_writes_every_chunk(race, monkeypatch):
    written = []
    put = store_race.store.PageStore.put

    def count(*args):
        done = put(*args)
        written.append(done.written)
        return done

    monkeypatch.setattr(store_race.store.PageStore, "put", count)
    for _ in range(2):
        assert race.jobs()["store_put"]().seconds > 0
    assert written == [3, 3]


def test_the_peer_writes_uncompressed_row_chunks(race, tmp_path):
    files = sorted((tmp_path / "array" / "c").rglob("*"))
    sizes = [path.stat().st_size for path in files if path.is_file()]
    assert sizes == [16 * 96] * 3
    row = np.frombuffer((tmp_path / "array/c/1/0").read_bytes(), np.uint8)
    assert (row == race._rows[1]).all()


def test_the_keys_that_miss_all_miss(tmp_path):
    jobs = store_race.miss_jobs(Sizes(5, 16), 7, tmp_path)
    assert jobs["contains_one_by_one"]() == 0 and jobs["get_of_all"]() == 0
    assert jobs["dict_lookups"]() is None


def test_a_missed_target_fails_its_check_with_the_ratio():
    check = bench_store._at_least("x", 0.79, 0.8, "of TensorStore")
    assert not check.ok and check.detail == "0.79 of TensorStore, at least 0.8"
    assert bench_store._at_least("x", 0.8, 0.8, "of TensorStore").ok


def test_the_full_config_asks_for_what_was_promised(repo_root):
    path = repo_root / "configs" / "bench_store.toml"
    config = settings.read(bench_store.Config, path).value
    assert config.targets == bench_store.Targets()
    assert config.targets.put == 0.8 and config.targets.get == 0.9
    assert config.targets.conversation == 5 and config.targets.misses == 20
    assert config.targets.open_s == 2
    assert config.batch.nbytes >= 64_000_000
    assert config.conversation.chunks == 2000 and config.lookups == 1000
    assert config.open_chunks == (5_000, 50_000)
    assert config.rounds == 9 and config.publish
