"""The engine's pages: the host's books, the prefix cache, and what the device still
owes.

Every verb runs at once on the host (`pool.Ledger` gives the very ids that the device
will give) and is written down as an operation; `apply` plays the operations on the
device pool, in the same order, before the next step. No verb waits for the device.

The accounting law, in pages: free + evictable + in use = total, where evictable are
those that only the prefix cache holds, and in use are those that a sequence holds. It
follows from the law of each page: its references are the tables that name it, and one
for the cache. `objections` counts both anew.

    table = PageTable(ledger, PrefixCache(16))
    pages = table.take(3)          # None when three cannot be had even by evicting
    pool = table.apply(pool)
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvmem import pool as pools
from kvmem.prefix import Hit, PrefixCache
from kvmem.serve.identity import PLAIN, Identity

__all__ = ["Accounts", "Cleared", "PageTable"]

_GROUP = 0
_LANES = 32  # ids a device call carries; one trace a verb, whatever the number of pages


class Accounts(NamedTuple):
    """Where every page is: free, cached only, in use by a sequence, and in all."""

    free: int
    evictable: int
    in_use: int
    total: int


class Cleared(NamedTuple):
    """Pages that a cleared cache dropped: those now free, those still in use."""

    freed: tuple[int, ...]
    in_use: tuple[int, ...]


class PageTable:
    """Pages of one lifecycle group: handed out, shared, cached, given back."""

    def __init__(self, ledger: pools.Ledger, cache: PrefixCache):
        self.ledger = ledger
        self.cache = cache
        self.page_size = cache.page_size
        self.num_evicted = 0
        self._is_cached = np.zeros(ledger.groups[_GROUP].num_vpages, bool)
        self._num_evictable = 0
        self._owed: list[tuple[str, tuple[int, ...], int]] = []

    @property
    def null_vpage(self) -> int:
        """The id that is nobody's."""
        return self.ledger.groups[_GROUP].null_vpage

    def accounts(self) -> Accounts:
        """Count the pages of each kind."""
        free, total = self.ledger.num_free, self.ledger.num_pages
        evictable = self._num_evictable
        return Accounts(free, evictable, total - free - evictable, total)

    def pages_for(self, length: int) -> int:
        """Return the pages that `length` tokens need."""
        return -(-length // self.page_size)

    def match(self, tokens: Sequence[int], identity: Identity = PLAIN) -> Hit:
        """Find the cached pages that a text of this identity begins with.

        A question: it evicts nothing and leaves the order of eviction as it is.
        """
        marks = identity.run_extras(self.page_size)
        return self.cache.match(tokens, identity.extras, marks)

    def can_take(self, count: int, keeping: Sequence[int] = ()) -> bool:
        """Say whether `count` pages may be had, by eviction if need be.

        `take` has the last word: a page behind which another is in use stays.

        Args:
            count: how many.
            keeping: cached pages that are not to be evicted for it.
        """
        if count <= self.ledger.num_free:
            return True
        kept = self._count_evictable(keeping)
        return count <= self.ledger.num_free + self._num_evictable - kept

    def take(self, count: int) -> tuple[int, ...] | None:
        """Hand out `count` zeroed pages, evicting cached ones if need be; or None."""
        if not self.can_take(count) or not self._make_room(count):
            return None
        if count == 0:
            return ()
        vpages = self.ledger.handout(_GROUP, [count], count)[0]
        taken = tuple(int(v) for v in vpages)
        self._owed.append(("handout", taken, 0))
        return taken

    def give_back(self, vpages: Iterable[int]) -> None:
        """Drop a sequence's hold on its pages, tail first."""
        self._release(tuple(reversed(tuple(vpages))))

    def adopt(
        self, hit: Hit, tokens: Sequence[int], identity: Identity = PLAIN
    ) -> list[int]:
        """Take a hold on the pages of a prefix hit, for one more sequence."""
        marks = identity.run_extras(self.page_size)
        self.cache.touch(tokens[: hit.num_tokens], identity.extras, marks)
        self._retain(hit.vpages)
        return list(hit.vpages)

    def publish(
        self, tokens: Sequence[int], vpages: Sequence[int], identity: Identity = PLAIN
    ) -> list[int]:
        """Offer the whole pages of computed, accepted tokens to later requests.

        Where the cache has a page of this text already, the sequence takes a hold on
        that one and gives its own copy back. So whoever holds a page holds those
        before it too, and the head of a cached text is as busy as its tail.

        Returns:
            The sequence's pages from now on.
        """
        where = identity.extras, identity.run_extras(self.page_size)
        adopted = self.cache.publish(tokens, vpages, *where)
        self._retain(adopted)
        self._is_cached[list(adopted)] = True
        cached = self.cache.pages(tokens, *where)
        pairs = zip(vpages, cached, strict=False)
        copies = [(mine, theirs) for mine, theirs in pairs if mine != theirs]
        self._retain(tuple(theirs for _, theirs in copies))
        self._release(tuple(mine for mine, _ in reversed(copies)))
        return [*cached, *vpages[len(cached) :]]

    def fork(self, vpages: Sequence[int], length: int) -> list[int] | None:
        """Share the pages of `length` tokens with another sample; copy a partial one.

        Returns:
            The other sample's pages, or None when no page is left for the copy.
        """
        held = tuple(vpages[: self.pages_for(length)])
        copied = len(held) - 1 if length % self.page_size else len(held)
        if copied < len(held):
            if not self.can_take(1) or not self._make_room(1):
                return None
        child = self.ledger.fork(_GROUP, held, copied)
        self._owed.append(("fork", held, copied))
        return [int(v) for v in child]

    def clear_cache(self) -> Cleared:
        """Drop every cached page; pages that sequences hold stay theirs."""
        held = self.cache.clear()
        self._forget(held)
        refs = self.ledger.groups[_GROUP].refs
        return Cleared(
            tuple(v for v in held if refs[v] == 0), tuple(v for v in held if refs[v])
        )

    def objections(self, tables: Iterable[Sequence[int]]) -> tuple[str, ...]:
        """Count the holders of every page anew; return the laws broken.

        Args:
            tables: the pages of every sequence that holds any.
        """
        refs = self.ledger.groups[_GROUP].refs
        held, cached = np.zeros_like(refs), np.zeros_like(refs)
        for vpages in tables:
            np.add.at(held, np.asarray(vpages, np.int64), 1)
        np.add.at(cached, np.fromiter(self.cache.vpages(), np.int64), 1)
        found = [
            f"page {page} has {refs[page]} references, {held[page]} tables name it and "
            f"the cache {cached[page]} times"
            for page in np.flatnonzero((refs != held + cached) | (cached > 1))[:8]
        ]
        free, evictable, in_use, total = self.accounts()
        counted = int(((cached > 0) & (held == 0)).sum()), int((held > 0).sum())
        if (evictable, in_use) != counted or free + sum(counted) != total:
            found.append(
                f"{free} free, {counted[0]} evictable and {counted[1]} in use of "
                f"{total} pages, where the accounts say {evictable} and {in_use}"
            )
        return tuple(found)

    def apply(self, pool: pools.Pool) -> pools.Pool:
        """Donates `pool`. Play on the device what the host has already decided."""
        for verb, vpages, copied in self._owed:
            pool = _PLAY[verb](pool, vpages, copied, self.null_vpage)
        self._owed = []
        return pool

    def _make_room(self, count: int) -> bool:
        """Evict what `count` pages are short of; say whether they are free now."""
        short = count - self.ledger.num_free
        if short > 0:
            gone = self.cache.evict(short, self._is_idle)
            self.num_evicted += len(gone)
            self._forget(gone)
        return count <= self.ledger.num_free

    def _is_idle(self, vpage: int) -> bool:
        return int(self.ledger.groups[_GROUP].refs[vpage]) == 1

    def _count_evictable(self, vpages: Sequence[int]) -> int:
        """Count the pages that the cache alone holds."""
        ids = np.asarray(vpages, np.int64)
        alone = self.ledger.groups[_GROUP].refs[ids] == 1
        return int((alone & self._is_cached[ids]).sum())

    def _forget(self, vpages: tuple[int, ...]) -> None:
        """Drop the cache's hold on pages that have left the tree."""
        self._num_evictable -= self._count_evictable(vpages)
        self._is_cached[np.asarray(vpages, np.int64)] = False
        self._release(vpages)

    def _retain(self, vpages: tuple[int, ...]) -> None:
        if vpages:
            self._num_evictable -= self._count_evictable(vpages)
            self.ledger.retain(_GROUP, vpages)
            self._owed.append(("retain", vpages, 0))

    def _release(self, vpages: tuple[int, ...]) -> None:
        if vpages:
            self.ledger.release(_GROUP, vpages)
            self._num_evictable += self._count_evictable(vpages)
            self._owed.append(("release", vpages, 0))


def _play_handout(pool: pools.Pool, vpages: tuple[int, ...], _: int, __: int):
    for at in range(0, len(vpages), _LANES):
        lanes = min(_LANES, len(vpages) - at)
        want = np.asarray([1] * lanes + [0] * (_LANES - lanes), np.int32)
        pool, _, _ = pools.handout(pool, _GROUP, want, 1)
    return pool


def _play_release(pool: pools.Pool, vpages: tuple[int, ...], _: int, null: int):
    for lanes in _padded(vpages, null):
        pool, _ = pools.release(pool, _GROUP, lanes)
    return pool


def _play_retain(pool: pools.Pool, vpages: tuple[int, ...], _: int, null: int):
    for lanes in _padded(vpages, null):
        pool, _ = pools.retain(pool, _GROUP, lanes)
    return pool


def _play_fork(pool: pools.Pool, vpages: tuple[int, ...], copied: int, null: int):
    """Share in lanes of one width; the copied page, if any, is in the last of them."""
    for at, lanes in enumerate(_padded(vpages, null)):
        column = copied - at * _LANES if copied < len(vpages) else _LANES
        column = column if 0 <= column < _LANES else _LANES
        pool, _, _ = pools.fork(pool, _GROUP, lanes, column)
    return pool


def _padded(vpages: Sequence[int], null: int) -> list[np.ndarray]:
    """Cut ids into rows of one width, the last one padded with null."""
    rows = [vpages[at : at + _LANES] for at in range(0, len(vpages), _LANES)]
    return [np.asarray([*row, *[null] * (_LANES - len(row))], np.int32) for row in rows]


_PLAY = {
    "handout": _play_handout,
    "release": _play_release,
    "retain": _play_retain,
    "fork": _play_fork,
}
