"""The shelf: what the prefix cache holds of every group.

A unit of the prefix tree is one page of full attention; the other groups' pages of the
same tokens are its companions: index keys, pages of windows, snapshots of states. The
law: the cache holds each of its pages once, and a companion only while its unit stands
in the tree.

A draft may read what the target made of the token before its own, which no page keeps.
`back_off` says how many tokens at the end of what is found are computed again for it;
they leave the token to compute that a hit always leaves, too. The page in which that
begins is copied, for its rest is written again. Of 16 tokens cached in pages of 4, and
of 18, three pages are used where a page of them is computed again. A state cannot be
cut: a text goes on from the last snapshot that stands so many tokens before the end of
what is found, or from none, and windows have what a query there reads.

    shelf = Shelf(books, PrefixCache(16), lives)
    shelf.match(tokens, namespace, marks)       # what every group can go on from
"""

from collections.abc import Sequence

import numpy as np

from kvmem.geometry import Lifecycle, goes_on
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

    `back_off` is a draft's to set, before the first text is looked for; see
    `compute_again`.
    """

    def __init__(self, books: Books, cache: PrefixCache, lives: Sequence[Lifecycle]):
        self.books = books
        self.cache = cache
        self.lives = tuple(lives)
        self.back_off = 0  # tokens
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

    def compute_again(self, tokens: int) -> None:
        """Leave so many tokens of what is found to be computed again, for a draft."""
        self.back_off = tokens

    def resumed(self, length: int | np.ndarray) -> int | np.ndarray:
        """Return at which token a text goes on, of so many in whole cached pages; where
        nothing is left of them it is none above zero."""
        left = length - self.back_off
        return left - left % self.cache.page_size if self._of_kind("state") else left

    def match(self, tokens: Sequence[int], namespace, marks: Marks) -> Hit:
        """Find the longest cached prefix that every group can go on from."""
        if self.first is None:
            return Hit(0, (), NO_FULL_GROUP)
        hit = self.cache.match(tokens, namespace, marks)
        if self.back_off:
            found = self.cache.pages(tokens, namespace, marks)
            return self._backed_off(hit, found)
        if not self.others or not hit.vpages:
            return hit
        present = self._present(hit.vpages)
        pages = self._agreed(present)
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
        """Return the pages of a hit, not held yet, and those that are to be copied:
        snapshots of states, and what is used in part."""
        held, copied = Holding(sinks), []
        if not hit.num_tokens:
            return held, copied
        companions = self.companions
        for group, life in enumerate(self.lives):
            if life.kind == "state":
                page = companions.pages(group, hit.vpages[-1:])
                copied.append((group, int(page[0])))
                continue
            units = list(hit.vpages)
            if life.kind == "window":
                stale = life.stale(hit.num_tokens, self.cache.page_size)
                held.firsts[group] = max(stale.stop, sinks[group])
                units = [*units[: stale.start], *units[stale.stop :]]
            is_read = life.kind == "full" or hit.num_tokens % self.cache.page_size
            if hit.copied is not None and is_read:
                units.append(hit.copied)
            if group != self.first:
                units = companions.pages(group, units).tolist()
            if hit.copied is not None and is_read:
                copied.append((group, units.pop()))
            held.columns[group] = units
        return held, copied

    def use(self, held: Holding, hit: Hit) -> None:
        """Note that a text goes on from these pages."""
        if not hit.vpages:
            return
        for group in self._of_kind("window"):
            units = [hit.vpages[ordinal] for ordinal in held.ordinals(group)]
            self.companions.use(group, units)
        for group in self._of_kind("state"):
            self.companions.use(group, hit.vpages[-1:])
            held.snapshot = (hit.vpages[-1], False)

    def supersede(self, held: Holding, unit: int) -> None:
        """Let the snapshot before this one go, or wait to be evicted.

        Where tokens are computed again it is what the text goes on from, were it to end
        here; then the one before it goes.
        """
        if held.snapshot is not None and held.snapshot[0] == unit:
            return
        passed, held.snapshot = held.snapshot, None
        if self.back_off:
            passed, held.older = held.older, passed
        if passed is None:
            return
        before, moved = passed
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

    def _backed_off(self, hit: Hit, found: Sequence[int]) -> Hit:
        """Return a hit without the last tokens that were found.

        Args:
            hit: what is found without a draft.
            found: every cached page of the text, up to its last token.
        """
        size, present = self.cache.page_size, self._present(found)
        ends = np.arange(1, len(found) + 1) * size
        starts = self.resumed(ends)
        suits, starts = starts > 0, np.maximum(starts, 0)
        for group, has in zip((self.first, *self.others), present, strict=True):
            life = self.lives[group]  # a draft's rows are read of that token's page too
            reads = ends if life.kind == "full" else starts
            suits &= goes_on(life, size, has, reads)
        if not suits.any():
            reason = BACKED_OFF if hit.vpages else hit.reason
            return Hit(0, (), reason, hit.num_tokens)
        length = int(starts[suits][-1])
        whole = length // size
        return Hit(length, tuple(found[:whole]), None, hit.num_tokens, found[whole])

    def _present(self, units: Sequence[int]) -> list[np.ndarray]:
        """Return bool[n] of the tree's group and each other: who has these units."""
        others = [self.companions.has(group, units) for group in self.others]
        return [np.ones(len(units), bool), *others]

    def _agreed(self, present: Sequence[np.ndarray]) -> int:
        """Return how many leading pages every group can go on from."""
        lives = [self.lives[group] for group in (self.first, *self.others)]
        return hit_pages(lives, self.cache.page_size, present)

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
