"""The budget: bytes to pages, with every claim named.

The law: the claims of all owners, padding and draft included, never exceed the smallest
limit; and whoever builds a pool takes its size from here. `solve` pays what is owed
before the first page (states, workspaces), divides the rest, rounds down to whole
pages, and keeps the arithmetic so that `kvmem plan` can explain it.

    solve(groups, Topology(tp=3), [limit("memory", 1 << 30)]).groups[0].pages

With decode context parallelism a rank keeps every dcp-th token of the target, and all
tokens of the draft, so

    bytes for one row of the target pool = target + draft * dcp

with the target term equal at every dcp. Rules of another stack, for those who plan one,
are in `kvmem.budget.shared` and `kvmem.budget.sglang`.
"""

from kvmem.budget import sglang, shared
from kvmem.budget.claims import Claim, host_term, require_room
from kvmem.budget.limits import (
    Limit,
    device_limit,
    fraction_limit,
    limit,
    rank_limit,
    total_limit,
    uneven_limits,
)
from kvmem.budget.pages import Budget, GroupPages, Padding, PoolPages
from kvmem.budget.shared import SubPool, shared_bytes
from kvmem.budget.solver import MAX_PAGES, solve
from kvmem.budget.split import Part, division, split_affine, token_bound

__all__ = [
    "MAX_PAGES",
    "Budget",
    "Claim",
    "GroupPages",
    "Limit",
    "Padding",
    "Part",
    "PoolPages",
    "SubPool",
    "device_limit",
    "division",
    "fraction_limit",
    "host_term",
    "limit",
    "rank_limit",
    "require_room",
    "sglang",
    "shared",
    "shared_bytes",
    "solve",
    "split_affine",
    "token_bound",
    "total_limit",
    "uneven_limits",
]
