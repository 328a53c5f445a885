"""The table [speculative]: what it may say, and what plans and budgets make of it."""

import pytest

from kvmem import budget, config, errors
from kvmem.config import SpeculativeConfig
from kvmem.config.speculative import Algorithm, model_kind
from kvmem.geometry import group_layers, kinds
from kvmem.speculative import HOMES, check, draft_term, rules_kvmem

MODEL = "configs/models/smollm2.toml"
WINDOWS = "configs/models/gpt_oss_tiny.toml"


def make(repo_root, path, *overrides):
    return config.load(repo_root / path, list(overrides))


def test_its_algorithms_are_those_of_the_rules():
    assert Algorithm.__args__ == rules_kvmem.ALGORITHMS
    assert set(HOMES) == set(rules_kvmem.ALGORITHMS)


def test_the_table_is_strict(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(
        '[model]\nsource = "x"\n[speculative]\nalgorithm = "medusa"\ntopk = "2"\n'
        "draft_token = 4\n"
    )
    with pytest.raises(errors.ConfigError) as refused:
        config.load(path)
    said = str(refused.value)
    for part in ("medusa", "topk", "draft_token", "draft_tokens"):
        assert part in said


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        ({"algorithm": "ngram", "layers": 2}, "speculative.layers"),
        ({"algorithm": "ngram", "seed": 2}, "speculative.seed"),
        ({"algorithm": "frozen_kv", "weights": "x"}, "speculative.weights"),
        ({"algorithm": "mtp", "max_match": 3}, "speculative.max_match"),
        ({"min_match": 3}, "speculative.min_match"),
        ({"algorithm": "ngram", "acceptance": "rejection"}, "speculative.acceptance"),
        ({"algorithm": "mtp", "weights": "x", "seed": 1}, "weights and a seed"),
        ({"algorithm": "ngram", "min_match": 4, "max_match": 3}, "min_match = 4"),
        ({"algorithm": "ngram", "topk": 0}, "topk = 0"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(facts, key):
    with pytest.raises(errors.ConfigError, match=key):
        SpeculativeConfig(**facts)


def test_a_seed_below_zero_is_refused_before_anything_is_drawn():
    with pytest.raises(errors.ConfigError, match="speculative.seed = -1"):
        SpeculativeConfig("mtp", seed=-1)
    assert SpeculativeConfig("mtp", seed=0).seed == 0


def test_pages_that_draft_layers_share_are_not_certified(repo_root):
    made = make(repo_root, MODEL, "speculative.algorithm=mtp", "pool.certified=true")
    with pytest.raises(errors.IncompatiblePlan, match="one group of full attention"):
        made.engine()


def test_a_longer_shortest_match_alone_is_a_setting():
    assert SpeculativeConfig("ngram", min_match=4).min_match == 4


def test_facts_of_the_engine_reach_the_plan(repo_root):
    made = make(
        repo_root,
        MODEL,
        *("speculative.algorithm=frozen_kv", "speculative.topk=2"),
        *("speculative.steps=3", "serve.max_batch=5", "pool.page_size=8"),
        *("topology.tp=3", "pool.kind=split", "serve.max_length=512"),
    )
    plan = made.spec_plan()
    assert (plan.algorithm, plan.topk, plan.steps, plan.num_drafted) == (
        *("frozen_kv", 2, 3, 6),
    )
    assert (plan.max_batch, plan.page_size, plan.tp, plan.pool_kind) == (
        *(5, 8, 3, "split"),
    )
    assert (plan.max_length, plan.model_kind) == (512, "dense")
    assert check(plan) == ()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt_oss_tiny", "window"),
        ("gemma3_tiny", "window"),
        ("qwen3_next_tiny", "state"),
        ("deepseek_v32_tiny", "dense"),
    ],
)
def test_the_kind_of_a_model_is_that_of_its_groups(repo_root, name, kind):
    made = make(repo_root, f"configs/models/{name}.toml")
    assert made.spec_plan().model_kind == kind


def test_a_model_of_windows_and_states_is_both():
    net = kinds.kda("s", 0, heads=2, head_dim=8, conv_kernel=4)
    latent = kinds.latent("w", 1, rank=8, rope_dim=8, scale=1.0, window=4)
    assert model_kind(group_layers([net, latent], 4)) == "window_state"
    assert model_kind(()) == "dense"


@pytest.mark.parametrize("algorithm", ["ngram", "frozen_kv"])
def test_who_keeps_nothing_adds_no_pages_and_owes_only_what_is_verified(
    repo_root, algorithm
):
    plain = make(repo_root, MODEL).budget()
    made = make(repo_root, MODEL, f"speculative.algorithm={algorithm}")
    solved = made.budget()
    assert made.draft_groups() == ()
    assert [term.name for term in solved.terms] == ["target kv", "verify logits"]
    assert solved.draft_pages == 0
    rows = made.serve.max_batch * 5
    assert solved.fixed_nbytes == rows * 4 * 49_152
    assert solved.used_nbytes <= plain.limit.nbytes


@pytest.mark.parametrize("algorithm", ["two_engine", "dflash", "dspark"])
@pytest.mark.parametrize("dcp", [1, 2])
def test_a_draft_with_its_own_pool_is_in_the_budget(repo_root, algorithm, dcp):
    settings = (f"speculative.algorithm={algorithm}", "speculative.layers=2")
    made = make(repo_root, MODEL, *settings, f"topology.dcp={dcp}")
    solved, groups = made.budget(), made.draft_groups()
    term = draft_term(made.spec_plan(), groups, made.topology, made.pool.order)
    assert sum(len(group.layers) for group in groups) == 2
    assert all(group.domain == "draft" for group in groups)
    lead = solved.pools[0].pages
    assert solved.draft_pages == lead * dcp
    taken = solved.draft_pages * solved.draft_page_nbytes
    assert taken == term.at(lead * made.pool.page_size)
    assert solved.used_nbytes <= solved.limit.nbytes


def test_one_engine_shares_the_pool_of_the_target(repo_root):
    made = make(repo_root, MODEL, "speculative.algorithm=mtp")
    solved = made.budget()
    assert [group.domain for group in solved.groups] == ["target", "draft"]
    assert (solved.draft_pages, len(solved.pools)) == (0, 1)
    assert made.manager().name == "grouped"


def test_how_many_layers_draft(repo_root):
    for algorithm, layers in (("two_engine", 15), ("mtp", 1), ("dspark", 1)):
        made = make(repo_root, MODEL, f"speculative.algorithm={algorithm}")
        assert sum(len(group.layers) for group in made.draft_groups()) == layers
    assert SpeculativeConfig("frozen_kv").num_layers(31) == 16
    assert SpeculativeConfig("frozen_kv", layers=4).num_layers(31) == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("algorithm=dspark", "draft"), "brings its own"),
        (("algorithm=two_engine", "layers=2", "draft"), r"layers = 2 beside \[draft\]"),
        (("algorithm=two_engine", "layers=31"), "layers = 31 of 30"),
    ],
)
def test_a_drafts_layers_come_from_one_place(repo_root, llama_config, overrides, said):
    given = [f"speculative.{each}" for each in overrides if each != "draft"]
    if "draft" in overrides:
        given.append(f"draft.source={llama_config('draft')}")
    with pytest.raises(errors.ConfigError, match=said):
        make(repo_root, MODEL, *given).draft_groups()


def test_a_model_of_its_own_drafts_in_an_engine_of_its_own(repo_root, llama_config):
    source = llama_config("draft", num_hidden_layers=2)
    given = ("speculative.algorithm=two_engine", f"draft.source={source}")
    made = make(repo_root, MODEL, *given)
    (group,) = made.draft_groups()
    assert len(group.layers) == 2
    assert made.budget().draft_pages == made.budget().groups[0].pages


@pytest.mark.case("CFG-03")
@pytest.mark.parametrize("engines", ["none", "one", "two"])
@pytest.mark.parametrize("requested", [None, "auto", "grouped", "static_split"])
def test_the_manager_follows_from_who_drafts(repo_root, engines, requested):
    """As TensorRT-LLM documents it; a model that prefers grouped pages."""
    given = [] if requested is None else [f"pool.manager={requested}"]
    drafts = {"none": None, "one": "mtp", "two": "two_engine"}[engines]
    given += [] if drafts is None else [f"speculative.algorithm={drafts}"]
    made = make(repo_root, WINDOWS, *given)
    if requested == "grouped" and engines == "two":
        with pytest.raises(errors.IncompatiblePlan, match="an engine of its own"):
            made.manager()
        return
    found = made.manager()
    wanted = "grouped" if engines != "two" else "static_split"
    assert found.name == ("static_split" if requested == "static_split" else wanted)
    assert found.reason
    assert found.is_fallback == (engines == "two" and requested in (None, "auto"))


@pytest.mark.case("BUD-03")
def test_what_a_verification_owes_is_paid_before_the_first_page(repo_root):
    rows = 8 * 9
    owed = rows * 4 * 49_152
    settings = ("speculative.algorithm=ngram", "speculative.draft_tokens=8")
    page = 737_280
    made = make(repo_root, MODEL, *settings, f"pool.memory={owed + 5 * page + 1}")
    solved = made.budget()
    assert (solved.fixed_nbytes, solved.groups[0].pages) == (owed, 5)
    small = make(repo_root, MODEL, *settings, f"pool.memory={owed + page - 1}")
    with pytest.raises(errors.OutOfPages, match=f"one page.*{owed:,} B owed"):
        small.budget()


def test_windows_have_pages_for_what_a_verification_writes(repo_root):
    """A step that verifies more than a prefill chunk writes sizes the windows."""
    settings = ("serve.prefill_chunk=4", "serve.max_batch=2")
    path = WINDOWS
    plain = make(repo_root, path, *settings)
    drafting = ("speculative.algorithm=ngram", "speculative.draft_tokens=40")
    made = make(repo_root, path, *settings, *drafting)
    window, wider = (each.budget().groups[1] for each in (plain, made))
    assert window.lifecycle.startswith("window")
    assert wider.pages > window.pages
    limits = made.pool.limits(made.topology, None)
    asked = {"sequences": 2, "max_length": made.serve.max_length, "step": 41}
    direct = budget.solve(made.groups(), made.topology, limits, **asked)
    assert wider.pages == direct.groups[1].pages


def test_an_engine_refuses_every_gate_that_a_plan_breaks(repo_root):
    made = make(repo_root, MODEL, "speculative.algorithm=mtp", "speculative.topk=2")
    with pytest.raises(errors.IncompatiblePlan) as refused:
        made.engine()
    for each in check(made.spec_plan()):
        assert each.advice.law in str(refused.value)
