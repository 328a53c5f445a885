"""Two managers compared without a model: the ratios, and that a wrong one is seen."""

import dataclasses
import json
import pathlib

import pytest

import experiments.__main__ as command
from experiments import manager_choice
from experiments.manager_choice import Config, Fit, Layers
from experiments.manager_choice_served import Run, Served
from kvmem import errors, manage, settings
from kvmem.config import ModelConfig

NAMES = ("grouped", "static_split")


@pytest.mark.long
def test_the_smoke_config_runs_whole(repo_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke = repo_root / "configs" / "smoke" / "manager_choice.toml"
    assert command.main(["run", str(smoke), "--debug"]) == 0
    data = json.loads(pathlib.Path("runs/smoke-manager_choice/record.json").read_text())
    assert data["ok"] and len(data["checks"]) == 1 + 2 + 4
    served = {name: data["measurements"][f"served_{name}_sequences"] for name in NAMES}
    assert served == {"grouped": 3, "static_split": 2}
    assert data["measurements"]["ratio_64_tokens"] == pytest.approx(1.6, abs=1e-3)
    assert pathlib.Path(data["picture"]).stat().st_size > 1_000


def test_a_page_more_of_full_attention_costs_a_static_split_twice():
    members = manager_choice.members_of(Layers(), 32)
    for length, window, full in [
        (2_049, 5, 65), (8_192, 4, 256), (32_768, 4, 1_024), (131_072, 4, 4_096),
    ]:  # fmt: skip
        needs = manage.need(members, [length])
        assert needs == (full, window)
        nbytes = 1_000 * full * 2 * members[0].page_nbytes
        grouped = manager_choice.fit(manage.grouped(members, nbytes), needs)
        static = manager_choice.fit(manage.static_split(members, nbytes), needs)
        assert grouped.sequences == 2_000 * full // (full + window)
        assert static.sequences == 1_000
        assert static.idle == pytest.approx((full - window) / full / 2)
        assert "quota is" in static.refusal and "asked of pool 0" in grouped.refusal


def test_a_ratio_that_is_not_found_again_fails_its_check():
    config = Config(lengths=(2_049,), ratios=(1.86,))

    def checked(grouped: int, static: int) -> list[bool]:
        found = {
            "grouped": [Fit(grouped, 0, 4_000, "")],
            "static_split": [Fit(static, 0, 4_000, "")],
        }
        ratios = [grouped / static]
        return [check.ok for check in manager_choice._checks(config, found, ratios)]

    assert checked(1_857, 1_000) == [True, True]
    assert checked(1_870, 1_000) == [True, False]
    assert checked(1_000, 1_000) == [True, False]


def test_managers_of_other_memories_fail_the_check():
    config = Config(lengths=(2_049,), ratios=(1.86,))
    fits = {
        "grouped": [Fit(186, 0, 4_000, "")],
        "static_split": [Fit(100, 0, 3_998, "")],
    }
    same, _ = manager_choice._checks(config, fits, [1.86])
    assert not same.ok and "3,998" in same.detail


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (dict(), []),
        (dict(most_running=2), ["grouped: as many run at once as fit"]),
        (dict(answers=((1, 3),)), ["both give the same answers"]),
        (dict(free_pages=17), ["every page is free again"]),
    ],
)
def test_what_an_engine_does_otherwise_fails_its_check(change, failed):
    served = Served(model=ModelConfig(facts={"a": 1}, seed=0), pages=20, requests=3)
    run = Run(3, 0, ((1, 2),), 20)
    found = {"grouped": dataclasses.replace(run, **change), "static_split": run}
    checks = manager_choice._served_checks(
        served, {"grouped": 3, "static_split": 5}, found
    )
    assert [check.name for check in checks if not check.ok] == failed


def test_there_is_a_ratio_for_every_length():
    for wrong in (dict(lengths=()), dict(lengths=(1, 2), ratios=(1.0,))):
        with pytest.raises(errors.ConfigError, match="a ratio to be found again"):
            Config(**wrong)


def test_the_full_config_is_what_the_code_says(repo_root):
    path = repo_root / "configs" / "manager_choice.toml"
    config = settings.read(Config, path).value
    picture = "experiments/records/manager_choice.png"
    served = Served(model=config.served.model)
    assert config == Config(publish=True, picture=picture, served=served)
