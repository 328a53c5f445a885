"""Replicas: do all holders of a head keep the bytes that its writer exported?

Other systems take it for granted. Here each rank that shares bytes is exported by
itself and its part compared with the records; the law is one answer from all, and what
differs is named: layer, head, field, token, and the ranks.

    verify(export, plan, window, records)    # export(out, rank=3) fills out from rank 3
"""

from typing import Protocol

import numpy as np

from kvmem import errors
from kvmem.canonical.judge import Objection, judge
from kvmem.canonical.plan import CopyPlan
from kvmem.transfer.window import Window

__all__ = ["ExportFn", "verify"]


class ExportFn(Protocol):
    """An executor's export of some pages, bound to them."""

    def __call__(self, records: np.ndarray, *, rank: int | None = None) -> None:
        """Fill u8[num_tokens, record] with what writers, or one rank, hold."""


def verify(
    export: ExportFn, plan: CopyPlan, window: Window, records: np.ndarray
) -> None:
    """Compare the bytes of every replica with the elected ones, rank by rank.

    Raises:
        CorruptPage: holders differ; the first of them and the place are named.
    """
    seen = np.empty_like(records)
    for rank in plan.replicated:
        export(seen, rank=rank)
        merged = np.where(_held(plan, rank, window), seen, records)
        objections = judge(records, merged, plan.group, window.first_token)
        if objections:
            raise errors.CorruptPage(
                errors.say(
                    f"verify_replicas: rank {rank} differs from "
                    f"ranks {_other_holders(plan, rank, objections[0])}",
                    f"all holders of a head keep equal bytes; {objections[0]}, and "
                    f"{len(objections) - 1} more fields",
                    "Compute these tokens again on every rank",
                )
            )


def _held(plan: CopyPlan, rank: int, window: Window) -> np.ndarray:
    """Return bool[num_tokens, record]: the bytes that `rank` holds."""
    _, canonical = plan.units_of(plan.runs[rank])
    units = plan.record_nbytes // plan.unit_nbytes
    held = np.zeros(plan.page_tokens * units, bool)
    held[canonical] = True
    tokens = np.arange(window.first_token, window.stop_token) % plan.page_tokens
    return np.repeat(held.reshape(-1, units)[tokens], plan.unit_nbytes, axis=1)


def _other_holders(plan: CopyPlan, rank: int, found: Objection) -> list[int]:
    (field,) = (
        f for f in plan.group.fields if (f.layer, f.name) == (found.layer, found.field)
    )
    holders = plan.topology.holders(field, found.head)
    shards = {plan.topology.dcp_index(rank)}
    if plan.group.is_replicated:  # every token shard keeps the whole of it
        shards = set(range(plan.topology.dcp))
    return [r for r in holders if r != rank and plan.topology.dcp_index(r) in shards]
