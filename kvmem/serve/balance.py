"""Balance: the manager of an engine's pool, and how it follows the texts that come.

All groups draw from one pool, so a quota is no wall there: any group may hold any page.
What each has a share of is the cache. Cached texts are of use whole, so a group's share
is what a typical text keeps of it; what it keeps beyond that is the first to go when
pages are short (`room`). At first the typical text is the longest that may be served;
later it is as long as those that ended were, by the rule of `manage.rebalance`. A
static split has walls, which stay where they were put.

The law: shares change between two texts, never while one runs or waits; and what they
are, whence, and what every group holds of them is in the engine's stats.

    balance = of(groups, topology, order, budget, config)
    table = PageTable(ledger, cache, lives, balance.manager)
    balance.observe(sequence)          # it has ended
    balance.settle(table.room, 0)      # nothing holds pages: True where shares changed
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from kvmem import manage
from kvmem.budget import Budget
from kvmem.geometry import LifecycleGroup, Spread, Topology
from kvmem.manage import Batch, Knobs, Manager, Member, Observed, Row, Selection
from kvmem.serve.buckets import ServeConfig
from kvmem.serve.page_table import PageTable
from kvmem.serve.request import Sequence as Text
from kvmem.serve.room import Room

__all__ = ["Balance", "GroupStats", "ManagerStats", "of"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """One group's part of the pool now, in its own pages."""

    name: str
    quota: int  # the most that it may hold
    share: float  # of the cache
    due: int  # its share of the whole pool
    held: int  # by sequences and the cache
    cached: int  # of them, by the cache alone
    promised: int  # that running sequences will hold and do not yet


@dataclasses.dataclass(frozen=True)
class ManagerStats:
    """Which manager divides the pool, why, and what follows from it now.

    `provenance` is what a person wrote ("unset", "auto" or "explicit"); `is_fallback`
    says that the model prefers another manager. `observed` texts have ended, typically
    of `typical_length` tokens (None: none has); shares were `rebalanced` so often.
    """

    name: str
    reason: str
    provenance: str
    is_fallback: bool
    observed: int
    typical_length: int | None
    rebalanced: int
    groups: tuple[GroupStats, ...]


def of(
    groups: Sequence[LifecycleGroup],
    topology: Topology,
    order: str,
    budget: Budget,
    config: ServeConfig,
    selection: Selection | None = None,
    knobs: Knobs | None = None,
) -> "Balance":
    """Return the balance of an engine's one pool; log which manager it has, and why.

    Args:
        groups, topology, order: what the pool keeps.
        budget: divided by the manager already.
        config: the longest text, which is typical before any has ended.
        selection: of the manager; None: as the budget is divided.
        knobs: when shares are set anew; None: the usual ones.
    """
    (pool,) = budget.pools
    if selection is None:
        selection = _as_divided(budget)
    _log.log(
        logging.WARNING if selection.is_fallback else logging.INFO,
        "manager: %s (%s): %s",
        selection.name,
        selection.provenance,
        selection.reason,
    )
    keys = [manage.key_of(group) for group in groups]
    manager = manage.as_built(selection.name, keys, pool)
    if selection.name != "grouped" or len(groups) == 1:
        return Balance(selection, manager)
    members = [
        dataclasses.replace(each, group=_as_counted(each.group, topology))
        for each in manage.members_of(groups, topology, order, "unified")
    ]
    longest = Row(config.max_length - 1, config.max_length)
    shares = manage.demand.shares(members, typical=Batch((longest,)))
    return Balance(selection, manager.with_shares(shares), members, knobs or Knobs())


class Balance:
    """A manager, the texts that it has seen end, and when it last followed them.

    Args:
        selection: of the manager.
        manager: quotas and shares as they are.
        members: the groups that shares follow; (): they follow nothing.
        knobs: when shares are set anew.
        clock: seconds, for the time between two changes.
    """

    def __init__(
        self,
        selection: Selection,
        manager: Manager,
        members: Sequence[Member] = (),
        knobs: Knobs = Knobs(),  # noqa: B008
        clock: Callable[[], float] = time.monotonic,
    ):
        self.selection = selection
        self.manager = manager
        self.knobs = knobs
        self.seen = Observed()
        self.num_rebalanced = 0
        self._members = tuple(members)
        self._target: Manager | None = None
        self._clock = clock
        self._since = clock()

    def observe(self, text: Text) -> None:
        """Count a text that has just ended, while it still holds its pages."""
        if not self._members:
            return
        history = text.num_computed
        found = min(history, text.cached_tokens + text.stored_tokens)
        capacity = max(history, len(text.tokens))
        self.seen = manage.observe(
            self.seen, self.knobs, reused=found, history=history, capacity=capacity
        )
        if manage.is_due(self.seen, self.knobs):
            nbytes = self.manager.nbytes
            self._target = manage.retarget(self._members, nbytes, self.seen)

    def settle(self, room: Room, holding: int) -> bool:
        """Set shares anew if it is time; say whether they have changed.

        Args:
            room: of the pool, which goes by the shares from now on.
            holding: sequences that run or wait.

        Raises:
            Busy: it would be time, and a sequence runs or waits.
        """
        target, now = self._target, self._clock()
        if target is None or not manage.needs_adjustment(
            self.manager, target, self.seen, self.knobs, now - self._since
        ):
            return False
        manage.steps(self.manager, target, holding)  # groups of one pool: none
        for due in manage.dues(self.manager, target):
            _log.info("%s: due %d pages, before %d", due.group, due.after, due.before)
        self.manager = self.manager.with_shares([q.share for q in target.quotas])
        room.manager = self.manager
        self.num_rebalanced += 1
        self._since, self._target = now, None
        return True

    def stats(self, table: PageTable) -> ManagerStats:
        """Return the manager, why it was chosen, and what each group holds."""
        rows = zip(
            self.manager.quotas,
            table.room.left.held,
            table.books.num_alone,
            table.promised(),
            strict=True,
        )
        groups = tuple(
            GroupStats(
                name=quota.group,
                quota=quota.pages,
                share=quota.share,
                due=min(quota.pages, self.manager.due(index)),
                held=held,
                cached=cached,
                promised=promised,
            )
            for index, (quota, held, cached, promised) in enumerate(rows)
        )
        seen = self.seen
        return ManagerStats(
            **self.selection._asdict(),
            observed=seen.samples,
            typical_length=seen.row.capacity if seen.samples else None,
            rebalanced=self.num_rebalanced,
            groups=groups,
        )


def _as_counted(group: LifecycleGroup, topology: Topology) -> LifecycleGroup:
    """Return a group with the tokens of a page as tables count them, on all ranks."""
    return Spread.of(group, topology).virtual(group)


def _as_divided(budget: Budget) -> Selection:
    """Return the manager that a budget was divided by, where nobody says."""
    (pool,) = budget.pools
    sizes = zip(pool.num_vpages, pool.extents, strict=True)
    walls = any(count < pool.pages // extents for count, extents in sizes)
    name = "static_split" if walls else "grouped"
    said = "gives each group its own pages" if walls else "gives every group any page"
    return Selection(name, f"the budget {said}", "unset")
