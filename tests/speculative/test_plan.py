"""Plans: facts that mean something, widths and lengths that follow from them."""

import dataclasses

import pytest

from kvmem import errors
from kvmem.speculative import STEPS, Backends, Server, SpecPlan


@pytest.mark.parametrize(
    ("facts", "drafted"),
    [
        ({}, 0),
        ({"algorithm": "mtp"}, STEPS),
        ({"algorithm": "mtp", "steps": 3}, 3),
        ({"algorithm": "mtp", "topk": 1, "steps": 3}, 3),
        ({"algorithm": "frozen_kv", "topk": 2, "steps": 3}, 6),
        ({"algorithm": "dflash", "draft_tokens": 7}, 7),
        ({"topk": 4, "steps": 3}, 0),
    ],
)
def test_what_is_drafted_and_verified(facts, drafted):
    plan = SpecPlan(**facts)
    assert (plan.num_drafted, plan.num_verified) == (drafted, drafted + 1)


def test_a_plan_is_a_fact():
    plan = SpecPlan("mtp", steps=2, server=Server(pp=2), backends=Backends("fa3"))
    assert hash(plan) == hash(dataclasses.replace(plan))
    assert plan != dataclasses.replace(plan, steps=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.topk = 2


@pytest.mark.parametrize("topk", [None, 1, 2])
def test_a_chain_is_linear_and_a_tree_is_not(topk):
    plan = SpecPlan("mtp", topk)
    assert plan.is_linear == (topk != 2)
    assert plan.width == (2 if topk == 2 else 1)


@pytest.mark.parametrize(
    ("kind", "windows", "states"),
    [
        ("dense", False, False),
        ("window", True, False),
        ("state", False, True),
        ("window_state", True, True),
        ("compressed", False, False),
    ],
)
def test_what_a_model_keeps_follows_from_its_kind(kind, windows, states):
    plan = SpecPlan(model_kind=kind)
    assert (plan.has_windows, plan.has_states) == (windows, states)


def test_counts_that_count_nothing_are_refused_together():
    with pytest.raises(errors.ConfigError) as refused:
        SpecPlan("mtp", topk=0, steps=-1, page_size=True, max_batch=2.0)
    said = str(refused.value)
    for part in ("topk = 0", "steps = -1", "page_size = True", "max_batch = 2.0"):
        assert part in said
    with pytest.raises(errors.ConfigError, match="server.pp = 0"):
        Server(pp=0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SpecPlan(pool_kind="joint"), "pool_kind"),
        (lambda: SpecPlan(model_kind="moe"), "model_kind"),
        (lambda: Server(role="both"), "server.role"),
        (lambda: Server(compaction="never"), "server.compaction"),
        (lambda: Server(prefill_graph="yes"), "server.prefill_graph"),
    ],
)
def test_a_kind_that_is_not_known_is_refused_with_those_that_are(make, name):
    with pytest.raises(errors.ConfigError, match=f"{name} = .*Use one of"):
        make()


def test_backends_are_inherited_by_role():
    named = Backends(attention="fa3", decode="triton")
    assert (named.of_prefill, named.of_decode, named.of_draft) == (
        "fa3",
        "triton",
        "triton",
    )
    assert named.by_role == {"target": "fa3", "decode": "triton"}
    first = Backends(attention="fa3", prefill="fa4")  # decode is still fa3's
    assert first.by_role == {"target": "fa3", "prefill": "fa4"}
    both = Backends(attention="fa3", prefill="fa4", decode="triton", draft="flashmla")
    assert both.of_draft == "flashmla"
    assert both.by_role == {"prefill": "fa4", "decode": "triton", "draft": "flashmla"}
    assert Backends().by_role == {} and Backends().of_draft is None
