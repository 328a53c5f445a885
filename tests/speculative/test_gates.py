"""Gates: every row is asked, all violations come together, whatever the plan."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem import errors
from kvmem.speculative import (
    MODEL_KINDS,
    POOL_KINDS,
    RULES,
    Advice,
    Backends,
    Gate,
    Server,
    SpecPlan,
    check,
    rules_kvmem,
    sglang,
    verdicts,
)
from kvmem.speculative.gates import judge

_COUNT = st.sampled_from([None, 1, 2, 4, 8])
_SIZE = st.sampled_from([1, 2, 8])
_BACKEND = st.sampled_from(
    [None, "triton", "fa3", "fa4", "flashinfer", "flashmla", "cutlass_mla"]
    + ["trtllm_mla", "trtllm_mha", "cutedsl_mla", "tokenspeed_mla", "hpc_ops"]
)
_FLAG = st.booleans()
_SERVERS = st.builds(
    Server,
    dp=_SIZE,
    pp=_SIZE,
    cp=_SIZE,
    role=st.sampled_from([None, "prefill", "decode"]),
    transfer=st.sampled_from([None, "mooncake", "nixl"]),
    host_cache=st.sampled_from([None, "hicache"]),
    compaction=st.sampled_from(["lazy", "eager"]),
    is_latent=_FLAG,
    equal_dims=_FLAG,
    radix=_FLAG,
    assistant=_FLAG,
    arch=st.sampled_from([None, "sm90", "sm100", "rocm"]),
    row_width=st.sampled_from([None, 4, 2_000]),
)
PLANS = st.builds(
    SpecPlan,
    algorithm=st.sampled_from([None, *rules_kvmem.ALGORITHMS, *sglang.ALGORITHMS, "x"]),
    topk=_COUNT,
    steps=_COUNT,
    draft_tokens=_COUNT,
    page_size=st.sampled_from([1, 16, 64, 128]),
    pool_kind=st.sampled_from(POOL_KINDS),
    model_kind=st.sampled_from(MODEL_KINDS),
    dcp=_SIZE,
    max_length=st.sampled_from([4, 2_048]),
    backends=st.builds(Backends, *[_BACKEND] * 4),
    server=st.one_of(st.just(Server()), _SERVERS),
)


@settings(max_examples=300)
@given(plan=PLANS, rules=st.sampled_from(tuple(RULES)))
def test_every_row_answers_every_plan_in_words(plan, rules):
    said = verdicts(plan, rules)
    assert [each.gate for each in said] == [gate.name for gate in RULES[rules]]
    assert {each.said for each in said} <= {"allowed", "refused", "silent"}
    broken = check(plan, rules)
    assert broken == tuple(v.violation for v in said if v.said == "refused")
    for each in broken:
        assert all(part and not part.isspace() for part in each.advice)
        assert str(each).startswith(f"{each.advice.asked} (rules of {rules}): ")
        assert str(each).endswith(".") and ".." not in str(each)[-3:]
    assert check(plan, rules) == broken


@settings(max_examples=200)
@given(plan=PLANS)
def test_a_chain_without_other_facts_runs_and_nothing_else_is_hidden(plan):
    """What kvmem allows: a known algorithm, and a chain or a tree where trees run."""
    allowed = not check(plan)
    plain = plan.backends == Backends() and plan.server == Server()
    if not allowed:
        return
    assert plain
    assert plan.algorithm in (None, *rules_kvmem.ALGORITHMS)
    if not plan.is_linear:
        assert (plan.pool_kind, plan.model_kind, plan.dcp) == ("split", "dense", 1)
        assert plan.algorithm == "frozen_kv"
    chain = dataclasses.replace(plan, pool_kind="unified")
    assert plan.is_linear == (not check(chain))


@settings(max_examples=200)
@given(plan=PLANS)
def test_a_page_size_that_is_resolved_is_read_by_every_backend(plan):
    found = sglang.allowed(plan)
    if not found.sizes:
        assert len(found.clash) == 2
        with pytest.raises(errors.IncompatiblePlan, match="no size in common"):
            sglang.resolve(plan)
        return
    size = sglang.resolve(plan)
    assert size in found.sizes
    settled = dataclasses.replace(plan, page_size=size)
    assert sglang.resolve(settled) == size
    gates = {each.gate for each in check(settled, "sglang")}
    assert "page size" not in gates


def test_names_are_unique_in_a_rule_set():
    for gates in RULES.values():
        names = [gate.name for gate in gates]
        assert len(set(names)) == len(names)


def test_rules_that_have_no_name_are_refused_with_those_that_have():
    with pytest.raises(errors.ConfigError, match="Use one of kvmem, sglang"):
        check(SpecPlan(), rules="vllm")


def test_a_row_that_does_not_apply_is_not_asked_what_it_allows():
    def never(plan):
        raise AssertionError("asked")

    advice = Advice("a", "b", "c")
    rows = (
        Gate("silent", lambda plan: False, never, never),
        Gate("allowed", lambda plan: True, lambda plan: True, never),
        Gate("refused", lambda plan: True, lambda plan: False, lambda plan: advice),
        Gate("also", lambda plan: True, lambda plan: False, lambda plan: advice),
    )
    said = judge(SpecPlan(), rows, "mine")
    assert [each.said for each in said] == ["silent", "allowed", "refused", "refused"]
    assert [v.violation.gate for v in said if v.violation] == ["refused", "also"]
    assert str(said[2].violation) == "a (rules of mine): b. c."
