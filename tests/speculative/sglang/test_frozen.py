"""Frozen-KV drafting as published: which widths run where, and room for them."""

import pytest

from kvmem.speculative import sglang

frozen = sglang.frozen


@pytest.mark.parametrize("backend", ["triton", "trtllm_mha", "fa3", "flashmla", None])
@pytest.mark.parametrize("topk", [None, 1, 2, 4])
def test_trees_run_on_two_backends_and_chains_on_any(broken, backend, topk):
    facts = {"algorithm": "frozen_kv_mtp", "topk": topk, "draft": backend}
    found = broken(**facts, pool_kind="split", page_size=64)
    runs = topk in (None, 1) or backend in ("triton", "trtllm_mha")
    assert found == (set() if runs else {"frozen: trees by backend"})


def test_an_unset_draft_backend_is_the_decode_one(broken, plan_of):
    facts = {"algorithm": "frozen_kv_mtp", "topk": 2, "pool_kind": "split"}
    assert broken(**facts, decode="triton") == set()
    assert broken(**facts, attention="triton") == set()
    assert broken(**facts, attention="triton", decode="fa3") == {
        "frozen: trees by backend"
    }
    found = frozen.route(plan_of(**facts, decode="triton", max_batch=3))
    assert found == ("triton", True, 6)


@pytest.mark.parametrize("max_batch", [1, 8, 48])
@pytest.mark.parametrize("topk", [1, 2, 8])
def test_the_draft_attends_for_topk_sequences_a_request(plan_of, max_batch, topk):
    plan = plan_of(
        algorithm="frozen_kv_mtp", topk=topk, max_batch=max_batch, draft="triton"
    )
    found = frozen.route(plan)
    assert found.sequences == max_batch * topk
    assert found.skip_prefill == (topk > 1)
    assert found.backend == (None if topk == 1 else "triton")
    assert frozen.indptr_rows(100, topk) == 100 * topk + 1


def test_a_draft_made_to_read_keys_is_frozen_unless_it_is_eagle3(broken, plan_of):
    for algorithm, runs in (("eagle", "frozen_kv_mtp"), ("mtp", "frozen_kv_mtp")):
        plan = plan_of(algorithm=algorithm, assistant=True)
        assert frozen.promoted(plan).algorithm == runs
        plain = plan_of(algorithm=algorithm)
        assert frozen.promoted(plain) is plain
    assert broken(algorithm="eagle3", assistant=True, pool_kind="split") == {
        "frozen: not by eagle3"
    }


def test_the_rule_of_eagle_about_trtllm_mha_is_not_that_of_frozen_drafts(broken):
    facts = {
        "topk": 2,
        "page_size": 64,
        "pool_kind": "split",
        "attention": "trtllm_mha",
    }
    assert broken(algorithm="frozen_kv_mtp", **facts) == set()
    assert broken(algorithm="mtp", assistant=True, **facts) == set()
    assert "eagle: chains on trtllm_mha" in broken(algorithm="mtp", **facts)


@pytest.mark.parametrize(
    ("arch", "steps", "captured"),
    [("sm90", 3, True), ("sm100", 1, False), ("rocm", 3, False), (None, 3, False)],
)
def test_steps_are_captured_on_cuda_where_there_are_several(
    plan_of, arch, steps, captured
):
    plan = plan_of(algorithm="frozen_kv_mtp", steps=steps, arch=arch)
    assert frozen.uses_graphs(plan) == captured
