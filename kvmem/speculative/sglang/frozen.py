"""Frozen-KV drafting in SGLang: a draft that reads the target's keys and writes none.

A request of width topk is expanded to topk sequences of one token, so the state of the
draft's attention is max_batch * topk, and checked always; where it was max_batch, wider
drafts read past its end (#25545).

    route(SpecPlan("frozen_kv_mtp", topk=4, backends=Backends(decode="triton")))
    # Route(backend="triton", skip_prefill=True, sequences=32)
"""

import dataclasses
from typing import NamedTuple

from kvmem.speculative import capacity
from kvmem.speculative.plan import SpecPlan
from kvmem.speculative.sglang.words import listed, row

__all__ = ["GATES", "TREE_BACKENDS", "Route", "indptr_rows", "promoted", "route"]
__all__ += ["uses_graphs"]

TREE_BACKENDS = ("triton", "trtllm_mha")


class Route(NamedTuple):
    """How the draft attends.

    Args:
        backend: None: the draft runner's own.
        skip_prefill: whether the backend is built for decoding alone.
        sequences: of one token, that its state has room for.
    """

    backend: str | None
    skip_prefill: bool
    sequences: int


def route(plan: SpecPlan) -> Route:
    """Return how a frozen draft attends: a chain as its runner does, a tree by ours."""
    sequences = capacity.attention_rows(plan.max_batch, plan.width)
    if plan.is_linear:
        return Route(None, False, sequences)
    return Route(plan.backends.of_draft, True, sequences)


def indptr_rows(requests: int, topk: int) -> int:
    """Return the rows of the index pointers for a pool of `requests`."""
    return requests * topk + 1


def uses_graphs(plan: SpecPlan) -> bool:
    """Say whether the draft's steps are captured: on CUDA, where there are several."""
    return (plan.server.arch or "").startswith("sm") and (plan.steps or 1) > 1


def promoted(plan: SpecPlan) -> SpecPlan:
    """Return the plan as a server runs it: a draft made to read keys is frozen."""
    if plan.server.assistant and plan.algorithm in ("eagle", "mtp"):
        return dataclasses.replace(plan, algorithm="frozen_kv_mtp")
    return plan


GATES = (
    row(
        "frozen: trees by backend",
        applies=lambda plan: (
            promoted(plan).algorithm == "frozen_kv_mtp" and not plan.is_linear
        ),
        allows=lambda plan: plan.backends.of_draft in TREE_BACKENDS,
        asked=lambda plan: (
            f"frozen_kv_mtp with topk = {plan.topk} on "
            f"{plan.backends.of_draft or 'a backend that is not named'}"
        ),
        law="a request becomes topk sequences of one token, which two backends run",
        cure=f"Use topk = 1, or a draft backend of {listed(TREE_BACKENDS)}",
    ),
    row(
        "frozen: not by eagle3",
        applies=lambda plan: plan.server.assistant and plan.algorithm == "eagle3",
        allows=lambda plan: False,
        asked="eagle3 with a draft that reads the target's keys",
        law="eagle3 drafts from hidden features of three layers",
        cure="Use eagle or mtp, which become frozen_kv_mtp",
    ),
)
