"""The shelf: what the prefix cache holds of every group, and who leaves it for whom.

A unit of the prefix tree is one page of full attention; the other groups' pages of the
same tokens are its companions. Room is made in this order, and no further than it is
short of:

1. spare companions, oldest first: what longer texts have moved past;
2. units nobody reads, tails first, in the order of the tree's policy, each with all of
   its companions;
3. companions of texts that are read, when nothing else is left.

The law: whatever the cache alone holds can be had, so a sequence that fits the pool
alone always goes on; and any group's pages pay for any other's.

    shelf = Shelf(books, PrefixCache(16), lives)
    shelf.make_room((3, 0, 1))       # False when even all of it is too little
"""

from collections.abc import Collection, Sequence

import numpy as np

from kvmem.geometry import Lifecycle
from kvmem.prefix import Companions, Hit, PrefixCache, hit_pages
from kvmem.prefix.tree import Marks
from kvmem.serve.books import Books

__all__ = ["NO_FULL_GROUP", "Shelf"]

NO_FULL_GROUP = "no layer of this model keeps whole texts"


class Shelf:
    """The prefix tree of full attention, and the companions of its pages.

    Args:
        books: of all groups.
        cache: the tree; its page size is that of every group.
        lives: of each group; the first of full attention is the tree's.
    """

    def __init__(self, books: Books, cache: PrefixCache, lives: Sequence[Lifecycle]):
        self.books = books
        self.cache = cache
        self.lives = tuple(lives)
        self.num_evicted = 0  # physical pages
        full = [g for g, life in enumerate(lives) if life.kind == "full"]
        self.first = full[0] if full else None
        nulls = {
            g: books.ledger.groups[g].null_vpage
            for g in range(len(lives))
            if full and g != full[0]
        }
        self.others = tuple(nulls)
        num_units = books.ledger.groups[full[0]].num_vpages if full else 0
        self.companions = Companions(num_units, nulls)

    def match(self, tokens: Sequence[int], namespace, marks: Marks) -> Hit:
        """Find the longest cached prefix that every group can go on from."""
        if self.first is None:
            return Hit(0, (), NO_FULL_GROUP)
        hit = self.cache.match(tokens, namespace, marks)
        if not self.others or not hit.vpages:
            return hit
        present = [np.ones(len(hit.vpages), bool)]
        present += [self.companions.has(g, hit.vpages) for g in self.others]
        lives = [self.lives[g] for g in (self.first, *self.others)]
        pages = hit_pages(lives, self.cache.page_size, present)
        reason = None if pages else self._why_not(present[1:])
        length = pages * self.cache.page_size
        return Hit(length, hit.vpages[:pages], reason, hit.num_tokens)

    def publish(
        self,
        tokens: Sequence[int],
        held: Sequence[Sequence[int]],
        ordinals: Sequence[Sequence[int]],
        namespace,
        marks: Marks,
    ) -> list[list[int]]:
        """Offer the whole pages of computed tokens; return the pages to hold from now.

        Where the cache has a page already, the sequence takes a hold on that one and
        gives its own copy back.

        Args:
            held: the sequence's pages of each group.
            ordinals: which page of the text each of them is.
        """
        if self.first is None:
            return [list(vpages) for vpages in held]
        mine = held[self.first]
        adopted = self.cache.publish(tokens, mine, namespace, marks)
        self.books.cache(self.first, adopted)
        units = self.cache.pages(tokens, namespace, marks)
        now = [list(vpages) for vpages in held]
        now[self.first] = [*units, *mine[len(units) :]]
        self._exchange(self.first, mine[: len(units)], units)
        for group in self.others:
            if self.lives[group].kind != "state":
                now[group] = self._join(group, held[group], ordinals[group], units)
        return now

    def put_snapshot(self, group: int, unit: int, vpage: int) -> None:
        """Let the cache own a fresh copy of a state that stands after a unit."""
        self.books.keep(group, (vpage,))
        self.companions.put(group, [unit], [vpage])

    def drop_snapshots(self, unit: int) -> None:
        """Drop a unit's snapshots, superseded before any other text read them."""
        for group in self.others:
            if self.lives[group].kind == "state" and self.companions.has(group, [unit]):
                self.books.forget(group, (self.companions.drop(group, unit),))

    def short_of(self, counts: Sequence[int]) -> int:
        """Return how many physical pages `counts` vpages of each group lack."""
        ledger = self.books.ledger
        needed = sum(n * g.extent for n, g in zip(counts, ledger.groups, strict=True))
        over = max(
            (n - g.num_vfree) * g.extent
            for n, g in zip(counts, ledger.groups, strict=True)
        )
        return max(needed - ledger.num_free, over, 0)

    def make_room(
        self, counts: Sequence[int], kept: Collection[tuple[int, int]] = ()
    ) -> bool:
        """Evict what `counts` are short of; say whether they can be handed out now.

        Args:
            counts: vpages of each group.
            kept: (group, vpage) of snapshots that are about to be read.
        """
        if self.short_of(counts):
            self._evict_spares(counts, kept)
        if self.short_of(counts):
            self._evict_units(counts)
        if self.short_of(counts):
            self._evict_companions(counts, kept)
        return not self.short_of(counts)

    def clear(self) -> tuple[int, ...]:
        """Drop every cached page; return those of the tree."""
        held = self.cache.clear()
        for group, vpages in self.companions.take_out(held).items():
            self.books.forget(group, tuple(vpages))
        if held:
            self.books.forget(self.first, held)
        return held

    def _why_not(self, present: Sequence[np.ndarray]) -> str:
        """Say which groups' pages a cached text lacks."""
        lacking = [
            str(self.lives[group])
            for group, has in zip(self.others, present, strict=True)
            if not has.all()
        ]
        return f"the cached text lacks pages of {', '.join(lacking)}"

    def _join(
        self,
        group: int,
        vpages: Sequence[int],
        ordinals: Sequence[int],
        units: Sequence[int],
    ) -> list[int]:
        """Let a sequence and the cache hold the same pages of one group."""
        count = sum(ordinal < len(units) for ordinal in ordinals)
        if count == 0:
            return list(vpages)
        mine = np.asarray(vpages[:count], np.int64)
        of = np.asarray(units, np.int64)[list(ordinals[:count])]
        has = self.companions.has(group, of)
        self.companions.put(group, of[~has], mine[~has])
        self.companions.use(group, of)
        self.books.cache(group, tuple(mine[~has].tolist()))
        cached = self.companions.pages(group, of).tolist()
        self._exchange(group, mine.tolist(), cached)
        return [*cached, *vpages[count:]]

    def _exchange(self, group: int, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """Hold the cache's pages in place of a sequence's own copies."""
        pairs = zip(mine, theirs, strict=True)
        copies = [(own, cached) for own, cached in pairs if own != cached]
        self.books.retain(group, tuple(cached for _, cached in copies))
        self.books.release(group, tuple(own for own, _ in reversed(copies)))

    def _is_idle(self, unit: int) -> bool:
        return int(self.books.ledger.groups[self.first].refs[unit]) == 1

    def _evict_spares(
        self, counts: Sequence[int], kept: Collection[tuple[int, int]]
    ) -> None:
        short, gone = self.short_of(counts), []
        for group, unit in self.companions.spares:
            if short <= 0:
                break
            vpage = int(self.companions.pages(group, [unit])[0])
            if self.books.is_alone(group, vpage) and (group, vpage) not in kept:
                gone.append((group, unit))
                short -= self.books.extents[group]
        self._forget_companions(gone)

    def _evict_units(self, counts: Sequence[int]) -> None:
        short, gone = self.short_of(counts), []
        most = sum(self.books.extents)  # of a unit with all of its companions
        while short > 0:
            units = self.cache.evict(max(1, short // most), self._is_idle)
            if not units:
                break
            gone += units
            short -= len(units) * self.books.extents[self.first]
            for group in self.others:
                has = self.companions.has(group, units)
                short -= int(has.sum()) * self.books.extents[group]
        self._forget_units(tuple(gone))

    def _evict_companions(
        self, counts: Sequence[int], kept: Collection[tuple[int, int]]
    ) -> None:
        short, gone = self.short_of(counts), []
        for group in self.others:
            if self.lives[group].kind == "full":
                continue  # its unit cannot do without it
            units = self.companions.units(group)
            vpages = self.companions.pages(group, units)
            idle = self.books.ledger.groups[group].refs[vpages] == 1
            idle &= ~np.isin(vpages, [vpage for of, vpage in kept if of == group])
            needed = -(-max(0, short) // self.books.extents[group])
            found = units[idle][:needed].tolist()
            gone += [(group, unit) for unit in found]
            short -= len(found) * self.books.extents[group]
        self._forget_companions(gone)

    def _forget_companions(self, gone: Sequence[tuple[int, int]]) -> None:
        """Leave the units, and drop these pages of theirs."""
        for group in self.others:
            vpages = tuple(
                self.companions.drop(group, unit) for of, unit in gone if of == group
            )
            if vpages:
                self.books.forget(group, vpages)
                self.num_evicted += len(vpages) * self.books.extents[group]

    def _forget_units(self, units: tuple[int, ...]) -> None:
        """Drop units that have left the tree, with all that goes with them."""
        if not units:
            return
        self.num_evicted += len(units) * self.books.extents[self.first]
        self.books.forget(self.first, units)
        for group, vpages in self.companions.take_out(units).items():
            self.num_evicted += len(vpages) * self.books.extents[group]
            self.books.forget(group, tuple(vpages))
