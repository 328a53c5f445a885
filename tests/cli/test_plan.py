"""`kvmem plan` explains every number to people and programs; no device is touched."""

import json
import subprocess
import sys

import pytest

from kvmem import cli


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
    argv = (llama_config(), "--pages", str(2**31 - 1), "--page-size", "1024")
    found = plan(*argv)
    nbytes = (2**31 - 1) * 131_072 * 1_024
    assert found["groups"][0]["pages"] == 2**31 - 1
    assert (found["used_nbytes"], found["left_nbytes"]) == (nbytes, 0)
    assert found["binding_limit"] == "pages"
    assert cli.main(["plan", *argv]) == 0
    assert "a page = 2,147,483,647.00, so" in capsys.readouterr().out


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
            "page ids are int32, which tell 2,147,483,647 pages",
        ),
        (["--pages", str(2**31)], "a pool of 2,147,483,648 pages of 16 tokens"),
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
    assert "more than the 54,760,833,024 B of this machine" in capsys.readouterr().err
