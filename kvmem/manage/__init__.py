"""Who may take how many pages: quotas, admission, shortage, and which manager.

Pure functions and frozen records about numbers; pages and bytes are the pool's. The
law: what is granted is granted whole, over every group and domain, and all grants
together never exceed what the manager was given.

    manager = manage.grouped(members, nbytes)
    manage.admit(manager, room, needs)
"""

from kvmem.budget.members import Member, members_of
from kvmem.manage import demand, sizing
from kvmem.manage.admission import (
    Admission,
    Room,
    Shortage,
    admit,
    give_back,
    take_all,
    unused,
)
from kvmem.manage.demand import Batch, Row, rows_floor
from kvmem.manage.divide import divide
from kvmem.manage.grouped import grouped
from kvmem.manage.manager import Manager, Quota, as_built, key_of, need, peak
from kvmem.manage.owners import Claims, reserve
from kvmem.manage.rebalance import (
    Due,
    Knobs,
    Observed,
    Resize,
    dues,
    is_due,
    needs_adjustment,
    observe,
    retarget,
    steps,
)
from kvmem.manage.select import (
    MANAGERS,
    Plan,
    Route,
    Selection,
    preference_of,
    select,
)
from kvmem.manage.shortage import (
    Evictions,
    beyond_shares,
    evictions,
    granted_at_most,
    least_tokens,
)
from kvmem.manage.static_split import static_split

__all__ = [
    "MANAGERS",
    "Admission",
    "Batch",
    "Claims",
    "Due",
    "Evictions",
    "Knobs",
    "Manager",
    "Member",
    "Observed",
    "Plan",
    "Quota",
    "Resize",
    "Room",
    "Route",
    "Row",
    "Selection",
    "Shortage",
    "admit",
    "as_built",
    "beyond_shares",
    "demand",
    "divide",
    "dues",
    "evictions",
    "give_back",
    "granted_at_most",
    "grouped",
    "is_due",
    "key_of",
    "least_tokens",
    "members_of",
    "need",
    "needs_adjustment",
    "observe",
    "peak",
    "preference_of",
    "reserve",
    "retarget",
    "rows_floor",
    "select",
    "sizing",
    "static_split",
    "steps",
    "take_all",
    "unused",
]
