"""bench_prefix runs as a whole on its smoke config, and its parts see breaks."""

import json
import pathlib

import pytest

import experiments.__main__ as command
from experiments import bench_prefix, prefix_race
from experiments.harness import Rounds
from kvmem import settings


def test_the_smoke_config_runs_every_part(repo_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "bench_prefix.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-bench_prefix/record.json").read_text())
    assert [record["name"] for record in data["records"]] == [
        "index_page_1",
        "index_page_16",
        "index_slack_4",
        "frees",
    ]
    assert [check["name"] for check in data["checks"]] == [
        "insert at page 16",
        "match at page 16",
        "evict_half at page 16",
        "frees of a batch of 8 in 64 pages",
    ]


def test_texts_share_their_beginnings_and_nothing_else():
    made = prefix_race.texts(6, 32, 2, 16)
    assert all(len(text) == 32 for text in made)
    assert made[0][:16] == made[2][:16] != made[1][:16]
    assert len({tuple(text[16:]) for text in made}) == 6


def test_a_turn_that_finds_or_drops_nothing_is_no_measurement():
    forest = prefix_race.Forest(prefix_race.texts(6, 32, 2, 16), 4)
    with pytest.raises(AssertionError):
        forest.match()
    forest.insert()
    forest.match()
    forest.miss()
    forest._tails = forest._known
    with pytest.raises(AssertionError):
        forest.miss()
    assert forest._cache.num_pages == 2 * 4 + 6 * 4
    forest.evict_half()
    assert forest._cache.num_pages == 16 and forest._ledger.num_free == 48 - 16
    forest._ledger.groups[0].refs[:] += 1
    with pytest.raises(AssertionError):
        forest.evict_half()


@pytest.mark.parametrize(("lookups_s", "ratio"), [(1.0, 4.0), (2.0, 8.0)])
def test_the_peers_figure_is_scaled_by_the_calibrated_job(lookups_s, ratio):
    """On a machine twice as slow, the peer too would take twice as long."""
    peer = bench_prefix.Peer(lookups_per_s=prefix_race.LOOKUPS / 1.0)
    config = bench_prefix.Config(peer=peer)
    timed = Rounds({"dict_lookups": (lookups_s,) * 3, "part": (0.5,) * 3})
    check = bench_prefix._times("x", config, timed, "part", 2.0, ratio)
    assert check.ok and f"{ratio:.2f} x" in check.detail
    assert not bench_prefix._times("x", config, timed, "part", 2.0, ratio + 0.1).ok


def test_the_full_config_asks_for_what_was_promised(repo_root):
    path = repo_root / "configs" / "bench_prefix.toml"
    config = settings.read(bench_prefix.Config, path).value
    assert config == bench_prefix.Config(publish=True)
    assert dict(vars(config.targets)) == {
        "insert": 1.0,
        "match": 1.0,
        "evict_half": 20.0,
        "free": 100.0,
    }
