"""The pool: which page is free, whose page is this, and the bytes themselves.

The law: `Pool` is bytes and books in one pytree; the verbs take it first and give it
back; `handout` is the only door off the free stack, and zeroes what passes through;
`compact` moves bytes and no virtual id; `Ledger` says the same on the host without
waiting; `check` names every law broken.

Lifecycle groups share the pages of one pool. One of their virtual pages lies in K
physical ones, wherever these are: K is 1, or more for a state larger than a page.

    pool = init(num_pages=1024, page_nbytes=4096)
    ledger = Ledger(num_pages=1024)
    vpages = ledger.handout(0, [2, 1], max_pages=4)
    pool, same_vpages, ok = handout(pool, 0, [2, 1], 4)
"""

from kvmem.pool import moves, table, tokens
from kvmem.pool.compaction import compact
from kvmem.pool.ids import as_host_ids, as_ids
from kvmem.pool.laws import check, checked
from kvmem.pool.ledger import Ledger
from kvmem.pool.state import POISON, GroupBooks, Pool, from_budget, init
from kvmem.pool.table import BlockTable, GroupTable
from kvmem.pool.verbs import (
    fork,
    handout,
    pin,
    release,
    retain,
    translate,
    translate_parts,
    unpin,
)

__all__ = [
    "POISON",
    "BlockTable",
    "GroupBooks",
    "GroupTable",
    "Ledger",
    "Pool",
    "as_host_ids",
    "as_ids",
    "check",
    "checked",
    "compact",
    "fork",
    "from_budget",
    "handout",
    "init",
    "moves",
    "pin",
    "release",
    "retain",
    "table",
    "tokens",
    "translate",
    "translate_parts",
    "unpin",
]
