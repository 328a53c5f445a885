"""The rule set "kvmem": what kvmem's own engine drafts.

A linear chain runs on a unified pool for a model of any kind: rejected rows are at the
end, so lengths, pages and states go back to where they were. Trees run on split pools
of full attention, where accepted rows are moved to consecutive slots token by token.
Law: each row that narrows this further names the test that would fail without it.

    check(SpecPlan("frozen_kv", topk=4, pool_kind="unified"))    # one violation
"""

import difflib
from typing import Literal, get_args

from kvmem.speculative.gates import Advice, Gate
from kvmem.speculative.plan import STEPS, Backends, Server, SpecPlan

__all__ = ["ALGORITHMS", "Algorithm", "GATES", "NAME", "ONE_PASS", "SHARED", "TREES"]

NAME = "kvmem"
Algorithm = Literal["ngram", "two_engine", "mtp", "dflash", "dspark", "frozen_kv"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
ONE_PASS = ("ngram", "dflash")  # propose all their tokens at once
TREES = ("frozen_kv",)  # a draft with rows of its own would have to move them too
SHARED = ("mtp",)  # groups of theirs stand in the target's manager

_HERE = "tests/speculative/test_rules_kvmem.py::"


def _is_tree(plan: SpecPlan) -> bool:
    return not plan.is_linear


def _unknown(plan: SpecPlan) -> Advice:
    near = difflib.get_close_matches(str(plan.algorithm), ALGORITHMS, n=1)
    meant = f"; {near[0]!r} is near" if near else ""
    return Advice(
        f"speculative.algorithm = {plan.algorithm!r}",
        f"drafts are proposed by {', '.join(ALGORITHMS)}{meant}",
        "Use one of them, or leave the algorithm out",
    )


def _unread(plan: SpecPlan) -> tuple[str, ...]:
    """Return the facts that say something to other rule sets and nothing to this."""
    found = []
    for owner, plain, name in (
        (plan.backends, Backends(), "backends"),
        (plan.server, Server(), "server"),
    ):
        found += [
            f"{name}.{fact}"
            for fact, value in vars(owner).items()
            if value != vars(plain)[fact]
        ]
    return tuple(found)


GATES = (
    Gate(
        "known algorithm",
        applies=lambda plan: plan.algorithm is not None,
        allows=lambda plan: plan.algorithm in ALGORITHMS,
        advice=_unknown,
        test=_HERE + "test_an_algorithm_of_another_stack_has_no_draft_term_here",
    ),
    Gate(
        "widths without a draft",
        applies=lambda plan: plan.algorithm is None,
        allows=lambda plan: not (plan.topk or plan.steps or plan.draft_tokens),
        advice=lambda plan: Advice(
            f"topk = {plan.topk}, steps = {plan.steps}, draft_tokens = "
            f"{plan.draft_tokens} without an algorithm",
            "they say how far a draft reaches, and nobody drafts",
            f"Name one of {', '.join(ALGORITHMS)}, or leave them out",
        ),
        test=_HERE + "test_without_an_algorithm_nothing_is_drafted",
    ),
    Gate(
        "chain on a unified pool",
        applies=lambda plan: plan.pool_kind == "unified",
        allows=lambda plan: plan.is_linear,
        advice=lambda plan: Advice(
            f"unified pool with speculative.topk = {plan.topk}",
            "a unified pool serves a linear draft chain only: its pages are moved "
            "whole, and the accepted rows of a tree are moved one by one",
            'Use topk = 1, or pool.kind = "split"',
        ),
        test=_HERE + "test_a_unified_pool_moves_pages_and_no_rows",
    ),
    Gate(
        "layers in the target's pool",
        applies=lambda plan: plan.algorithm in SHARED,
        allows=lambda plan: plan.pool_kind == "unified",
        advice=lambda plan: Advice(
            f"{plan.pool_kind} pools with {plan.algorithm!r}",
            "its layers take pages of the pool that the target's take theirs of, and "
            "an engine has one pool",
            'Use pool.kind = "unified", or "dspark", the same layers on pages of their '
            "own",
        ),
        test=_HERE + "test_layers_in_the_targets_pool_have_no_pool_of_their_own",
    ),
    Gate(
        "trees by algorithm",
        applies=_is_tree,
        allows=lambda plan: plan.algorithm in (None, *TREES),
        advice=lambda plan: Advice(
            f"speculative.topk = {plan.topk} with {plan.algorithm!r}",
            "a tree is drafted on the target's own pages: rows that a draft owns would "
            "have to be moved with those that are accepted",
            f"Use topk = 1, or one of {', '.join(TREES)}",
        ),
        test=_HERE + "test_a_draft_with_pages_has_one_row_a_position",
    ),
    Gate(
        "trees over full attention",
        applies=_is_tree,
        allows=lambda plan: plan.model_kind == "dense",
        advice=lambda plan: Advice(
            f"speculative.topk = {plan.topk} for a model of kind {plan.model_kind!r}",
            "branches of a tree share their positions: a state has no room for a "
            "second branch, and a window counts rows by position",
            "Use topk = 1, or a model of full attention",
        ),
        test=_HERE + "test_a_state_and_a_window_know_one_branch",
    ),
    Gate(
        "trees on one token shard",
        applies=_is_tree,
        allows=lambda plan: plan.dcp == 1,
        advice=lambda plan: Advice(
            f"speculative.topk = {plan.topk} with topology.dcp = {plan.dcp}",
            "the slot of a token names its rank, so an accepted row would have to "
            "cross to another one",
            "Use topk = 1, or topology.dcp = 1",
        ),
        test=_HERE + "test_an_accepted_row_would_cross_ranks",
    ),
    Gate(
        "length of a chain",
        applies=lambda plan: (
            plan.is_linear
            and plan.algorithm in ALGORITHMS
            and plan.algorithm not in ONE_PASS
            and None not in (plan.steps, plan.draft_tokens)
        ),
        allows=lambda plan: plan.steps == plan.draft_tokens,
        advice=lambda plan: Advice(
            f"speculative.steps = {plan.steps} with draft_tokens = {plan.draft_tokens}",
            f"a linear chain of {plan.algorithm} proposes one token a step",
            "Give one of the two, or both alike",
        ),
        test=_HERE + "test_a_chain_proposes_one_token_a_step",
    ),
    Gate(
        "one pass",
        applies=lambda plan: plan.algorithm in ONE_PASS,
        allows=lambda plan: plan.steps in (None, 1),
        advice=lambda plan: Advice(
            f"speculative.steps = {plan.steps} with {plan.algorithm!r}",
            "all its tokens are proposed in one pass",
            "Leave steps out, and give draft_tokens",
        ),
        test=_HERE + "test_one_pass_proposes_all_tokens",
    ),
    Gate(
        "size of a tree",
        applies=lambda plan: _is_tree(plan) and plan.draft_tokens is not None,
        allows=lambda plan: (
            plan.draft_tokens % plan.topk == 0
            and plan.steps in (None, plan.draft_tokens // plan.topk)
        ),
        advice=lambda plan: Advice(
            f"speculative.draft_tokens = {plan.draft_tokens} with topk = {plan.topk} "
            f"and steps = {plan.steps}",
            "a tree is topk chains of one length, which is its steps",
            f"Leave draft_tokens out: it is {plan.topk * (plan.steps or STEPS)}",
        ),
        test=_HERE + "test_a_tree_is_chains_of_one_length",
    ),
    Gate(
        "room for a draft",
        applies=lambda plan: plan.algorithm is not None,
        allows=lambda plan: plan.num_verified < plan.max_length,
        advice=lambda plan: Advice(
            f"{plan.num_drafted} tokens drafted for texts of at most "
            f"{plan.max_length} tokens",
            "a step that verifies writes the drafted rows and the sequence's own "
            "behind the text",
            "Draft fewer tokens, or raise serve.max_length",
        ),
        test=_HERE + "test_a_draft_longer_than_every_text_never_runs",
    ),
    Gate(
        "facts that are not read",
        applies=lambda plan: bool(_unread(plan)),
        allows=lambda plan: False,
        advice=lambda plan: Advice(
            ", ".join(_unread(plan)),
            "they are facts of another stack, and kvmem's engine has no such choice",
            "Leave them out, or ask another rule set",
        ),
        test=_HERE + "test_facts_that_are_not_read_are_named",
    ),
)
