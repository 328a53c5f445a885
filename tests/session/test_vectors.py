"""The vectors of recall and failure run from their data, under both rule sets.

A row marked "ov" is what OpenViking does and holds under its rules; it holds under the
default rules too, but where twins.jsonl has a row of its id. A row marked "kv" is
kvmem's own. Rows of concurrency run in test_concurrency.py, F12 in test_power_loss.py.
"""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ELSEWHERE = ("F12",)


def rows(name: str) -> dict:
    found = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    return {row["id"]: row for row in found}


VECTORS, TWINS = rows("vectors.jsonl"), rows("twins.jsonl")
STEPS = {k: v for k, v in VECTORS.items() if k[0] in "RF" and k not in ELSEWHERE}


@pytest.mark.parametrize("name", [k for k, v in STEPS.items() if v["who"] == "ov"])
def test_a_vector_of_openviking_holds_under_its_rules(name, make_world):
    make_world("openviking").play(STEPS[name]["steps"])


@pytest.mark.parametrize("name", STEPS)
def test_a_vector_holds_under_the_default_rules(name, make_world):
    make_world().play(TWINS.get(name, STEPS[name])["steps"])


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_differs_from_its_vector(name, make_world):
    with pytest.raises(AssertionError):
        make_world().play(VECTORS[name]["steps"])
    with pytest.raises(AssertionError):
        make_world("openviking").play(TWINS[name]["steps"])


def test_a_wrong_expectation_is_seen(make_world):
    with pytest.raises(AssertionError, match="step 0, recall"):
        make_world().play([["recall", "s", {}, {"entries": ["N"]}]])
    with pytest.raises(AssertionError):
        make_world().play([["msg", "s", 1], ["clock", "s", 2]])
    with pytest.raises(AssertionError, match="OSError was expected"):
        make_world().play([["msg", "s", 1, {"err": "io"}]])


def test_every_row_of_the_specification_is_run():
    names = [f"R{i:02d}" for i in range(1, 17)] + [f"F{i:02d}" for i in range(1, 14)]
    names += [f"C{i:02d}" for i in range(1, 10)]
    assert set(names) <= set(VECTORS)
    assert set(STEPS) == {n for n in VECTORS if n[0] in "RF"} - set(ELSEWHERE)
