"""Eviction policies compared: a trace that is one, a future that is its own."""

import json
import math
import pathlib

import pytest

import experiments.__main__ as command
from experiments import chat_trace, eviction
from experiments.chat_trace import ChatTraffic, Request, Uses
from kvmem import errors, settings
from kvmem.prefix import policy

SMALL = ChatTraffic(chats=8, stems=2, stem_tokens=32, mean_turns=3, question_tokens=9)


def test_the_smoke_config_runs_whole(repo_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "eviction.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-eviction/record.json").read_text())
    assert data["ok"] and len(data["checks"]) == 1 + 2
    assert len(data["measurements"]) == 4 * 2
    assert pathlib.Path(data["picture"]).stat().st_size > 1000


def test_a_trace_is_decided_by_its_seed():
    assert chat_trace.make(SMALL) == chat_trace.make(SMALL)
    other = ChatTraffic(**{**vars(SMALL), "seed": 1})
    assert chat_trace.make(other) != chat_trace.make(SMALL)


def test_a_turn_begins_with_all_that_its_chat_said():
    requests = chat_trace.make(SMALL)
    times = [request.time_s for request in requests]
    assert times == sorted(times)
    turns = [
        (earlier, later)
        for at, later in enumerate(requests)
        for earlier in requests[:at]
        if later.tokens[: len(earlier.tokens)] == earlier.tokens
    ]
    assert turns
    assert all(later.num_prompt > len(earlier.tokens) for earlier, later in turns)
    assert len({tuple(request.tokens[:32]) for request in requests}) == 2


def test_the_future_of_a_page_is_the_requests_that_ask_for_it():
    a, b = [1, 2, 3, 4], [1, 2, 5, 6]
    requests = [Request(0, [*a, 7, 7], 3), Request(1, [*b, 8], 5), Request(2, a, 4)]
    uses = Uses(requests, 2)
    assert uses.names == [
        [0, 1],
        [
            0,
            2,
        ],
        [0],
    ]
    assert uses.num_pages == 3
    assert [uses.next(0, now) for now in (-1, 0, 1, 2)] == [0, 1, 2, math.inf]
    assert [uses.next(2, now) for now in (0, 1)] == [1, math.inf]
    assert uses.next(1, -1) == math.inf  # the first asked for less, the third too


def test_a_pool_for_everything_finds_the_same_under_every_policy():
    requests = chat_trace.make(SMALL)
    uses = Uses(requests, 16)
    done = [
        eviction.replay(name, requests, uses, 16, uses.num_pages + 64)
        for name in ("lru", "lfu", "size_aware", "belady")
    ]
    assert len({replay.cached_tokens for replay in done}) == 1
    assert all(replay.evicted_pages == 0 and not replay.objections for replay in done)
    seen, expected = set(), 0
    for request, names in zip(requests, uses.names, strict=True):
        askable = names[: (request.num_prompt - 1) // 16]
        expected += 16 * sum(name in seen for name in askable)
        seen |= set(names)
    assert done[0].cached_tokens == expected > 0


def test_a_policy_that_beats_the_optimum_fails_the_check():
    def replayed(cached, objections=()):
        return [eviction.Replay(100, cached, 0, objections)]

    found = {"lru": replayed(40), "belady": replayed(60)}
    assert all(check.ok for check in eviction._checks(found, [8]))
    found["lru"] = replayed(61)
    books, best = eviction._checks(found, [8])
    assert books.ok and not best.ok and "lru 0.610" in best.detail
    found = {"lru": replayed(40, ("page 3 has 2 references",)), "belady": replayed(60)}
    books, best = eviction._checks(found, [8])
    assert not books.ok and "page 3" in books.detail and best.ok


@pytest.mark.parametrize("wrong", [{"policies": ("mru",)}, {"shares": (0.0,)}])
def test_unknown_policies_and_shares_are_refused(wrong):
    with pytest.raises(errors.ConfigError, match="policies are of lru"):
        eviction.Config(**wrong)


def test_the_full_config_compares_every_policy(repo_root):
    path = repo_root / "configs" / "eviction.toml"
    config = settings.read(eviction.Config, path).value
    picture = "experiments/records/eviction.png"
    assert config == eviction.Config(publish=True, picture=picture)
    assert set(config.policies) == policy.NAMED.keys()
