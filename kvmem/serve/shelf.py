"""The shelf: what the prefix cache holds of every group.

A unit of the prefix tree is one page of full attention; the other groups' pages of the
same tokens are its companions: index keys, pages of windows, snapshots of states. The
law: the cache holds each of its pages once, and a companion only while its unit stands
in the tree.

A draft whose row of a token depends on the token behind it reads across the end of a
page: the last row there is of one continuation alone. `back_off` says how many pages at
the end of what is found are computed again for it; they leave the token to compute that
a hit always leaves, too. Of 16 tokens cached in pages of 4, and of 18, three pages are
used then.

    shelf = Shelf(books, PrefixCache(16), lives)
    shelf.match(tokens, namespace, marks)       # what every group can go on from
"""

from collections.abc import Sequence

import numpy as np

from kvmem.geometry import Lifecycle
from kvmem.prefix import Companions, Hit, PrefixCache, hit_pages
from kvmem.prefix.tree import Marks
from kvmem.serve.books import Books
from kvmem.serve.holding import Holding

__all__ = ["BACKED_OFF", "NO_FULL_GROUP", "Shelf"]

BACKED_OFF = "what was found is computed again, for a draft that reads across its end"
NO_FULL_GROUP = "no layer of this model keeps whole texts"


class Shelf:
    """The prefix tree of full attention, and the companions of its pages.

    Args:
        books: of all groups.
        cache: the tree; its page size is that of every group.
        lives: of each group; the first of full attention is the tree's.

    `back_off` is a draft's to set, before the first text is looked for.
    """

    def __init__(self, books: Books, cache: PrefixCache, lives: Sequence[Lifecycle]):
        self.books = books
        self.cache = cache
        self.lives = tuple(lives)
        self.back_off = 0  # pages
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
        if self.back_off and hit.vpages:
            found = len(self.cache.pages(tokens, namespace, marks))
            hit = self._backed_off(hit, found)
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

    def named(
        self, hit: Hit, sinks: Sequence[int]
    ) -> tuple[Holding, list[tuple[int, int]]]:
        """Return the pages of a hit, not held yet, and the snapshots to restore."""
        held, snapshots = Holding(sinks), []
        if not hit.vpages:
            return held, snapshots
        whole, companions = len(hit.vpages), self.companions
        for group, life in enumerate(self.lives):
            if group == self.first:
                held.columns[group] = list(hit.vpages)
            elif life.kind == "state":
                page = companions.pages(group, hit.vpages[-1:])
                snapshots.append((group, int(page[0])))
            else:
                stale = life.stale(hit.num_tokens, self.cache.page_size)
                held.firsts[group] = max(stale.stop, sinks[group])
                units = [*hit.vpages[: stale.start], *hit.vpages[stale.stop : whole]]
                held.columns[group] = companions.pages(group, units).tolist()
        return held, snapshots

    def use(
        self, held: Holding, hit: Hit, snapshots: Sequence[tuple[int, int]]
    ) -> None:
        """Note that a text goes on from these pages."""
        if not hit.vpages:
            return
        for group in self._of_kind("window"):
            units = [hit.vpages[ordinal] for ordinal in held.ordinals(group)]
            self.companions.use(group, units)
        for group, _ in snapshots:
            self.companions.use(group, hit.vpages[-1:])
            held.snapshot = (hit.vpages[-1], False)

    def supersede(self, held: Holding, unit: int) -> None:
        """Let the snapshot before this one go, or wait to be evicted."""
        if held.snapshot is None or held.snapshot[0] == unit:
            return
        (before, moved), held.snapshot = held.snapshot, None
        for group in self._of_kind("state"):
            if self.companions.has(group, [before])[0]:
                if moved:
                    self.drop(group, before)
                else:
                    self.pass_by(group, [before])

    def drop(self, group: int, unit: int) -> None:
        """Drop a group's page of a unit that stays."""
        self.books.forget(group, (self.companions.drop(group, unit),))

    def pass_by(self, group: int, units: Sequence[int]) -> None:
        """Let companions that a text has moved past be spare from now on."""
        self.companions.pass_by(group, units, self.cache.now)

    def clear(self) -> tuple[int, ...]:
        """Drop every cached page; return those of the tree."""
        units = self.cache.clear()
        if units:
            self.books.forget(self.first, units)
        for group, vpages in self.companions.take_out(units).items():
            self.books.forget(group, tuple(vpages))
        return units

    def _of_kind(self, kind: str) -> list[int]:
        return [g for g, life in enumerate(self.lives) if life.kind == kind]

    def _backed_off(self, hit: Hit, found: int) -> Hit:
        """Return a hit without the last of the pages that were found."""
        kept = max(0, min(len(hit.vpages), found - self.back_off))
        size, reason = self.cache.page_size, None if kept else BACKED_OFF
        return Hit(kept * size, hit.vpages[:kept], reason)

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
