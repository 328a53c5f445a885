"""Public facts become the published sizes, from a preset and from a config.json alike.

Figures are bytes of one row on one rank; "TP t with DCP d inside" is
`Topology.nested(t, d)`. Padding is a claim apart and none of them.
"""

import dataclasses
import json
from fractions import Fraction

import pytest

from kvmem import budget, config, errors
from kvmem.config import ModelConfig
from kvmem.geometry import Rope, Topology, group_layers, kinds
from kvmem.model import cache_facts

GIB = 1 << 30


@pytest.fixture(params=["preset", "config.json"])
def load(request, repo_root, tmp_path):
    """Load a preset of configs/models, or a config of the equal config.json."""

    def load(name, **changes):
        path = repo_root / "configs" / "models" / f"{name}.toml"
        facts = config.load(path, env={}).model.facts.plain() | changes
        if request.param == "preset":
            given = [
                f"model.facts.{key}={json.dumps(value)}"
                for key, value in changes.items()
            ]
            return config.load(path, given, {})
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        source = folder / "config.json"
        if name == "gemma3_27b":  # published with the text model's fields in a table
            facts = {"model_type": "gemma3", "text_config": facts, "mm_tokens": 256}
        source.write_text(json.dumps(facts | {"initializer_range": None}))
        return config.load(None, [f"model.source={source}"], {})

    return load


def groups_of(loaded, kv_dtype="bfloat16", page_size=64, count=None):
    layers = loaded.spec.layer_specs(kv_dtype)
    return group_layers(layers[:count], page_size)


def solve(groups, topology=None, *, nbytes=400 * GIB, **more):
    limits = [budget.limit("memory", nbytes)]
    return budget.solve(
        groups, topology or Topology(), limits, kind="split", sequences=1, **more
    )


def per_row(solved):
    return sum(t.bytes_per_token for t in solved.terms if "padding" not in t.name)


@pytest.mark.parametrize(
    ("tp", "dcp", "nbytes"),
    [
        (1, 1, 131_072),
        (2, 1, 65_536),
        (8, 1, 16_384),
        (16, 1, 16_384),  # a head lies whole on a rank: the floor
        (8, 2, 32_768),
        (8, 8, 131_072),
    ],
)
def test_llama_3_divides_its_heads(load, tp, dcp, nbytes):
    solved = solve(groups_of(load("llama3_8b")), Topology.nested(tp, dcp))
    assert per_row(solved) == nbytes


def test_llama_3_in_mxfp8_keeps_a_scale_a_block(load):
    model = dataclasses.replace(load("llama3_8b").model, kv_dtype="mxfp8")
    groups = group_layers(model.layer_specs(), 64)
    assert per_row(solve(groups)) == 67_584
    assert per_row(solve(groups, Topology(8))) == 67_584 // 8
    latents = dataclasses.replace(load("deepseek_v3").model, kv_dtype="mxfp8")
    with pytest.raises(errors.ConfigError, match="kind 'mla' in mxfp8"):
        latents.layer_specs()


@pytest.mark.parametrize(
    ("depth", "nbytes"), [(1, 135_168), (2, 139_264), (4, 147_456)]
)
def test_llama_3_with_a_draft_of_some_layers(load, depth, nbytes):
    loaded = load("llama3_8b")
    draft = group_layers(
        loaded.spec.layer_specs("bfloat16")[:depth], 64, domain="draft"
    )
    assert per_row(solve(groups_of(loaded), draft=draft)) == nbytes


@pytest.mark.parametrize(
    ("page_size", "tokens"),
    [(1, 412_057), (16, 412_048), (64, 412_032), (128, 412_032)],
)
def test_llama_3_in_50_gib(load, page_size, tokens):
    groups = groups_of(load("llama3_8b"), page_size=page_size)
    solved = solve(groups, nbytes=int(50.3 * GIB))
    assert solved.groups[0].tokens == tokens


@pytest.mark.parametrize(
    ("kv_dtype", "nbytes"), [("bfloat16", 70_272), ("float8_e4m3fn", 35_136)]
)
def test_deepseek_v3_keeps_one_latent_on_every_rank(load, kv_dtype, nbytes):
    groups = groups_of(load("deepseek_v3"), kv_dtype)
    for topology in (Topology(), Topology(8), Topology.nested(8, 8)):
        solved = solve(groups, topology)
        assert per_row(solved) == nbytes
        assert solved.terms[0].replicas == topology.tp


@pytest.mark.parametrize(("dcp", "nbytes"), [(1, 71_424), (8, 79_488)])
def test_deepseek_v3_with_one_layer_of_prediction(load, dcp, nbytes):
    loaded = load("deepseek_v3")
    draft = group_layers(loaded.spec.layer_specs("bfloat16")[:1], 64, domain="draft")
    solved = solve(groups_of(loaded), Topology(dcp=dcp), draft=draft)
    assert per_row(solved) == nbytes


def test_deepseek_v3_in_60_gib(load):
    solved = solve(groups_of(load("deepseek_v3")), nbytes=60 * GIB)
    assert solved.groups[0].tokens == 916_736


@pytest.mark.parametrize(
    ("kv_dtype", "latents", "keys"),
    [("float8_e4m3fn", 40_016, 8_052), ("bfloat16", 70_272, 8_052)],
)
def test_deepseek_v32_keeps_latents_and_index_keys(load, kv_dtype, latents, keys):
    solved = solve(groups_of(load("deepseek_v32"), kv_dtype), Topology(8))
    assert [t.bytes_per_token for t in solved.terms] == [latents, keys]
    assert [t.name for t in solved.terms] == ["target full kv", "target indexer kv"]


def test_deepseek_v32_in_60_gib(load):
    groups = groups_of(load("deepseek_v32"), "float8_e4m3fn")
    solved = solve(groups, nbytes=60 * GIB)
    assert [group.tokens for group in solved.groups] == [1_340_224] * 2


def test_padding_of_small_pages_is_a_claim_apart(load):
    # a scale of four bytes a token: a page of one token pads it to sixteen
    solved = solve(groups_of(load("deepseek_v32"), page_size=1))
    assert per_row(solved) == 78_324
    padding = [t.bytes_per_token for t in solved.terms if "padding" in t.name]
    assert padding == [61 * 12]


@pytest.mark.parametrize(
    ("name", "ratio", "nbytes"),
    [
        ("gemma3_27b", 1.0, 507_904),
        ("gemma3_27b", 0.8, Fraction("422707.2")),
        ("gemma3_27b", 0.5, 294_912),
        ("gemma3_27b", 0.25, 188_416),
        ("gemma3_27b", 0.1, Fraction("124518.4")),
        ("gpt_oss_120b", 1.0, 73_728),
        ("gpt_oss_120b", 0.8, Fraction("66355.2")),
        ("gpt_oss_120b", 0.25, 46_080),
        ("gpt_oss_120b", 0.1, Fraction("40550.4")),
    ],
)
def test_windows_cost_their_ratio_of_the_rows(load, name, ratio, nbytes):
    assert per_row(solve(groups_of(load(name)), window_ratio=ratio)) == nbytes


@pytest.mark.parametrize(
    ("name", "page_size", "ratio", "tokens"),
    [
        ("gemma3_27b", 1, 0.8, (101_606, 81_284)),
        ("gemma3_27b", 1, 0.25, (227_951, 56_987)),
        ("gemma3_27b", 1, 0.1, (344_926, 34_492)),
        ("gpt_oss_120b", 64, 0.8, (647_232, 517_760)),
        ("gpt_oss_120b", 64, 0.1, (1_059_136, 105_856)),
    ],
)
def test_windows_in_40_gib(load, name, page_size, ratio, tokens):
    groups = groups_of(load(name), page_size=page_size)
    solved = solve(groups, nbytes=40 * GIB, window_ratio=ratio)
    assert tuple(group.tokens for group in solved.groups) == tokens


@pytest.mark.parametrize(
    ("tp", "kv", "slot", "in_tokens"),
    [
        (1, 24_576, 77_266_944, 3_144),
        (2, 12_288, 38_633_472, 3_144),
        (4, 12_288, 19_316_736, 1_572),
        (8, 12_288, 9_658_368, 786),
    ],
)
def test_qwen3_next_has_a_state_a_sequence(load, tp, kv, slot, in_tokens):
    solved = solve(groups_of(load("qwen3_next")), Topology(tp))
    assert per_row(solved) == kv
    state = solved.groups[1]
    assert (state.payload_nbytes, state.page_nbytes) == (slot, slot)
    assert slot / kv == in_tokens


def test_qwen3_next_with_states_in_half_precision(load):
    loaded = load("qwen3_next", mamba_ssm_dtype="bfloat16")
    solved = solve(groups_of(loaded), Topology(4))
    assert solved.groups[1].payload_nbytes == 9_879_552


def test_kimi_linear_has_states_and_latents(load):
    solved = solve(groups_of(load("kimi_linear")))
    assert per_row(solved) == 8_064
    assert [g.layers for g in solved.groups] == [7, 20]
    assert solved.groups[1].payload_nbytes == 43_417_600


def test_a_larger_model_of_the_kimi_family_on_eight_ranks(load):
    full = [4 * i for i in range(1, 24)] + [93]
    linear = {
        "full_attn_layers": full,
        "kda_layers": sorted(set(range(1, 94)) - set(full)),
        "head_dim": 128,
        "num_heads": 96,
        "short_conv_kernel_size": 4,
    }
    facts = load("kimi_linear").spec.facts.plain()
    facts |= {"num_hidden_layers": 93, "linear_attn_config": linear}
    spec = cache_facts.read_facts(facts)
    solved = solve(group_layers(spec.layer_specs(), 64), Topology(8))
    assert per_row(solved) == 27_648
    assert solved.groups[1].payload_nbytes == 56_171_520


def test_a_preset_and_the_equal_config_json_say_the_same_layers(repo_root, tmp_path):
    for path in sorted((repo_root / "configs" / "models").glob("*.toml")):
        loaded = config.load(path, env={})
        if loaded.model.facts is None or loaded.model.seed is not None:
            continue
        source = tmp_path / "config.json"
        source.write_text(json.dumps(loaded.model.facts.plain()))
        other = cache_facts.read(source)
        assert other.layer_specs() == loaded.spec.layer_specs(), path
        assert loaded.budget().used_nbytes > 0
        assert "https://huggingface.co/" in path.read_text()


MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
}
GQA = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, ["model_type is None"]),
        ({"model_type": "mamba"}, ["model_type is 'mamba'"]),
        ({"model_type": 3}, ["model_type is 3"]),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": "512"},
            ["kv_lora_rank is '512'", "num_hidden_layers is missing"],
        ),
        (MLA | {"model_type": "deepseek_v32"}, ["index_head_dim is missing"]),
        (
            MLA | {"model_type": "deepseek_v32", "index_head_dim": 96},
            ["index_head_dim is 96, no multiple of 128"],
        ),
        (GQA | {"sliding_window": None}, ["sliding_window is missing"]),
        (GQA | {"layer_types": ["full_attention"]}, ["names 1 layers of 4"]),
        (GQA | {"layer_types": ["linear_attention"] * 4}, ["holds linear_attention"]),
        (GQA | {"layer_types": "full"}, ["layer_types is 'full', not a list"]),
        (
            {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 3},
            ["head_dim is missing"],
        ),
        (
            {
                "model_type": "mistral",
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "layer_types": ["sliding_attention"],
            },
            ["has windows and sliding_window is missing"],
        ),
        (
            MLA | {"model_type": "kimi_linear", "linear_attn_config": {"head_dim": 0}},
            ["linear_attn_config: head_dim is 0", "kda_layers is missing"],
        ),
        (
            GQA | {"num_key_value_heads": 2**31},
            ["num_key_value_heads is 2147483648, not an integer from 1 to 512"],
        ),
        (
            GQA | {"num_hidden_layers": 256, "num_key_value_heads": 257},
            ["256 layers of 257 heads are 65,792 in all, more than 65,536"],
        ),
        (
            GQA | {"num_hidden_layers": 513, "num_attention_heads": 10**30},
            ["num_hidden_layers is 513", "num_attention_heads is 1000000000000"],
        ),
    ],
)
def test_what_is_not_understood_is_refused_all_at_once(facts, said):
    with pytest.raises(errors.FormatMismatch) as refused:
        cache_facts.read_facts(facts)
    for part in said:
        assert part in str(refused.value)


def test_layers_that_are_neither_linear_nor_full_are_refused(load):
    facts = load("kimi_linear").spec.facts.plain()
    facts["num_hidden_layers"] = 28
    with pytest.raises(errors.FormatMismatch, match="not layers 1 to 28"):
        cache_facts.read_facts(facts)


@pytest.mark.parametrize(
    ("facts", "windows"),
    [
        (GQA, [8, None, 8, None]),
        (GQA | {"model_type": "gemma3_text"}, [8] * 4),
        (GQA | {"model_type": "gemma3", "sliding_window_pattern": 2}, [8, None] * 2),
        (GQA | {"model_type": "mistral"}, [8] * 4),
        (GQA | {"model_type": "mistral", "sliding_window": None}, [None] * 4),
        (GQA | {"model_type": "qwen2"}, [None] * 4),
        (
            GQA
            | {"model_type": "qwen3", "use_sliding_window": True}
            | {"max_window_layers": 3},
            [None, None, None, 8],
        ),
        (GQA | {"layer_types": ["full_attention"] * 4}, [None] * 4),
    ],
)
def test_each_family_says_which_layers_have_windows(facts, windows):
    layers = cache_facts.read_facts(facts).layer_specs()
    assert [layer.window for layer in layers] == windows


def test_patterns_count_layers_from_the_first(load):
    kinds_of = [layer.kind for layer in load("qwen3_next").spec.layer_specs()]
    assert kinds_of == (["state"] * 3 + ["gqa"]) * 12
    windows = [layer.window for layer in load("gemma3_27b").spec.layer_specs()]
    assert windows[:12] == ([1_024] * 5 + [None]) * 2
    assert windows[60:] == [1_024] * 2
    kimi = load("kimi_linear").spec.layer_specs()
    assert [x.index for x in kimi if x.kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]


def test_a_spec_is_called_as_it_was_asked_for():
    assert cache_facts.read_facts(MLA).name == "deepseek_v3"
    assert cache_facts.read_facts(MLA, "mine").name == "mine"


def test_index_keys_select_for_the_latent_of_their_layer():
    facts = MLA | {"model_type": "deepseek_v32", "index_head_dim": 128}
    latent, keys, *_ = cache_facts.read_facts(facts).layer_specs("float16")
    assert (latent.kind, keys.kind, latent.index) == ("mla", "indexer", keys.index)
    mixed = Rope(kind="hadamard")  # rows that are never moved to another place
    assert keys == kinds.indexer("layers.0.indexer", 0, dim=128, rope=mixed)


def test_a_model_that_no_engine_runs_is_planned_and_not_served(load):
    loaded = load("gpt_oss_120b")
    assert loaded.partition is None and loaded.weight_nbytes is None
    assert loaded.spec.max_position == 131_072
    with pytest.raises(errors.IncompatiblePlan, match="only plan"):
        config.Config(loaded.model, pool=config.PoolConfig(pages=9)).engine()
    with pytest.raises(errors.ConfigError, match="only the cache is known"):
        pool = config.PoolConfig(device_memory=GIB)
        config.Config(loaded.model, pool=pool).budget()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"source": " "},
        {"source": "x", "facts": GQA},
        {"source": "x", "seed": 1},
        {"seed": 1},
    ],
)
def test_exactly_one_of_source_and_facts_says_what_a_model_is(given):
    with pytest.raises(errors.ConfigError, match="a source or facts"):
        ModelConfig(**given)


def test_facts_say_the_dtype_of_their_cache():
    model = ModelConfig(facts=GQA | {"torch_dtype": "float16"})
    assert (model.cache_dtype(), model.weight_dtype()) == ("float16", "float16")
    assert ModelConfig(facts=GQA).cache_dtype() == "bfloat16"
    assert ModelConfig(facts=GQA, kv_dtype="float32").cache_dtype() == "float32"
