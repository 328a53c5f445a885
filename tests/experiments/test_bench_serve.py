"""bench_serve runs as a whole on its smoke config, and is fair to its peer."""

import itertools
import json
import pathlib

import pytest

import experiments.__main__ as command
from experiments import bench_serve, peer_race, tiny_decoder
from experiments.engine_clock import EngineClock
from experiments.harness import Rounds
from kvmem import settings
from kvmem.model import presets


@pytest.mark.long
def test_the_smoke_config_runs_what_needs_no_peer(
    repo_root, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "bench_serve.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-bench_serve/record.json").read_text())
    assert {record["name"]: record["kind"] for record in data["records"]} == {
        "decode_in_place": "correctness",
        "where_the_time_goes": "measurement",
        "resumed_text": "correctness",
        "resumed_first_token": "measurement",
    }
    assert all(check["ok"] for check in data["checks"])
    assert set(data["step_parts_ms"]) == {"decode_batch_1", "decode_batch_2"}
    assert not list(pathlib.Path("runs").rglob("store-*"))


class Partner:
    """A peer that keeps what it was asked, and takes a second for everything."""

    def __init__(self):
        self.asked = []
        self.ticks = itertools.repeat(0.0)

    def ask(self, job, **arguments):
        self.asked.append(arguments)
        count = arguments.get("steps", 1)
        return {"seconds": [1.0] * count if job == "decode" else 1.0}

    def cpu_seconds(self):
        return next(self.ticks)


@pytest.fixture
def watched(tiny_engine, monkeypatch):
    """A clock whose prompts are kept."""
    clock, seen = EngineClock(tiny_engine), []
    for verb in ("decode", "first_token"):
        held = getattr(clock, verb)

        def watch(prompt, *rest, held=held):
            seen.append(prompt)
            return held(prompt, *rest)

        monkeypatch.setattr(clock, verb, watch)
    return clock, seen


def test_both_sides_decode_the_same_tokens(watched):
    clock, seen = watched
    partner = Partner()
    timed = peer_race.decode(
        clock, partner, batch=2, context=10, steps=3, warm_up=1, rounds=2, seed=0
    )
    assert [asked["prompts"] for asked in partner.asked] == seen
    assert len({str(prompts) for prompts in seen}) == 3  # fresh ones at every turn
    assert timed.seconds[peer_race.PEER] == (1.0, 1.0)
    assert timed.num_rounds == 2


def test_both_sides_prefill_the_same_tokens_equally_often(watched):
    clock, seen = watched
    partner = Partner()
    peer_race.prefill(clock, partner, tokens=12, calls=2, rounds=1, seed=0)
    assert [asked["prompt"] for asked in partner.asked] == seen
    assert len(seen) == 4 and len({str(prompt) for prompt in seen}) == 4


def test_a_peer_that_runs_in_our_turn_is_caught(tiny_engine):
    partner = Partner()
    partner.ticks = itertools.count()
    clock = EngineClock(tiny_engine)
    with pytest.raises(AssertionError, match="ran in kvmem's turn"):
        peer_race.prefill(clock, partner, tokens=12, calls=1, rounds=1, seed=0)


def test_a_ratio_below_its_target_fails():
    timed = Rounds({peer_race.PEER: (1.1, 1.3), peer_race.OURS: (1.0, 1.0)})
    check = bench_serve._reach("decode", timed, 1.2)
    assert check.ok and check.detail == "1.20 x (turns from 1.10 to 1.30), at least 1.2"
    assert not bench_serve._reach("decode", timed, 1.21).ok
    rates = bench_serve._rates("decode", timed, 8)
    assert rates["decode_kvmem_tokens_per_s"] == 8.0
    assert rates["decode_peer_best_tokens_per_s"] == 7.3


def test_the_full_config_asks_for_what_was_promised(repo_root):
    path = repo_root / "configs" / "bench_serve.toml"
    config = settings.read(bench_serve.Config, path).value
    assert config.targets == bench_serve.Targets(1.2, 0.95, 10.0)
    assert (config.batches, config.context) == ((1, 8), 128)
    assert config.prefill_tokens == (128, 512)
    assert (config.rounds, config.resume_tokens) == (9, 700)
    assert config.model.kv_dtype == "float32" and config.publish
    assert len(config.prompts) == 20 and config.greedy_tokens == 32


def test_the_tiny_checkpoint_is_the_same_every_time(tmp_path):
    first, second = (presets.load(tiny_decoder.write(tmp_path / name)) for name in "ab")
    assert first.model_id == second.model_id
    assert first.tokenizer.decode(first.tokenizer.encode("a é")) == "a é"
