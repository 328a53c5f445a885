"""`kvmem plan` explains every number to people and programs; no device is touched."""

import json
import subprocess
import sys

import pytest

from kvmem import cli, config


@pytest.fixture
def plan(capsys):
    """Run `kvmem plan ARGS --json` and return its JSON."""

    def plan(*argv: str) -> dict:
        assert cli.main(["plan", *argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return plan


@pytest.mark.case("CFG-02")
def test_a_plan_names_each_claim_the_rounding_and_the_limit(llama_config, plan, capsys):
    draft = llama_config("draft", num_hidden_layers=2)
    argv = (llama_config(), "--memory", "1000000000", "--draft", draft)
    assert cli.main(["plan", *argv]) == 0
    said = capsys.readouterr().out
    for part in (
        *("target kv", "131,072", "draft kv", "8,192", "139,264"),
        *("memory", "1,000,000,000", "binds", "448", "7,168", "2,097,152"),
        "rounding: 1,000,000,000 B / 2,228,224 B a page = 448.79, so 448 pages use "
        "998,244,352 B and leave 1,755,648 B",
    ):
        assert part in said, part
    found = plan(*argv)
    assert found["groups"] == [
        {
            "name": "full",
            "lifecycle": "full",
            "layers": 32,
            "page_size": 16,
            "page_nbytes": 2_097_152,
            "pages": 448,
            "tokens": 7_168,
            "domain": "target",
            "extents": 1,
            "payload_nbytes": 2_097_152,
            "pool": 0,
        }
    ]
    assert found["terms"] == [
        {
            "name": f"{owner} kv",
            "owner": owner,
            "bytes_per_token": nbytes,
            "fixed_bytes": 0,
            "replicas": 1,
        }
        for owner, nbytes in (("target", 131_072), ("draft", 8_192))
    ]
    assert found["pool_nbytes"] == 1_000_000_000
    assert found["used_nbytes"] == 998_244_352
    assert found["left_nbytes"] == 1_755_648
    assert found["binding_limit"] == "memory"
    assert found["draft_pages"] == 448
    assert found["violations"] == []


def test_a_plan_of_as_many_pages_as_ids_tell_apart_is_exact(llama_config, plan, capsys):
    argv = (llama_config(), "--pages", str(2**31 - 2), "--page-size", "1024")
    found = plan(*argv)
    nbytes = (2**31 - 2) * 131_072 * 1_024
    assert found["groups"][0]["pages"] == 2**31 - 2
    assert (found["used_nbytes"], found["left_nbytes"]) == (nbytes, 0)
    assert found["binding_limit"] == "pages"
    assert cli.main(["plan", *argv]) == 0
    assert "a page = 2,147,483,646.00, so" in capsys.readouterr().out


def test_a_checkpoints_config_plans_on_eight_ranks(llama_config, plan):
    found = plan(llama_config(), "--tp", "8", "--memory", "80GiB", "--page-size", "64")
    (group,) = found["groups"]
    assert group["page_nbytes"] == 131_072 // 8 * 64
    assert group["pages"] == (80 << 30) // group["page_nbytes"]
    assert group["tokens"] == group["pages"] * 64
    assert found["kv_dtype"] == "bfloat16"


def test_a_plan_names_its_paddings_and_its_replicas(plan, repo_root):
    found = plan(str(repo_root / "configs" / "models" / "smollm2.toml"), "--tp", "9")
    assert found["weight_paddings"] == [
        {"name": "mlp", "size": 1536, "padded": 1539},
        {"name": "vocab", "size": 49152, "padded": 49158},
    ]
    assert found["terms"][0]["replicas"] == 3


def test_each_kind_of_memory_has_its_own_arithmetic(llama_config, plan):
    source = llama_config()
    weights = plan(source, "--memory", "1GiB", "--tp", "4")["weight_nbytes"]
    device = plan(source, "--tp", "4", "--device-memory", "80GiB", "--reserve", "1GiB")
    assert device["pool_nbytes"] == (79 << 30) - weights
    total = plan(source, "--tp", "4", "--memory-total", "80GiB")
    assert total["pool_nbytes"] == 20 << 30


@pytest.mark.case("BUD-11")
def test_the_smallest_of_several_limits_is_named(llama_config, plan):
    source = llama_config()
    both = plan(source, "--memory", "2GiB", "--memory-total", "1GiB")
    assert both["binding_limit"] == "memory_total"
    capped = plan(source, "--memory", "2GiB", "--pages", "7")
    assert capped["binding_limit"] == "max_pages"
    assert capped["groups"][0]["pages"] == 7


def test_a_flag_wins_over_the_file_and_set_over_a_flag(plan, repo_root):
    path = str(repo_root / "configs" / "models" / "smollm2.toml")
    assert plan(path)["groups"][0]["page_size"] == 16
    assert plan(path, "--page-size", "32")["groups"][0]["page_size"] == 32
    argv = (path, "--page-size", "32", "--set", "pool.page_size=64")
    assert plan(*argv)["groups"][0]["page_size"] == 64


@pytest.mark.case("LAY-13")
def test_a_plan_that_cannot_be_is_bad_input_and_says_what_works(llama_config, capsys):
    code = cli.main(["plan", llama_config(), "--tp", "6", "--memory", "1GiB", "--json"])
    answer = capsys.readouterr()
    assert code == 2
    (violation,) = json.loads(answer.out)["violations"]
    assert "TP 6" in violation and "Use TP" in violation
    assert json.loads(answer.out)["groups"] == []
    assert answer.err == f"kvmem: {violation}\n"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (
            ["--pages", str(10**21)],
            "page ids are int32, which tell 2,147,483,646 pages",
        ),
        (["--pages", str(2**31 - 1)], "a pool of 2,147,483,647 pages of 16 tokens"),
        (["--memory", "100000TiB"], "a pool of 52,428,800,000 pages of 16 tokens"),
        (["--memory", "1KiB"], "one page of 16 tokens takes 2,097,152 B"),
        ([], "a pool without a size"),
        (["--memory", "much"], "'much' as a number of bytes"),
        (["--memory", "1GiB", "--kv-dtype", "int4"], "'int4' is none of"),
        (["--memory", "1GiB", "--page-size", "0"], "page_size = 0"),
        (["--memory", "1GiB", "--order", "odd"], "page order 'odd'"),
        (["--reserve", "1GiB", "--memory", "1GiB"], "reserve alone"),
        (["--device-memory", "1GiB"], "leaves -"),
        (["--memory", "1GiB", "--set", "pool.page=3"], "unknown key pool.page"),
        (["--memory", "1GiB", "--draft", "nowhere"], "model 'nowhere'"),
    ],
)
def test_bad_input_ends_with_2_and_its_law(llama_config, capsys, argv, complaint):
    assert cli.main(["plan", llama_config(), *argv]) == 2
    assert complaint in capsys.readouterr().err


def test_a_model_of_another_family_is_refused_in_words(llama_config, capsys):
    source = llama_config(model_type="mamba")
    assert cli.main(["plan", source, "--memory", "1GiB"]) == 2
    assert "model_type is 'mamba'" in capsys.readouterr().err


def test_planning_imports_no_jax(llama_config):
    code = (
        "import sys; from kvmem import cli;"
        f"code = cli.main(['plan', {llama_config()!r}, '--memory', '1GiB', '--json']);"
        "sys.exit(code or ('jax' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_target_and_draft_divide_the_whole(llama_config, plan, capsys):
    draft = llama_config("draft", num_hidden_layers=2)
    argv = (llama_config(), "--memory", "1000000000", "--draft", draft)
    target, behind = plan(*argv)["division"]
    assert target["nbytes"] + behind["nbytes"] == 1_000_000_000
    assert behind["nbytes"] == 1_000_000_000 * 8_192 // 139_264
    assert target["rows"] == behind["rows"] == 1_000_000_000 // 139_264
    assert cli.main(["plan", *argv]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"draft {behind['nbytes']:,} B for {behind['rows']:,} rows" in said
    assert plan(llama_config(), "--memory", "1000000000")["division"] == []


@pytest.mark.case("CFG-03")
def test_a_plan_of_any_model_says_which_manager_and_why(llama_config, plan, capsys):
    argv = (llama_config(), "--memory", "1GiB")
    chosen = plan(*argv)["manager"]
    assert cli.main(["plan", *argv]) == 0
    said = f"manager: {chosen['name']} ({chosen['provenance']}): {chosen['reason']}"
    assert (chosen["provenance"], chosen["is_fallback"]) == ("unset", False)
    assert said in capsys.readouterr().out


@pytest.mark.case("BUD-04")
def test_a_host_tier_is_shown_as_a_total_and_a_rank(llama_config, plan, capsys):
    argv = (
        *(llama_config(), "--tp", "4", "--memory", "1GiB"),
        *("--set", "store.host_memory=50GiB"),
    )
    (term,) = plan(*argv)["host_terms"]
    assert (term["name"], term["fixed_bytes"]) == ("host tier", 13_421_772_800)
    assert cli.main(["plan", *argv]) == 0
    assert (
        "host tier: 53,687,091,200 B of the machine's memory in all, 13,421,772,800 B "
        "for each of 4 ranks"
    ) in capsys.readouterr().out
    assert cli.main(["plan", *argv, "--machine-memory", "51GiB"]) == 2
    said = capsys.readouterr().err
    assert "> 54,760,833,024 B of this machine's memory" in said
    assert "x 4 (target) + 53,687,091,200 B of host tier" in said
    assert "host tier can shrink: at most 50," in said


@pytest.fixture
def preset(repo_root):
    """Return the path of a preset that is there to be planned."""
    return lambda name: str(repo_root / "configs" / "models" / f"{name}.toml")


@pytest.mark.parametrize(
    ("name", "kind", "groups"),
    [
        ("llama3_8b", "unified", ["full"]),
        ("deepseek_v3", "unified", ["full"]),
        ("deepseek_v32", "split", ["full", "indexer"]),
        ("gemma3_27b", "split", ["full", "window1024"]),
        ("gpt_oss_120b", "unified", ["full", "window128"]),
        ("qwen3_next", "unified", ["full", "state"]),
        ("kimi_linear", "unified", ["full", "state"]),
    ],
)
def test_published_models_are_planned_though_no_engine_runs_them(
    preset, plan, capsys, name, kind, groups
):
    found = plan(preset(name), "--tp", "2", "--dcp", "2")
    assert (found["kind"], [g["name"] for g in found["groups"]]) == (kind, groups)
    assert found["topology"] == {"tp": 2, "dcp": 2, "interleave": 1, "ranks": 4}
    assert found["nested_topology"] == {"tp": 4, "dcp": 2}
    assert found["used_nbytes"] + found["left_nbytes"] == found["pool_nbytes"]
    pools = sum(pool["pages"] * pool["page_nbytes"] for pool in found["pools"])
    assert pools == found["used_nbytes"]
    assert found["weight_nbytes"] is None and found["paddings"] == []
    assert cli.main(["plan", preset(name), "--tp", "2", "--dcp", "2"]) == 0
    said = capsys.readouterr().out
    assert "tp=2 dcp=2 (most sources count DCP inside TP: TP=4, DCP=2)" in said
    assert "slots on each rank covers" in said and "takes 2 pages for as many" in said
    assert "planned only, no engine runs it" in said
    assert f"the largest page is {found['largest_id']:,}" in said
    assert "…" not in said
    for term in found["terms"]:
        assert term["name"] in said


def test_a_ratio_that_divides_no_bytes_is_a_number_all_the_same(preset, plan, capsys):
    argv = (preset("gemma3_27b"), "--window-ratio", "0.8", "--page-size", "1")
    found = plan(*argv, "--memory", "40GiB")
    assert sum(t["bytes_per_token"] for t in found["terms"]) == 422_707.2
    assert [g["tokens"] for g in found["groups"]] == [101_606, 81_284]
    assert cli.main(["plan", *argv]) == 0
    assert "422,707.20" in capsys.readouterr().out


def test_fixed_costs_grow_with_what_runs_at_once(preset, plan):
    few = plan(preset("qwen3_next"), "--max-batch", "1")
    many = plan(preset("qwen3_next"), "--max-batch", "100")
    assert [f["groups"][1]["pages"] for f in (few, many)] == [1, 100]
    states = [f["terms"][1]["fixed_bytes"] for f in (few, many)]
    assert states == [77_266_944, 7_726_694_400]
    assert many["groups"][0]["tokens"] < few["groups"][0]["tokens"]


def test_pages_that_mean_little_are_reported_with_sizes_that_mean_more(
    preset, plan, capsys
):
    argv = (preset("deepseek_v32"), "--kind", "unified")
    (padding,) = plan(*argv)["paddings"]
    assert (padding["group"], padding["page_sizes"]) == ("indexer", [279, 318])
    assert cli.main(["plan", *argv]) == 0
    assert (
        "padding: 2,045,696 of 2,561,024 B of a page of indexer (79.9%) mean nothing; "
        "at most an eighth would with pages of its own, of 279 to 318 tokens, or a "
        'pool of its own (pool.kind = "split", planned only: an engine has one pool)'
    ) in capsys.readouterr().out


def test_sizes_of_other_pages_are_named_for_a_state(preset, capsys):
    argv = ["plan", preset("qwen3_next"), "--page-size", "4"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "of a page of state (" in said
    assert "tokens in the other groups, or a pool of its own" in said


@pytest.mark.case("CFG-05")
def test_the_limiting_rank_is_named_with_its_bytes(llama_config, plan, capsys):
    given = "pool.memory_by_rank=['24GiB','3GiB']"
    argv = (llama_config(), "--tp", "2", "--set", given)
    found = plan(*argv)
    assert (found["limiting_rank"], found["pool_nbytes"]) == (1, 3 << 30)
    assert [limit["rank"] for limit in found["limits"]] == [0, 1]
    assert cli.main(["plan", *argv]) == 0
    said = capsys.readouterr().out
    assert "limiting rank: 1, with 3,221,225,472 B of memory_by_rank" in said
    assert said.count("binds") == 1
    assert cli.main(["plan", *argv, "--dcp", "2"]) == 2
    assert "2 figures for 4 ranks" in capsys.readouterr().err


def test_the_page_from_which_flat_addresses_wrap_is_said(preset, plan, capsys):
    argv = (preset("llama3_8b"), "--memory", "50GiB")
    assert plan(*argv)["largest_id"] == 25_599
    assert cli.main(["plan", *argv]) == 0
    said = capsys.readouterr().out
    assert "would wrap from page 1,024 of 2,097,152 B on" in said
    assert cli.main(["plan", *argv, "--page-size", "65536"]) == 2
    assert "an int32 offset wraps at 2,147,483,648" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_run_says_why_beside_its_plan(llama_config, plan):
    source = llama_config(sliding_window=512, model_type="mistral")
    found = plan(source, "--memory", "1GiB")
    assert [g["lifecycle"] for g in found["groups"]] == ["window(512)"]
    assert "sliding_window is 512" in found["only_planned"]
    runs = plan(llama_config("other"), "--memory", "1GiB")
    assert (runs["only_planned"], runs["weight_nbytes"] > 0) == ("", True)


def test_a_draft_of_facts_alone_is_planned(preset, plan):
    argv = (preset("llama3_8b"), "--dcp", "2", "--set", "draft.facts.model_type=llama")
    layers = [f"draft.facts.num_hidden_layers={n}" for n in (1,)]
    more = ["draft.facts.num_attention_heads=8", "draft.facts.head_dim=128"]
    given = [part for text in (*layers, *more) for part in ("--set", text)]
    found = plan(*argv, *given)
    assert found["terms"][1]["bytes_per_token"] == 2 * 4_096
    assert found["draft_pages"] == 2 * found["groups"][0]["pages"]


def test_facts_are_settings_with_sources(preset, capsys):
    argv = ["config", preset("kimi_linear"), "--json"]
    assert cli.main([*argv, "--set", "model.facts.kv_lora_rank=256"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["model.facts.kv_lora_rank"] == {"value": 256, "source": "--set"}
    heads = rows["model.facts.linear_attn_config.num_heads"]
    assert heads["value"] == 32 and heads["source"].startswith("file ")


@pytest.mark.case("BUD-07")
def test_one_pool_that_holds_less_than_several_says_so(preset, plan, capsys):
    argv = (preset("gemma3_27b"), "--memory", "2GiB", "--kind")
    one, apart = plan(*argv, "unified"), plan(*argv, "split")
    (tokens,) = (g["tokens"] for g in apart["groups"] if g["name"] == "full")
    assert one["split_tokens"] == tokens == 4_224  # as full attention everywhere
    assert apart["split_tokens"] is None
    assert cli.main(["plan", *argv, "unified"]) == 0
    said = capsys.readouterr().out
    assert f"split gives {tokens:,} tokens beside these 2,512" in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--window-ratio", "0.001", "--manager", "static_split"), None),
        (("--set", "pool.shares=[1,inf]", "--manager", "static_split"), "finite"),
    ],
)
def test_odd_shares_and_ratios_end_in_words(preset, capsys, argv, said):
    code = cli.main(["plan", preset("gemma3_tiny"), *argv])
    found = capsys.readouterr()
    assert code == (0 if said is None else 2)
    assert (said or "") in found.err


def test_a_divided_plan_says_its_quotas_and_claims_no_more_than_its_limit(
    preset, plan, capsys
):
    argv = (preset("gemma3_tiny"), "--manager", "static_split")
    found = plan(*argv)
    rows = found["groups"][0]["tokens"]
    claimed = sum(
        t["bytes_per_token"] * rows + t["fixed_bytes"] for t in found["terms"]
    )
    assert claimed == found["used_nbytes"] <= found["pool_nbytes"]
    assert found["split_tokens"] is None
    assert cli.main(["plan", *argv]) == 0
    assert "quotas of 204 + 204 pages use" in capsys.readouterr().out


def test_a_draft_with_states_is_refused_with_a_cure_that_can_be_spelled(
    preset, tmp_path, capsys
):
    facts = config.load(preset("qwen3_next_tiny"), env={}).model.facts.plain()
    draft = tmp_path / "config.json"
    draft.write_text(json.dumps(facts))
    code = cli.main(["plan", preset("gemma3_tiny"), "--draft", str(draft)])
    assert code == 2
    assert "leave [draft] out, and take what they need off" in capsys.readouterr().err
