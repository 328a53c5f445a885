"""The rule set "sglang": what a server of SGLang admits, reserves and charges.

For those who plan such a stack or move a deployment over: kvmem's engine does not ask
here. Facts are of its releases of August and September 2026, each row with its reason.

    check(SpecPlan("eagle", topk=4, pool_kind="unified"), rules="sglang")
"""

from kvmem.speculative.sglang import drafts, frozen, page_sizes, unified
from kvmem.speculative.sglang.page_sizes import allowed, resolve
from kvmem.speculative.sglang.reserve import (
    alloc_length,
    reserve_length,
    row_headroom,
)
from kvmem.speculative.sglang.terms import (
    attention_ranks,
    draft_cell,
    draft_pool_rows,
    draft_pool_shape,
    layer_ratio_cell,
    local_heads,
    replicated_rows,
    token_cell,
)
from kvmem.speculative.sglang.words import ALGORITHMS, NAME

__all__ = [
    "ALGORITHMS",
    "GATES",
    "NAME",
    "alloc_length",
    "allowed",
    "attention_ranks",
    "draft_cell",
    "draft_pool_rows",
    "draft_pool_shape",
    "frozen",
    "layer_ratio_cell",
    "local_heads",
    "page_sizes",
    "replicated_rows",
    "reserve_length",
    "resolve",
    "row_headroom",
    "token_cell",
]

GATES = (*drafts.GATES, *unified.GATES, *frozen.GATES, *page_sizes.GATES)
