"""Room: who leaves the prefix cache for whom, all groups in one pool.

How much may be had, and how much is lacking, is the manager's to say (`manage.admit`);
which pages go is said here. Any group's pages pay for any other's within the quotas,
and no more of them than are short. Companions that texts have moved past go first where
their group keeps more of the cache than its share, and nobody reads the text. Then what
was used longest ago: a spare companion, since the text that it stands in moved past it;
or the tail of a text nobody reads, in the order of the tree's policy, with all of its
companions. When nothing else is left, companions of texts that are read go.

The law: whatever the cache alone holds can be had, so a sequence that fits the pool
alone always goes on.

    room = Room(shelf, manager)
    room.can_make((3, 0, 1))       # a question
    room.make((3, 0, 1))           # False, and nothing has gone, when all is too little
"""

import operator
from collections.abc import Collection, Sequence

import numpy as np

from kvmem import manage
from kvmem import pool as pools
from kvmem.budget import PoolPages
from kvmem.manage import Admission, Manager, Shortage
from kvmem.serve.shelf import Shelf

__all__ = ["Room", "as_built"]


class Room:
    """The free pages of a pool, and those that its shelf would give up.

    Args:
        shelf: what the prefix cache holds.
        manager: the quotas and shares of the pool's groups; may be set anew.
    """

    def __init__(self, shelf: Shelf, manager: Manager):
        self.shelf = shelf
        self.books = shelf.books
        self.manager = manager
        self.num_evicted = 0  # physical pages

    @property
    def left(self) -> manage.Room:
        """What is free, and what each group holds, cached pages too."""
        ledger = self.books.ledger
        held = tuple(group.num_vpages - group.num_vfree for group in ledger.groups)
        return manage.Room((ledger.num_free,), held)

    def can_make(
        self, counts: Sequence[int], keeping: Sequence[Sequence[int]] = ()
    ) -> bool:
        """Say whether `counts` vpages of each group may be had, by eviction if need be.

        `make` has the last word: a page behind which another is in use stays.

        Args:
            counts: how many of each group.
            keeping: cached pages of each group that are not to be evicted for it.
        """
        kept = [self.books.count_alone(g, vpages) for g, vpages in enumerate(keeping)]
        kept += [0] * (len(counts) - len(kept))
        alone = tuple(map(operator.sub, self.books.num_alone, kept))
        said = manage.granted_at_most(self.manager, self.left, counts, alone)
        return isinstance(said, Admission)

    def make(
        self, counts: Sequence[int], kept: Collection[tuple[int, int]] = ()
    ) -> bool:
        """Evict what `counts` are short of; say whether they can be handed out now.

        Args:
            counts: vpages of each group.
            kept: (group, vpage) of snapshots that are about to be read.
        """
        left, gone = self.left, _Gone(self.books.extents)
        said = manage.admit(self.manager, left, counts)
        if isinstance(said, Shortage) and not self.can_make(counts):
            return False
        while isinstance(said, Shortage) and self._evict_for(said, gone, kept):
            freed = manage.give_back(self.manager, left, gone.counts)
            said = manage.admit(self.manager, freed, counts)
        for group, vpages in gone.vpages.items():
            self.books.forget(group, tuple(vpages))
        self.num_evicted += gone.num_pages
        return isinstance(said, Admission)

    def _evict_for(
        self, short: Shortage, gone: "_Gone", kept: Collection[tuple[int, int]]
    ) -> bool:
        """Evict some of what is short; say whether anything has gone."""
        before = gone.num_pages
        if short.law == "quota":
            group = self.manager.index(short.group)
            self._evict_of(group, short.missing, gone, kept)
            return gone.num_pages > before
        return (
            self._evict_beyond(short.missing, gone, kept)
            or self._evict_spares(short.missing, gone, kept, self.shelf.cache.coldest())
            or self._evict_units(short.missing, gone)
            or self._evict_spares(short.missing, gone, kept)
            or self._evict_companions(short.missing, gone, kept)
        )

    def _evict_beyond(
        self, short: int, gone: "_Gone", kept: Collection[tuple[int, int]]
    ) -> bool:
        """Evict spares of groups that keep more than their share of the cache.

        Those of a text that is being computed stay: its records may be kept at its end.
        """
        alone = tuple(map(operator.sub, self.books.num_alone, gone.counts))
        beyond = list(manage.beyond_shares(self.manager, alone))
        lives = self.shelf.lives
        if not any(beyond[g] for g in self.shelf.others if lives[g].kind != "full"):
            return False
        found = []
        for group, unit in self.shelf.companions.spares:
            if short <= 0:
                break
            if not beyond[group] or not self._is_idle(unit):
                continue
            if self._is_evictable(group, unit, kept):
                found.append((group, unit))
                beyond[group] -= 1
                short -= self.books.extents[group]
        for group, unit in found:
            gone.add(group, [self.shelf.companions.drop(group, unit)])
        return bool(found)

    def _evict_of(
        self,
        group: int,
        count: int,
        gone: "_Gone",
        kept: Collection[tuple[int, int]],
    ) -> None:
        """Evict vpages of one group: nobody else's would help it."""
        if self.shelf.first is None:
            return
        if self.shelf.lives[group].kind == "full":
            self._evict_units(count * sum(self.books.extents), gone)
            return
        spares = [unit for of, unit in self.shelf.companions.spares if of == group]
        others = self.shelf.companions.units(group).tolist()
        most = gone.counts[group] + count
        for unit in dict.fromkeys([*spares, *others]):
            if gone.counts[group] >= most:
                break
            if self._is_evictable(group, unit, kept):
                gone.add(group, [self.shelf.companions.drop(group, unit)])

    def _evict_spares(
        self,
        short: int,
        gone: "_Gone",
        kept: Collection[tuple[int, int]],
        before: int | None = None,
    ) -> bool:
        """Evict spares passed no later than `before`; say whether there were any."""
        companions, found = self.shelf.companions, []
        for (group, unit), passed in companions.spares.items():
            if short <= 0 or (before is not None and passed > before):
                break
            if self._is_evictable(group, unit, kept):
                found.append((group, unit))
                short -= self.books.extents[group]
        for group, unit in found:
            gone.add(group, [companions.drop(group, unit)])
        return bool(found)

    def _evict_units(self, short: int, gone: "_Gone") -> bool:
        """Evict the coldest tail, or some of it; say whether there was any."""
        most = sum(self.books.extents)  # of a unit with all of its companions
        units = self.shelf.cache.evict(max(1, short // most), self._is_idle)
        self._take_out(units, gone)
        return bool(units)

    def _evict_companions(
        self, short: int, gone: "_Gone", kept: Collection[tuple[int, int]]
    ) -> bool:
        """Evict pages of windows and states that texts could do without."""
        before = gone.num_pages
        for group in self.shelf.others:
            if self.shelf.lives[group].kind == "full":
                continue  # its unit cannot do without it
            units = self.shelf.companions.units(group)
            vpages = self.shelf.companions.pages(group, units)
            idle = self.books.ledger.groups[group].refs[vpages] == 1
            idle &= ~np.isin(vpages, [vpage for of, vpage in kept if of == group])
            missing = max(0, short + before - gone.num_pages)
            for unit in units[idle][: -(-missing // self.books.extents[group])]:
                gone.add(group, [self.shelf.companions.drop(group, int(unit))])
        return gone.num_pages > before

    def _take_out(self, units: tuple[int, ...], gone: "_Gone") -> None:
        """Take what goes with units that have left the tree."""
        if units:
            gone.add(self.shelf.first, units)
            for group, vpages in self.shelf.companions.take_out(units).items():
                gone.add(group, vpages)

    def _is_evictable(
        self, group: int, unit: int, kept: Collection[tuple[int, int]]
    ) -> bool:
        vpage = int(self.shelf.companions.pages(group, [unit])[0])
        return self.books.is_alone(group, vpage) and (group, vpage) not in kept

    def _is_idle(self, unit: int) -> bool:
        return int(self.books.ledger.groups[self.shelf.first].refs[unit]) == 1


class _Gone:
    """Pages that have left the shelf, their hold not given up yet."""

    def __init__(self, extents: Sequence[int]):
        self._extents = extents
        self.vpages: dict[int, list[int]] = {}
        self.counts = [0 for _ in extents]
        self.num_pages = 0  # physical

    def add(self, group: int, vpages: Sequence[int]) -> None:
        self.vpages.setdefault(group, []).extend(vpages)
        self.counts[group] += len(vpages)
        self.num_pages += len(vpages) * self._extents[group]


def as_built(ledger: pools.Ledger) -> Manager:
    """Return the manager of a pool that only its ids divide; bytes are of no matter."""
    sizes = [(group.num_vpages, group.extent) for group in ledger.groups]
    num_vpages, extents = zip(*sizes, strict=True)
    numbers = tuple(range(len(sizes)))
    pool = PoolPages(1, ledger.num_pages, numbers, num_vpages, extents)
    return manage.as_built("as built", [f"group {number}" for number in numbers], pool)
