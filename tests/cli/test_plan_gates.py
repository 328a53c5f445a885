"""The gates of drafting in `kvmem plan`: a verdict each, and all refusals at once."""

import json

import pytest

from kvmem import cli
from kvmem.speculative import RULES

SMOLLM2 = "configs/models/smollm2.toml"
GATES = [gate.name for gate in RULES["kvmem"]]


@pytest.fixture
def plan(repo_root, capsys):
    def run(*settings, json=False):
        argv = ["plan", str(repo_root / SMOLLM2)]
        for each in settings:
            argv += ["--set", f"speculative.{each}"]
        code = cli.main([*argv, "--json"] if json else argv)
        return code, *capsys.readouterr()

    return run


def test_a_plan_that_drafts_prints_its_gates_and_what_is_drafted(plan):
    code, out, _ = plan("algorithm=ngram", "draft_tokens=6")
    assert code == 0
    for said in ("gates of drafting", "known algorithm", "allowed", "6 tokens a step"):
        assert said in out
    assert "refused" not in out and "silent" not in out
    silent = len(GATES) - out.count("allowed")
    assert f"{silent} of {len(GATES)} gates of kvmem have nothing to say" in out


def test_a_plan_that_drafts_nothing_prints_none(plan):
    code, out, _ = plan()
    assert code == 0
    assert "gates" not in out and "drafting" not in out


def test_a_refused_plan_is_printed_whole_and_is_bad_input(plan):
    code, out, error = plan("algorithm=mtp", "topk=2")
    assert code == 2
    assert out.count("refused") == 2 and "claims, on each rank" in out
    for said in ("linear draft chain only", "moved with those that are accepted"):
        assert said in error


def test_widths_that_nobody_reads_are_shown_and_refused(plan):
    code, out, error = plan("topk=2")
    assert code == 2
    assert "gates of drafting" in out
    assert "nobody drafts" in error


def test_the_json_has_every_gate_and_every_violation(plan):
    code, out, error = plan("algorithm=mtp", "topk=2", json=True)
    found = json.loads(out)
    assert code == 2
    assert [row["gate"] for row in found["gates"]] == GATES
    refused = [row for row in found["gates"] if row["said"] == "refused"]
    assert len(refused) == len(found["violations"]) == 2
    for row, violation in zip(refused, found["violations"], strict=True):
        assert row["why"] in violation and violation in error
    code, out, _ = plan("algorithm=frozen_kv", json=True)
    found = json.loads(out)
    assert code == 0 and found["violations"] == []
    assert {row["said"] for row in found["gates"]} == {"allowed", "silent"}


def test_pools_of_their_own_are_no_cure_for_layers_in_the_targets_pool(plan):
    code, out, _ = plan("algorithm=mtp")
    assert code == 0 and "split" not in out
    assert "padding: " in out  # of pages as long as those of all target's layers
