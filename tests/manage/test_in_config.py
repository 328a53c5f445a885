"""The manager as a setting: what is written and what is merely the default."""

import dataclasses
import json

import pytest

from kvmem import cli, errors
from kvmem import config as configs
from kvmem.config import Config, ModelConfig, PoolConfig
from kvmem.serve import ServeConfig

FACTS = {
    "model_type": "gpt_oss",
    "vocab_size": 257,
    "max_position_embeddings": 2_048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "sliding_window": 32,
}


@pytest.fixture
def windowed():
    """A config of a model of full attention and windows, in a pool of 100 pages."""

    def make(**pool) -> Config:
        model = ModelConfig(facts=FACTS, seed=0, kv_dtype="float32")
        serve = ServeConfig(max_batch=4, max_length=256)
        return Config(
            model, pool=PoolConfig(page_size=8, pages=100, **pool), serve=serve
        )

    return make


def test_a_model_of_several_groups_gets_the_grouped_manager(windowed):
    chosen = windowed().manager()
    assert (chosen.name, chosen.provenance) == ("grouped", "unset")
    assert "prefers it" in chosen.reason
    assert windowed(manager="auto").manager().provenance == "auto"
    (pool,) = windowed().budget().pools
    assert pool.num_vpages == (100, 100)
    assert windowed().budget() == windowed(manager="grouped").budget()


def test_a_static_split_that_was_asked_for_divides_the_budget(windowed):
    config = windowed(manager="static_split", shares=(3.0, 1.0))
    assert config.manager() == ("static_split", "it was asked for", "explicit", False)
    (pool,) = config.budget().pools
    assert pool.num_vpages == (75, 25) and pool.pages == 100
    (halves,) = windowed(manager="static_split").budget().pools
    assert halves.num_vpages == (50, 50)


def test_shares_without_a_static_split_are_refused(windowed):
    with pytest.raises(errors.ConfigError, match="have no fixed shares"):
        windowed(shares=(1.0, 1.0)).budget()
    with pytest.raises(errors.ConfigError, match="every group has a share"):
        windowed(manager="static_split", shares=(1.0, 1.0, 1.0)).budget()


def test_one_group_has_everything_under_any_manager(llama_config):
    config = Config(ModelConfig(llama_config()), pool=PoolConfig(memory=1 << 30))
    assert config.manager().name == "static_split"  # no preference
    named = dataclasses.replace(
        config, pool=PoolConfig(memory=1 << 30, manager="grouped")
    )
    assert config.budget() == named.budget()
    with pytest.raises(errors.ConfigError, match="one group has everything"):
        shared = PoolConfig(memory=1 << 30, shares=(1.0,))
        dataclasses.replace(config, pool=shared).budget()


def test_the_setting_is_read_from_a_file(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('[model]\nsource = "m"\n[pool]\nmanager = "static_split"\n')
    assert configs.load(path, env={}).pool.manager == "static_split"
    path.write_text('[model]\nsource = "m"\n[pool]\nmanager = "v2"\n')
    with pytest.raises(errors.ConfigError, match="manager"):
        configs.load(path, env={})


def test_a_plan_says_which_manager_and_why(repo_root, capsys):
    path = str(repo_root / "configs" / "models" / "gpt_oss_tiny.toml")
    assert cli.main(["plan", path]) == 0
    said = capsys.readouterr().out
    assert "manager: grouped (unset): " in said and "prefers it" in said
    assert cli.main(["plan", path, "--manager", "static_split", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["manager"]["name"] == "static_split"
    assert plan["manager"]["provenance"] == "explicit"
    (pool,) = plan["pools"]
    assert sum(pool["num_vpages"]) == pool["pages"]
