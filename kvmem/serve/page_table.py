"""The engine's pages: sequences hold them, the prefix cache shares them, by group.

All groups draw from one pool. A sequence holds all its pages under full attention; of a
window those that its next query reads, handed out chunk by chunk and given back as they
become stale; of a recurrent state the one live copy. What it needs is handed out for
all groups together or for none. Pages of a window that a sequence will hold on its way
through the tokens known are promised to it when it begins: no later one begins with
them.

The accounting law, in physical pages: free + evictable + in use = total, where
evictable are those that only the prefix cache holds, and in use are those that a
sequence holds. It follows from the law of each page: its references are the sequences
that hold it, and one for the cache. `objections` counts both anew.

    table = PageTable(ledger, PrefixCache(16), [group.lifecycle for group in groups])
    held = table.begin(table.match(tokens), tokens)   # None when pages cannot be had
    table.extend(held, len(tokens) + 1)
    pool = table.apply(pool)
"""

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvmem import pool as pools
from kvmem.geometry import Lifecycle
from kvmem.geometry.lifecycle import FULL
from kvmem.manage import Manager
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve import audit
from kvmem.serve.audit import Accounts
from kvmem.serve.books import Books
from kvmem.serve.holding import Holding
from kvmem.serve.identity import PLAIN, Identity
from kvmem.serve.needs import Needs
from kvmem.serve.room import Room, as_built
from kvmem.serve.shelf import Shelf

__all__ = ["Accounts", "Cleared", "PageTable"]


class Cleared(NamedTuple):
    """Pages of the tree that a cleared cache dropped: now free, or still in use."""

    freed: tuple[int, ...]
    in_use: tuple[int, ...]


class PageTable:
    """Pages of all lifecycle groups: handed out, shared, cached, given back.

    Args:
        ledger: of the pool.
        cache: the prefix tree.
        lives: of each group.
        manager: quotas and shares of the groups; None: what ids there are.

    It `has_states` where a group keeps a recurrent state, and `drops_pages` where a
    window makes sequences give pages back as they grow.
    """

    def __init__(
        self,
        ledger: pools.Ledger,
        cache: PrefixCache,
        lives: Sequence[Lifecycle] = (FULL,),
        manager: Manager | None = None,
    ):
        self.ledger = ledger
        self.cache = cache
        self.lives = tuple(lives)
        self.page_size = cache.page_size
        self.books = Books(ledger)
        self.shelf = Shelf(self.books, cache, lives)
        self.room = Room(self.shelf, manager or as_built(ledger))
        self.needs = Needs(ledger, lives, cache.page_size)
        self._sinks = tuple(life.sink_pages(self.page_size) for life in self.lives)
        kinds = [life.kind for life in self.lives]
        self._windows = [g for g, kind in enumerate(kinds) if kind == "window"]
        self._states = [g for g, kind in enumerate(kinds) if kind == "state"]
        self.has_states = bool(self._states)
        self.drops_pages = bool(self._windows)
        self._holdings: set[Holding] = set()  # of sequences that hold pages

    @property
    def num_evicted(self) -> int:
        """Physical pages that left the cache to make room."""
        return self.room.num_evicted

    def accounts(self) -> Accounts:
        """Count the physical pages of each kind."""
        free, total = self.ledger.num_free, self.ledger.num_pages
        evictable = self.books.num_evictable
        return Accounts(free, evictable, total - free - evictable, total)

    def match(self, tokens: Sequence[int], identity: Identity = PLAIN) -> Hit:
        """Find the cached pages that a text of this identity begins with.

        A question: it evicts nothing and leaves the order of eviction as it is.
        """
        return self.shelf.match(tokens, *self._where(identity))

    def begin(
        self,
        hit: Hit,
        tokens: Sequence[int],
        identity: Identity = PLAIN,
        step: int | None = None,
    ) -> Holding | None:
        """Hold a prefix hit and pages for the tokens known; all or nothing.

        States are copied from the hit's snapshots, and so is a page that it uses in
        part. Windows get pages for the first step alone, and only if those of the whole
        way can be had now, beside what others were promised.

        Args:
            hit: what `match` found, for these tokens.
            tokens: everything known of the text.
            step: tokens that one step computes at most; None: all of them.
        """
        return self._begin(hit, tokens, identity, step, self.promised())

    def _begin(
        self,
        hit: Hit,
        tokens: Sequence[int],
        identity: Identity,
        step: int | None,
        beside: Sequence[int],
    ) -> Holding | None:
        """Begin if what is `beside`, of each group, can still be had too."""
        length, past = len(tokens), hit.num_tokens
        step = length - past if step is None else step
        held, copied = self.shelf.named(hit, self._sinks)
        keeping = [list(vpages) for vpages in held.columns]
        for group, vpage in copied:
            keeping[group].append(vpage)
        most = self.needs.lacking(held, length, length, step)
        if not self.room.can_make(_sum(most, beside), keeping):
            return None
        held.known, held.in_chunks = length, True
        held.peaks = self.needs.peak(length, max(1, step))
        num_used = len(hit.vpages) + (hit.copied is not None)
        used = tokens[: num_used * self.page_size]
        self.cache.touch(used, *self._where(identity))
        for group, vpages in enumerate(held.columns):
            self.books.retain(group, tuple(vpages))
        source = [] if hit.copied is None else copied
        for group, vpage in source:  # it is read below, and nobody else may hold it
            self.books.retain(group, (vpage,))
        counts = self.needs.lacking(held, length, min(length, past + step))
        is_made = self.room.make(counts, kept=copied)
        if is_made:
            self.shelf.use(held, hit)
            self._hand_out(held, counts, copied)
        for group, vpage in source:
            self.books.release(group, (vpage,))
        if not is_made:
            self.give_back(held)
        return held if is_made else None

    def extend(self, held: Holding, length: int) -> bool:
        """Make room for `length` tokens in every group, or in none; say which.

        Pages come zeroed, by evicting cached ones if need be.
        """
        if length <= held.room:
            return True
        counts = self.needs.lacking(held, length, length)
        if not self.room.make(counts):
            return False
        self._hand_out(held, counts)
        if length > held.known:
            held.known, held.in_chunks = length, False
            held.peaks = self.needs.peak(length, 1)
        return True

    def promised(self) -> tuple[int, ...]:
        """Return the vpages of each group that sequences will hold and do not yet."""
        return self.needs.promised(self._holdings)

    def trim(self, held: Holding, history: int) -> None:
        """Give back the pages of windows that no query from `history` on reads.

        Those that are cached stay with their text for others, the first to be evicted.
        """
        if held.in_chunks and history >= held.known:  # from now on one token a step
            held.in_chunks, held.peaks = False, self.needs.peak(held.known, 1)
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
                self.shelf.pass_by(group, units[shared].tolist())
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
        self.shelf.supersede(held, unit)
        counts = [int(group in lacking) for group in range(len(self.lives))]
        beside = _sum(counts, self.promised())
        if not self.room.can_make(beside) or not self.room.make(counts):
            return False
        for group in lacking:
            (copy,) = self.books.fork(group, tuple(held.columns[group]), 0)
            self.shelf.put_snapshot(group, unit, copy)
        held.snapshot = (unit, moves and bool(lacking))
        return True

    def fork(self, held: Holding, length: int) -> Holding | None:
        """Share the pages of `length` tokens with another sample.

        A partial page and a state are copied: both samples write there next.

        Returns:
            The other sample's pages, or None when there is no room for the copies, or
            for what its windows will hold.
        """
        whole = self.needs.pages_for(length)
        cut = [tuple(held.within(group, whole)) for group in range(len(self.lives))]
        partial = length % self.page_size > 0
        is_copied = [
            bool(vpages) and (partial or group in self._states)
            for group, vpages in enumerate(cut)
        ]
        counts = [int(copied) for copied in is_copied]
        child = Holding(self._sinks)
        child.firsts = list(held.firsts)
        child.known, child.peaks = length, self.needs.peak(length, 1)
        child.columns = [list(vpages) for vpages in cut]
        promised = self.needs.promised([child, *self._holdings])
        beside = _sum(counts, promised)
        if not self.room.can_make(beside) or not self.room.make(counts):
            return None
        for group, vpages in enumerate(cut):
            copied = len(vpages) - is_copied[group]
            child.columns[group] = self.books.fork(group, vpages, copied)
        child.snapshot = held.snapshot and (held.snapshot[0], False)
        child.older = held.older and (held.older[0], False)
        self._measure(child)
        self._holdings.add(child)
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

        Raises:
            ConfigError: `length` is below zero, or beyond the text or its pages.
        """
        held.require_length(length, len(tokens))
        if not self._states and self._reaches(held, length):
            found, computed = self.fork(held, length), length
        else:
            hit = self.match([*tokens[:length], 0], identity)
            none = (0,) * len(self.lives)  # it runs, and asks for no more than it had
            found = self._begin(hit, tokens[:length], identity, None, none)
            computed = hit.num_tokens
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
        self._holdings.discard(held)

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
        return audit.objections(self.accounts(), self.shelf, tuple(holdings))

    def apply(self, pool: pools.Pool) -> pools.Pool:
        """Donates `pool`. Play on the device what the host has already decided."""
        return self.books.apply(pool)

    def _where(self, identity: Identity):
        return identity.extras, identity.run_extras(self.page_size)

    def _hand_out(
        self,
        held: Holding,
        counts: Sequence[int],
        copied: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Give a sequence fresh pages, the first a copy where it begins from one."""
        sources = dict(copied)
        for group, count in enumerate(counts):
            if group in sources:
                held.columns[group] += self.books.fork(group, (sources[group],), 0)
                count -= 1
            held.columns[group].extend(self.books.handout(group, count))
        self._holdings.add(held)
        self._measure(held)

    def _measure(self, held: Holding) -> None:
        """Note how many tokens fit the pages held."""
        ends = [
            held.end(group)
            for group, life in enumerate(self.lives)
            if life.kind != "state"
        ]
        held.room = min(ends) * self.page_size if ends else np.iinfo(np.int32).max

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


def _sum(counts: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.add, counts, others))
