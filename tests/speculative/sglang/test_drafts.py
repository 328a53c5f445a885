"""SGLang's rules of drafting on static pools, row by row as published."""

import pytest

from kvmem.speculative.sglang.drafts import GATES

TREE = {"algorithm": "eagle", "topk": 4, "page_size": 16}
FLASH = {"algorithm": "dflash"}
PARALLEL = {"algorithm": "dspark", "dp": 4, "dp_lm_head": True}
HALF = {"algorithm": "eagle", "role": "decode", "radix": False, "topk": 4, "steps": 4}
SHARDS = {"host_cache": "hicache", "dcp": 2, "is_latent": True}

ROWS = [  # gate, facts that it allows, a change that it refuses
    ("known algorithm", {"algorithm": "ngram"}, {"algorithm": "medusa"}),
    ("known algorithm", {"algorithm": "ngram"}, {"algorithm": "two_engine"}),
    *(
        ("trees on pages", TREE | {"attention": name}, {"attention": "fa4"})
        for name in ("flashinfer", "fa3", "triton")
    ),
    ("trees on pages", TREE | {"attention": "fa4", "page_size": 1}, {"page_size": 16}),
    ("trees on pages", TREE | {"attention": "fa4", "topk": 1}, {"topk": 2}),
    (
        "trees on pages",
        TREE | {"algorithm": "ngram", "attention": "flashinfer"},
        {"attention": "fa3"},
    ),
    (
        "eagle: chains on trtllm_mha",
        TREE | {"attention": "trtllm_mha", "topk": 1},
        {"topk": 2},
    ),
    (
        "eagle: length of a chain",
        {"algorithm": "eagle", "topk": 1, "steps": 3, "draft_tokens": 4},
        {"draft_tokens": 5},
    ),
    (
        "dspark: length of a chain",
        {"algorithm": "dspark", "draft_tokens": 2},
        {"draft_tokens": 1},
    ),
    (
        "width of a request's row",
        {"algorithm": "eagle", "steps": 3, "draft_tokens": 4, "row_width": 23},
        {"row_width": 22},
    ),
    ("dflash: no dp attention", FLASH, {"dp": 2}),
    ("dflash: one stage", FLASH, {"pp": 2}),
    ("dflash: one step", FLASH | {"steps": 1, "topk": 1}, {"steps": 2}),
    ("dflash: one step", FLASH, {"topk": 2}),
    ("dflash: window over the block", FLASH | {"draft_window": 16}, {"block": 17}),
    (
        "dflash: window over the block",
        FLASH | {"draft_window": 16},
        {"draft_window": 9},
    ),
    (
        "dflash: trtllm_mha drafts",
        FLASH | {"draft": "trtllm_mha", "draft_causal": True},
        {"draft_causal": False},
    ),
    (
        "dflash: trtllm_mha drafts",
        FLASH
        | {"draft": "trtllm_mha", "draft_causal": False, "draft_all_windows": True},
        {"draft_all_windows": False},
    ),
    ("dspark: one stage", {"algorithm": "dspark"}, {"pp": 2}),
    ("dspark: dp attention", PARALLEL, {"dp_lm_head": False}),
    ("dspark: dp attention", PARALLEL, {"a2a": "deepep"}),
    ("dspark: dp attention", PARALLEL, {"cp": 2}),
    ("no dp attention", {"algorithm": "standalone"}, {"dp": 2}),
    ("no dp attention", {"algorithm": "ngram"}, {"dp": 2}),
    ("prefixes of a decode server", HALF, {"radix": True}),
    ("drafts sent to a decode server", HALF, {"steps": 5}),
    ("host cache over token shards", SHARDS, {"is_latent": False}),
    ("host cache over token shards", SHARDS, {"storage": True}),
    (
        "host cache over token shards",
        SHARDS | {"algorithm": "dspark"},
        {"algorithm": "mtp"},
    ),
    (
        "mla kernels of Blackwell",
        {"decode": "trtllm_mla", "arch": "sm100", "is_latent": True},
        {"arch": "sm90"},
    ),
    (
        "tokenspeed_mla: fp8",
        {"decode": "tokenspeed_mla", "kv_dtype": "float8_e4m3fn"},
        {"kv_dtype": "bfloat16"},
    ),
    ("cutedsl_mla: decode", {"attention": "cutedsl_mla"}, {"prefill": "cutedsl_mla"}),
]


@pytest.mark.parametrize(("gate", "facts", "change"), ROWS)
def test_each_row_allows_what_is_published_and_refuses_what_is_not(
    broken, gate, facts, change
):
    mine = {each.name for each in GATES}
    assert broken(**{"pool_kind": "split"} | facts) & mine == set()
    assert gate in broken(**{"pool_kind": "split"} | facts | change)


def test_every_row_is_tested():
    assert {each.name for each in GATES} == {gate for gate, _, _ in ROWS}


def test_without_a_draft_none_of_them_speaks(broken):
    mine = {each.name for each in GATES}
    assert broken(pool_kind="split", dp=8, pp=2, role="decode") & mine == set()
