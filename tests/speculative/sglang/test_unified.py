"""SGLang's unified memory, row by row as published, and one change that flips a row."""

import pytest

from kvmem.speculative.sglang.unified import GATES

GOOD = {"pool_kind": "unified", "model_kind": "state"}
LATENT = GOOD | {"is_latent": True}
SPARK = GOOD | {"algorithm": "dspark"}
SENT = LATENT | {"role": "prefill", "transfer": "mooncake", "radix": False}
SHARDS = LATENT | {"dcp": 8, "decode": "flashinfer"}

ROWS = [  # gate, facts that it allows, a change that it refuses
    ("hybrid models", GOOD, {"model_kind": "dense"}),
    ("no compressed rows", GOOD, {"model_kind": "compressed"}),
    ("no latents with windows", LATENT, {"model_kind": "window"}),
    ("no latents with windows", LATENT, {"model_kind": "window_state"}),
    ("keys as wide as values", GOOD, {"equal_dims": False}),
    *(
        ("drafts", GOOD, {"algorithm": name})
        for name in ("eagle", "eagle3", "mtp", "standalone", "frozen_kv_mtp")
    ),
    ("drafts", GOOD, {"algorithm": "dflash"}),
    ("drafts", GOOD, {"algorithm": "ngram"}),
    ("dspark on states", SPARK, {"model_kind": "window"}),
    ("dspark on states", SPARK, {"model_kind": "window_state"}),
    ("linear chain", SPARK | {"topk": 1}, {"topk": 2}),
    ("linear chain", GOOD, {"topk": 4}),
    ("dspark target backends", SPARK | {"attention": "fa3"}, {"prefill": "fa4"}),
    ("dspark target backends", SPARK | {"attention": "fa3"}, {"decode": "fa4"}),
    ("dspark draft backend", SPARK | {"draft": "triton"}, {"draft": "trtllm_mha"}),
    ("dspark draft backend", SPARK | {"decode": "triton"}, {"decode": "fa4"}),
    ("backends without a draft", GOOD | {"attention": "fa4"}, {"decode": "flashmla"}),
    (
        "backends without a draft",
        LATENT | {"attention": "flashmla"},
        {"attention": "cutlass_mla"},
    ),
    ("linear decode", GOOD | {"linear_decode": "triton"}, {"linear_decode": "helion"}),
    (
        "linear decode",
        LATENT | {"linear_decode": "helion"},
        {"linear_decode": "flashkda"},
    ),
    (
        "linear prefill",
        GOOD | {"linear_prefill": "flashkda"},
        {"linear_prefill": "cutedsl"},
    ),
    (
        "linear prefill",
        LATENT | {"linear_prefill": "cutedsl"},
        {"linear_prefill": "flashinfer"},
    ),
    ("kernels of states", GOOD | {"states": "triton"}, {"states": "flashinfer"}),
    ("no ring of states", GOOD, {"ring_states": True}),
    ("prefill graph", GOOD | {"prefill_graph": "off"}, {"prefill_graph": "on"}),
    ("no host cache", GOOD, {"host_cache": "hicache"}),
    ("no host cache", GOOD, {"host_cache": "lmcache"}),
    ("transfer", SENT, {"transfer": "nixl"}),
    ("one stage", SENT, {"pp": 2}),
    ("no sparse host copies", SENT, {"hisparse": True}),
    ("lazy compaction", SENT, {"compaction": "eager"}),
    ("dcp: latents", SHARDS, {"is_latent": False}),
    ("dcp: no windows", SHARDS, {"model_kind": "window_state"}),
    ("dcp: one server", SHARDS, {"role": "decode"}),
    ("dcp: backends", SHARDS, {"decode": "triton"}),
    ("dcp: backends", SHARDS | {"decode": "trtllm_mla"}, {"decode": "fa3"}),
]


def named(gate):
    return f"unified {gate}" if gate.startswith("dcp") else f"unified: {gate}"


@pytest.mark.parametrize(("gate", "facts", "change"), ROWS)
def test_each_row_allows_what_is_published_and_refuses_what_is_not(
    broken, gate, facts, change
):
    mine = {each.name for each in GATES}
    assert broken(**facts) & mine == set()
    assert named(gate) in broken(**facts | change)


def test_every_row_is_tested():
    assert {each.name for each in GATES} == {named(gate) for gate, _, _ in ROWS}


def test_static_pools_are_none_of_its_business(broken):
    mine = {each.name for each in GATES}
    for _, facts, change in ROWS:
        static = facts | change | {"pool_kind": "split"}
        assert broken(**static) & mine == set()


def test_eager_compaction_alone_and_graphs_by_default_are_allowed(broken):
    assert broken(**GOOD, compaction="eager") == set()
    assert broken(**GOOD, prefill_graph="default") == set()
    assert broken(**GOOD) == set()
