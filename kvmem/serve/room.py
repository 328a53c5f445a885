"""Room: who leaves the prefix cache for whom, all groups in one pool.

Any group's pages pay for any other's, and no more of them than are short. What was used
longest ago goes first: a spare companion, since the text that it stands in moved past
it; or the tail of a text nobody reads, in the order of the tree's policy, with all of
its companions. When nothing else is left, companions of texts that are read go.

The law: whatever the cache alone holds can be had, so a sequence that fits the pool
alone always goes on.

    room = Room(shelf)
    room.can_make((3, 0, 1))       # a question
    room.make((3, 0, 1))           # False when even all of it is too little
"""

import operator
from collections.abc import Collection, Sequence

import numpy as np

from kvmem.serve.shelf import Shelf

__all__ = ["Room"]


class Room:
    """The free pages of a pool, and those that its shelf would give up."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf
        self.books = shelf.books
        self.num_evicted = 0  # physical pages

    def short_of(self, counts: Sequence[int]) -> int:
        """Return how many physical pages `counts` vpages of each group lack."""
        needed = sum(map(operator.mul, counts, self.books.extents))
        return max(0, needed - self.books.ledger.num_free)

    def over_quota(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Return (group, vpages) where a group's own virtual pages run short.

        A group may be given fewer than the pool would hold (a static split).
        """
        groups = zip(counts, self.books.ledger.groups, strict=True)
        over = [(g, count - group.num_vfree) for g, (count, group) in enumerate(groups)]
        return [(group, count) for group, count in over if count > 0]

    def can_make(
        self, counts: Sequence[int], keeping: Sequence[Sequence[int]] = ()
    ) -> bool:
        """Say whether `counts` vpages of each group may be had, by eviction if need be.

        `make` has the last word: a page behind which another is in use stays.

        Args:
            counts: how many of each group.
            keeping: cached pages of each group that are not to be evicted for it.
        """
        short, over = self.short_of(counts), self.over_quota(counts)
        if not short and not over:
            return True
        kept = [self.books.count_alone(g, vpages) for g, vpages in enumerate(keeping)]
        kept += [0] * (len(counts) - len(kept))
        alone = [
            all_ - some for all_, some in zip(self.books.num_alone, kept, strict=True)
        ]
        return short <= sum(map(operator.mul, alone, self.books.extents)) and all(
            count <= alone[group] for group, count in over
        )

    def make(
        self, counts: Sequence[int], kept: Collection[tuple[int, int]] = ()
    ) -> bool:
        """Evict what `counts` are short of; say whether they can be handed out now.

        Args:
            counts: vpages of each group.
            kept: (group, vpage) of snapshots that are about to be read.
        """
        short, over = self.short_of(counts), self.over_quota(counts)
        if not short and not over:
            return True
        gone = _Gone(self.books.extents)
        for group, count in over:
            self._evict_of(group, count, gone, kept)
        while short > gone.num_pages:
            missing = short - gone.num_pages
            coldest = self.shelf.cache.coldest()
            if not (
                self._evict_spares(missing, gone, kept, coldest)
                or self._evict_units(missing, gone)
                or self._evict_spares(missing, gone, kept)
                or self._evict_companions(missing, gone, kept)
            ):
                break
        for group, vpages in gone.vpages.items():
            self.books.forget(group, tuple(vpages))
        self.num_evicted += gone.num_pages
        return not self.short_of(counts) and not self.over_quota(counts)

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
            units = self.shelf.cache.evict(count, self._is_idle)
            self._take_out(units, gone)
            return
        spares = [unit for of, unit in self.shelf.companions.spares if of == group]
        others = self.shelf.companions.units(group).tolist()
        for unit in dict.fromkeys([*spares, *others]):
            if len(gone.vpages.get(group, ())) >= count:
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
        self.num_pages = 0  # physical

    def add(self, group: int, vpages: Sequence[int]) -> None:
        self.vpages.setdefault(group, []).extend(vpages)
        self.num_pages += len(vpages) * self._extents[group]
