"""The engine's pages: sequences hold them, the prefix cache shares them, by group.

All groups draw from one pool. A sequence holds all its pages under full attention; of a
window those that its next query reads, handed out chunk by chunk and given back as they
become stale; of a recurrent state the one live copy. What it needs is handed out for
all groups together or for none.

The accounting law, in physical pages: free + evictable + in use = total, where
evictable are those that only the prefix cache holds, and in use are those that a
sequence holds. It follows from the law of each page: its references are the sequences
that hold it, and one for the cache. `objections` counts both anew.

    table = PageTable(ledger, PrefixCache(16), [group.lifecycle for group in groups])
    held = table.begin(table.match(tokens), tokens)   # None when pages cannot be had
    table.extend(held, len(tokens) + 1)
    pool = table.apply(pool)
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvmem import pool as pools
from kvmem.geometry import Lifecycle
from kvmem.geometry.lifecycle import FULL
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.books import Books
from kvmem.serve.holding import Holding
from kvmem.serve.identity import PLAIN, Identity
from kvmem.serve.shelf import Shelf

__all__ = ["Accounts", "Cleared", "PageTable"]


class Accounts(NamedTuple):
    """Where every page is: free, cached only, in use by a sequence, and in all."""

    free: int
    evictable: int
    in_use: int
    total: int


class Cleared(NamedTuple):
    """Pages of the tree that a cleared cache dropped: now free, or still in use."""

    freed: tuple[int, ...]
    in_use: tuple[int, ...]


class PageTable:
    """Pages of all lifecycle groups: handed out, shared, cached, given back."""

    def __init__(
        self,
        ledger: pools.Ledger,
        cache: PrefixCache,
        lives: Sequence[Lifecycle] = (FULL,),
    ):
        self.ledger = ledger
        self.cache = cache
        self.lives = tuple(lives)
        self.page_size = cache.page_size
        self.books = Books(ledger)
        self.shelf = Shelf(self.books, cache, lives)
        self._sinks = tuple(life.sink_pages(self.page_size) for life in self.lives)
        kinds = [life.kind for life in self.lives]
        self._windows = [g for g, kind in enumerate(kinds) if kind == "window"]
        self._states = [g for g, kind in enumerate(kinds) if kind == "state"]

    @property
    def num_evicted(self) -> int:
        """Physical pages that left the cache to make room."""
        return self.shelf.num_evicted

    @property
    def has_states(self) -> bool:
        """Say whether any group keeps a recurrent state."""
        return bool(self._states)

    @property
    def drops_pages(self) -> bool:
        """Say whether sequences give pages back as they grow."""
        return bool(self._windows)

    def accounts(self) -> Accounts:
        """Count the physical pages of each kind."""
        free, total = self.ledger.num_free, self.ledger.num_pages
        evictable = self.books.num_evictable
        return Accounts(free, evictable, total - free - evictable, total)

    def pages_for(self, length: int) -> int:
        """Return the pages that `length` tokens need under full attention."""
        return -(-length // self.page_size)

    def peak(self, length: int, step: int) -> tuple[int, ...]:
        """Return the most vpages of each group on the way to `length` tokens.

        Args:
            step: tokens that one step computes at most.
        """
        return tuple(life.peak(length, self.page_size, step) for life in self.lives)

    def never_fits(self, counts: Sequence[int]) -> bool:
        """Say whether `counts` vpages of each group are more than there are."""
        pairs = tuple(zip(counts, self.ledger.groups, strict=True))
        pages = sum(count * group.extent for count, group in pairs)
        over = any(count > group.num_vpages for count, group in pairs)
        return over or pages > self.ledger.num_pages

    def in_words(self, counts: Sequence[int]) -> str:
        """Say what `counts` vpages of each group are in physical pages."""
        if len(counts) == 1:
            return f"{counts[0]} pages of {self.page_size} tokens"
        extents = self.books.extents
        parts = [
            f"{count} of {life}" + f" in {extent} parts each" * (extent > 1)
            for count, life, extent in zip(counts, self.lives, extents, strict=True)
        ]
        total = sum(n * extent for n, extent in zip(counts, extents, strict=True))
        return f"{', '.join(parts)}: {total} pages"

    def match(self, tokens: Sequence[int], identity: Identity = PLAIN) -> Hit:
        """Find the cached pages that a text of this identity begins with.

        A question: it evicts nothing and leaves the order of eviction as it is.
        """
        return self.shelf.match(tokens, *self._where(identity))

    def can_take(
        self, counts: Sequence[int], keeping: Sequence[Sequence[int]] = ()
    ) -> bool:
        """Say whether `counts` vpages of each group may be had, by eviction if need be.

        `extend` has the last word: a page behind which another is in use stays.

        Args:
            counts: how many of each group.
            keeping: cached pages of each group that are not to be evicted for it.
        """
        short = self.shelf.short_of(counts)
        if short == 0:
            return True
        kept = sum(
            self.books.count_alone(group, vpages) * self.books.extents[group]
            for group, vpages in enumerate(keeping)
        )
        return short <= self.books.num_evictable - kept

    def begin(
        self,
        hit: Hit,
        tokens: Sequence[int],
        identity: Identity = PLAIN,
        step: int | None = None,
    ) -> Holding | None:
        """Hold a prefix hit and pages for the tokens known; all or nothing.

        States are copied from the hit's snapshots. Windows get pages for the first step
        alone, and only if those of the whole way can be had now.

        Args:
            hit: what `match` found, for these tokens.
            tokens: everything known of the text.
            step: tokens that one step computes at most; None: all of them.
        """
        length, past = len(tokens), hit.num_tokens
        step = length - past if step is None else step
        held, snapshots = self._named(hit)
        keeping = [list(vpages) for vpages in held.columns]
        for group, vpage in snapshots:
            keeping[group].append(vpage)
        most = self._lacking(held, length, length, step)
        if not self.can_take(most, keeping):
            return None
        self.cache.touch(tokens[:past], *self._where(identity))
        for group, vpages in enumerate(held.columns):
            self.books.retain(group, tuple(vpages))
        counts = self._lacking(held, length, min(length, past + step))
        if not self.shelf.make_room(counts, kept=snapshots):
            self.give_back(held)
            return None
        self._use(held, hit, snapshots)
        self._hand_out(held, counts, snapshots)
        return held

    def extend(self, held: Holding, length: int) -> bool:
        """Make room for `length` tokens in every group, or in none; say which.

        Pages come zeroed, by evicting cached ones if need be.
        """
        if length <= held.room:
            return True
        counts = self._lacking(held, length, length)
        if not self.can_take(counts) or not self.shelf.make_room(counts):
            return False
        self._hand_out(held, counts)
        return True

    def trim(self, held: Holding, history: int) -> None:
        """Give back the pages of windows that no query from `history` on reads.

        Those that are cached stay with their text for others, the first to be evicted.
        """
        for group in self._windows:
            end = self.lives[group].stale(history, self.page_size).stop
            first, sinks = held.firsts[group], held.sinks[group]
            if end <= first:
                continue
            gone = held.columns[group][sinks : sinks + end - first]
            del held.columns[group][sinks : sinks + end - first]
            held.firsts[group] = end
            if self.shelf.first is not None:
                units = np.asarray(held.columns[self.shelf.first][first:end], np.int64)
                shared = self.shelf.companions.pages(group, units) == gone
                self.shelf.companions.pass_by(group, units[shared].tolist())
            self.books.release(group, tuple(gone))

    def publish(
        self, tokens: Sequence[int], held: Holding, identity: Identity = PLAIN
    ) -> None:
        """Offer the whole pages of computed, accepted tokens to later requests.

        Where the cache has a page of this text already, the sequence takes a hold on
        that one and gives its own copy back. So whoever holds a page holds those
        before it too, and the head of a cached text is as busy as its tail.
        """
        ordinals = [held.ordinals(group) for group in range(len(self.lives))]
        where = self._where(identity)
        held.columns = self.shelf.publish(tokens, held.columns, ordinals, *where)

    def snapshot(
        self,
        tokens: Sequence[int],
        held: Holding,
        identity: Identity = PLAIN,
        moves: bool = False,
    ) -> bool:
        """Publish a text with a copy of the states that stand after it.

        Never at the price of another sequence: without room there is no snapshot.

        Args:
            tokens: a whole number of pages, all computed and no more.
            moves: drop the one before if that moved too; else it is left to texts that
                part there.

        Returns:
            Whether every state has a snapshot there now.
        """
        self.publish(tokens, held, identity)
        if self.shelf.first is None:
            return False
        unit = held.columns[self.shelf.first][len(tokens) // self.page_size - 1]
        companions = self.shelf.companions
        lacking = [g for g in self._states if not companions.has(g, [unit])[0]]
        counts = [int(group in lacking) for group in range(len(self.lives))]
        if not self.can_take(counts) or not self.shelf.make_room(counts):
            return False
        for group in lacking:
            (copy,) = self.books.fork(group, tuple(held.columns[group]), 0)
            self.shelf.put_snapshot(group, unit, copy)
        self._supersede(held, unit)
        held.snapshot = (unit, moves)
        return True

    def fork(self, held: Holding, length: int) -> Holding | None:
        """Share the pages of `length` tokens with another sample.

        A partial page and a state are copied: both samples write there next.

        Returns:
            The other sample's pages, or None when there is no room for the copies.
        """
        whole = self.pages_for(length)
        cut = [tuple(held.within(group, whole)) for group in range(len(self.lives))]
        partial = length % self.page_size > 0
        is_copied = [
            bool(vpages) and (partial or group in self._states)
            for group, vpages in enumerate(cut)
        ]
        counts = [int(copied) for copied in is_copied]
        if not self.can_take(counts) or not self.shelf.make_room(counts):
            return None
        child = Holding(self._sinks)
        child.firsts = list(held.firsts)
        for group, vpages in enumerate(cut):
            copied = len(vpages) - is_copied[group]
            child.columns[group] = self.books.fork(group, vpages, copied)
        child.snapshot = held.snapshot and (held.snapshot[0], False)
        self._measure(child)
        return child

    def roll_back(
        self,
        held: Holding,
        tokens: Sequence[int],
        length: int,
        identity: Identity = PLAIN,
    ) -> tuple[Holding, int] | None:
        """Take back computed tokens that were not accepted; `held` is given back.

        Pages of attention are cut where they are, a partial one copied if others read
        it. A recurrent state cannot be cut, nor a window whose pages are gone: those
        begin anew from the latest prefix that every group has.

        Args:
            tokens: the accepted text, of at least `length` tokens.
            length: tokens that are to stay computed, at most.

        Returns:
            The pages from now on and the tokens computed in them, `length` or fewer:
            the rest is to be computed again. None, and nothing has changed, when there
            is no room.
        """
        if not self._states and self._reaches(held, length):
            found, computed = self.fork(held, length), length
        else:
            hit = self.match([*tokens[:length], 0], identity)
            found, computed = self.begin(hit, tokens[:length], identity), hit.num_tokens
        if found is None:
            return None
        self.give_back(held)
        return found, computed

    def give_back(self, held: Holding) -> None:
        """Drop a sequence's hold on its pages, tails first."""
        for group, vpages in enumerate(held.columns):
            self.books.release(group, tuple(reversed(vpages)))
        held.columns = [[] for _ in self.lives]
        held.room = 0

    def clear_cache(self) -> Cleared:
        """Drop every cached page; pages that sequences hold stay theirs."""
        held = self.shelf.clear()
        if not held:
            return Cleared((), ())
        refs = self.ledger.groups[self.shelf.first].refs
        return Cleared(
            tuple(v for v in held if refs[v] == 0), tuple(v for v in held if refs[v])
        )

    def objections(self, holdings: Iterable[Holding]) -> tuple[str, ...]:
        """Count the holders of every page anew; return the laws broken.

        Args:
            holdings: of every sequence that holds any page.
        """
        holdings, found, counted = tuple(holdings), [], [0, 0]
        for group, books in enumerate(self.ledger.groups):
            held, cached = self._holders(group, holdings)
            name = f" of group {group}" if len(self.lives) > 1 else ""
            wrong = (books.refs != held + cached) | (cached > 1)
            found += [
                f"page {page}{name} has {books.refs[page]} references, {held[page]} "
                f"tables name it and the cache {cached[page]} times"
                for page in np.flatnonzero(wrong)[:8]
            ]
            counted[0] += int(((cached > 0) & (held == 0)).sum()) * books.extent
            counted[1] += int((held > 0).sum()) * books.extent
        free, evictable, in_use, total = self.accounts()
        if [evictable, in_use] != counted or free + sum(counted) != total:
            found.append(
                f"{free} free, {counted[0]} evictable and {counted[1]} in use of "
                f"{total} pages, where the accounts say {evictable} and {in_use}"
            )
        return (*found, *self._lost_companions())

    def apply(self, pool: pools.Pool) -> pools.Pool:
        """Donates `pool`. Play on the device what the host has already decided."""
        return self.books.apply(pool)

    def _where(self, identity: Identity):
        return identity.extras, identity.run_extras(self.page_size)

    def _named(self, hit: Hit) -> tuple[Holding, list[tuple[int, int]]]:
        """Return the pages of a hit, not held yet, and the snapshots to restore."""
        held, snapshots = Holding(self._sinks), []
        if not hit.vpages:
            return held, snapshots
        whole, companions = len(hit.vpages), self.shelf.companions
        for group, life in enumerate(self.lives):
            if group == self.shelf.first:
                held.columns[group] = list(hit.vpages)
            elif life.kind == "state":
                page = companions.pages(group, hit.vpages[-1:])
                snapshots.append((group, int(page[0])))
            else:
                stale = life.stale(hit.num_tokens, self.page_size)
                held.firsts[group] = max(stale.stop, self._sinks[group])
                units = [*hit.vpages[: stale.start], *hit.vpages[stale.stop : whole]]
                held.columns[group] = companions.pages(group, units).tolist()
        return held, snapshots

    def _lacking(
        self, held: Holding, length: int, upto: int, step: int | None = None
    ) -> tuple[int, ...]:
        """Return the vpages of each group that a sequence lacks.

        Args:
            length: tokens that full attention has pages for.
            upto: tokens that windows have pages for.
            step: count what windows hold at most on their way there, in steps so long.
        """
        counts = []
        for group, life in enumerate(self.lives):
            columns = len(held.columns[group])
            if life.kind == "state":
                counts.append(1 - columns)
            elif life.kind == "window":
                count = max(0, self.pages_for(upto) - held.end(group))
                if step is not None:
                    count = life.peak(length, self.page_size, max(1, step)) - columns
                counts.append(max(0, count))
            else:
                counts.append(max(0, self.pages_for(length) - columns))
        return tuple(counts)

    def _hand_out(
        self,
        held: Holding,
        counts: Sequence[int],
        snapshots: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Give a sequence fresh pages, and copies of the snapshots it begins from."""
        restored = dict(snapshots)
        for group, count in enumerate(counts):
            if group in restored:
                fresh = self.books.fork(group, (restored[group],), 0)
            else:
                fresh = self.books.handout(group, count)
            held.columns[group].extend(fresh)
        self._measure(held)

    def _measure(self, held: Holding) -> None:
        """Note how many tokens fit the pages held."""
        ends = [
            held.end(group)
            for group, life in enumerate(self.lives)
            if life.kind != "state"
        ]
        held.room = min(ends) * self.page_size if ends else np.iinfo(np.int32).max

    def _use(
        self, held: Holding, hit: Hit, snapshots: Sequence[tuple[int, int]]
    ) -> None:
        """Note that a text goes on from these pages."""
        if not hit.vpages:
            return
        for group in self._windows:
            units = [hit.vpages[ordinal] for ordinal in held.ordinals(group)]
            self.shelf.companions.use(group, units)
        for group, _ in snapshots:
            self.shelf.companions.use(group, hit.vpages[-1:])
            held.snapshot = (hit.vpages[-1], False)

    def _supersede(self, held: Holding, unit: int) -> None:
        """Let the snapshot before this one go, or wait to be evicted."""
        if held.snapshot is None or held.snapshot[0] == unit:
            return
        before, moved = held.snapshot
        if moved:
            self.shelf.drop_snapshots(before)
            return
        for group in self._states:
            if self.shelf.companions.has(group, [before])[0]:
                self.shelf.companions.pass_by(group, [before])

    def _reaches(self, held: Holding, length: int) -> bool:
        """Say whether the windows still hold what a query at `length` reads."""
        return all(
            held.firsts[group]
            <= max(
                self._sinks[group],
                self.lives[group].stale(length, self.page_size).stop,
            )
            for group in self._windows
        )

    def _holders(
        self, group: int, holdings: Sequence[Holding]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Count the sequences and the cache's entries that name each page."""
        refs = self.ledger.groups[group].refs
        held, cached = np.zeros_like(refs), np.zeros_like(refs)
        for holding in holdings:
            np.add.at(held, np.asarray(holding.columns[group], np.int64), 1)
        if group == self.shelf.first:
            np.add.at(cached, np.fromiter(self.cache.vpages(), np.int64), 1)
        elif group in self.shelf.others:
            companions = self.shelf.companions
            units = companions.units(group)
            np.add.at(cached, companions.pages(group, units).astype(np.int64), 1)
        return held, cached

    def _lost_companions(self) -> list[str]:
        """Name companions of units that are not in the tree, and spares that are not
        companions."""
        units = set(self.cache.vpages()) if self.shelf.others else set()
        companions = self.shelf.companions
        found = [
            f"group {group} has a page of unit {unit}, which is not cached"
            for group in self.shelf.others
            for unit in companions.units(group).tolist()
            if unit not in units
        ]
        found += [
            f"group {group} may spare a page of unit {unit} that it has not"
            for group, unit in companions.spares
            if not companions.has(group, [unit])[0]
        ]
        return found[:8]
