"""A preset and the config.json of the same model are one plan on every topology."""

import json

import pytest

from kvmem import cli, config

MODELS = [
    *("llama3_8b", "deepseek_v3", "deepseek_v32", "gemma3_27b"),
    *("gpt_oss_120b", "qwen3_next", "kimi_linear"),
]
# tp and dcp of `kvmem plan`: TP 1, 2, 8, and TP 8 with DCP 2 and 8 inside
TOPOLOGIES = [(1, 1), (2, 1), (8, 1), (4, 2), (1, 8)]


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_and_its_config_json_are_planned_alike(
    name, repo_root, tmp_path, capsys
):
    preset = repo_root / "configs" / "models" / f"{name}.toml"
    loaded = config.load(preset, env={})
    source = tmp_path / "config.json"
    source.write_text(json.dumps(loaded.model.facts.plain()))
    shared = ("--memory", "64GiB", "--page-size", "64", "--max-batch", "2", "--json")
    kv_dtype = loaded.model.cache_dtype()  # a config.json knows none but the weights'
    shared += ("--kind", loaded.pool.kind, "--set", f"model.kv_dtype={kv_dtype}")
    rows = []
    for tp, dcp in TOPOLOGIES:
        plans = []
        for asked in (preset, source):
            argv = ["plan", str(asked), "--tp", str(tp), "--dcp", str(dcp), *shared]
            assert cli.main(argv) == 0
            plans.append(json.loads(capsys.readouterr().out))
        for key in ("groups", "pools", "terms", "paddings", "largest_id"):
            assert plans[0][key] == plans[1][key], (tp, dcp, key)
        rows.append([term["bytes_per_token"] for term in plans[0]["terms"]])
    assert any(sum(row) for row in rows)
