"""Books: who holds which page of which group, at once on the host, later on the device.

Every verb runs at once on the ledger (which gives the very ids that the device will
give) and is written down; `apply` plays what was written on the device pool, in the
same order, before the next step. No verb waits for the device.

A page is held by sequences, and by the cache, once. The law: `num_alone` counts the
pages of each group that the cache holds and nobody else.

    books = Books(ledger)
    pages = books.handout(0, 3)
    pool = books.apply(pool)
"""

import operator
from collections.abc import Callable, Sequence

import numpy as np

from kvmem import pool as pools

__all__ = ["Books"]

_LANES = 32  # ids a device call carries; one trace a verb, whatever the number of pages


class Books:
    """A ledger, which of its pages are cached, and what the device still owes.

    `extents` are the physical pages of one virtual page of each group. Who keeps bytes
    of its own for virtual ids is told of copies by `on_copy(group, source, copy)`.
    """

    def __init__(self, ledger: pools.Ledger):
        self.ledger = ledger
        self.extents = tuple(group.extent for group in ledger.groups)
        self.num_alone = [0 for _ in ledger.groups]
        self._is_cached = [np.zeros(group.num_vpages, bool) for group in ledger.groups]
        self._owed: list[tuple[str, int, tuple[int, ...], int]] = []
        self.on_copy: Callable[[int, int, int], None] | None = None

    @property
    def num_evictable(self) -> int:
        """Physical pages that only the cache holds."""
        return sum(map(operator.mul, self.num_alone, self.extents))

    def is_alone(self, group: int, vpage: int) -> bool:
        """Say whether one holder is left of a page."""
        return int(self.ledger.groups[group].refs[vpage]) == 1

    def count_alone(self, group: int, vpages: Sequence[int]) -> int:
        """Count those of different pages that the cache alone holds."""
        ids = np.asarray(vpages, np.int64)
        alone = self.ledger.groups[group].refs[ids] == 1
        return int((alone & self._is_cached[group][ids]).sum())

    def handout(self, group: int, count: int) -> tuple[int, ...]:
        """Hand out `count` zeroed pages, one holder each.

        Raises:
            OutOfPages: too few are free; then nothing has changed.
        """
        if count == 0:
            return ()
        vpages = self.ledger.handout(group, [count], count)[0]
        taken = tuple(vpages.tolist())
        self._owed.append(("handout", group, taken, 0))
        return taken

    def retain(self, group: int, vpages: tuple[int, ...]) -> None:
        """Add a holder to each of different pages."""
        if vpages:
            self.num_alone[group] -= self.count_alone(group, vpages)
            self.ledger.retain(group, vpages)
            self._owed.append(("retain", group, vpages, 0))

    def release(self, group: int, vpages: tuple[int, ...]) -> None:
        """Take a holder from each of different pages."""
        if vpages:
            self.ledger.release(group, vpages)
            self.num_alone[group] += self.count_alone(group, vpages)
            self._owed.append(("release", group, vpages, 0))

    def fork(self, group: int, vpages: tuple[int, ...], copied: int) -> list[int]:
        """Share a sequence's pages with another; it gets a copy of column `copied`.

        A copy alone, of a page that the cache holds, shares nothing.

        Raises:
            OutOfPages: no page is free for the copy; then nothing has changed.
        """
        child = self.ledger.fork(group, vpages, copied)
        if self.on_copy is not None and copied < len(vpages):
            self.on_copy(group, vpages[copied], int(child[copied]))
        self._owed.append(("fork", group, vpages, copied))
        return child.tolist()

    def keep(self, group: int, vpages: tuple[int, ...]) -> None:
        """Let the cache be the one holder of fresh pages."""
        self._is_cached[group][list(vpages)] = True
        self.num_alone[group] += self.count_alone(group, vpages)

    def cache(self, group: int, vpages: tuple[int, ...]) -> None:
        """Let the cache hold pages that a sequence holds."""
        self.retain(group, vpages)
        self._is_cached[group][list(vpages)] = True

    def forget(self, group: int, vpages: tuple[int, ...]) -> None:
        """Drop the cache's hold on pages."""
        self.num_alone[group] -= self.count_alone(group, vpages)
        self._is_cached[group][list(vpages)] = False
        self.release(group, vpages)

    def apply(self, pool: pools.Pool) -> pools.Pool:
        """Donates `pool`. Play on the device what the host has already decided."""
        for verb, group, vpages, copied in self._owed:
            pool = _PLAY[verb](pool, group, vpages, copied)
        self._owed = []
        return pool


def _play_handout(pool: pools.Pool, group: int, vpages: tuple[int, ...], _: int):
    for at in range(0, len(vpages), _LANES):
        lanes = min(_LANES, len(vpages) - at)
        want = np.asarray([1] * lanes + [0] * (_LANES - lanes), np.int32)
        pool, _, _ = pools.handout(pool, group, want, 1)
    return pool


def _play_release(pool: pools.Pool, group: int, vpages: tuple[int, ...], _: int):
    for lanes in _padded(pool, group, vpages):
        pool, _ = pools.release(pool, group, lanes)
    return pool


def _play_retain(pool: pools.Pool, group: int, vpages: tuple[int, ...], _: int):
    for lanes in _padded(pool, group, vpages):
        pool, _ = pools.retain(pool, group, lanes)
    return pool


def _play_fork(pool: pools.Pool, group: int, vpages: tuple[int, ...], copied: int):
    """Share in lanes of one width; the copied page, if any, is in the last of them."""
    for at, lanes in enumerate(_padded(pool, group, vpages)):
        column = copied - at * _LANES if copied < len(vpages) else _LANES
        column = column if 0 <= column < _LANES else _LANES
        pool, _, _ = pools.fork(pool, group, lanes, column)
    return pool


def _padded(pool: pools.Pool, group: int, vpages: Sequence[int]) -> list[np.ndarray]:
    """Cut ids into rows of one width, the last one padded with null."""
    null = pool.groups[group].null_vpage
    rows = [vpages[at : at + _LANES] for at in range(0, len(vpages), _LANES)]
    return [np.asarray([*row, *[null] * (_LANES - len(row))], np.int32) for row in rows]


_PlayFn = Callable[[pools.Pool, int, tuple[int, ...], int], pools.Pool]

_PLAY: dict[str, _PlayFn] = {
    "handout": _play_handout,
    "release": _play_release,
    "retain": _play_retain,
    "fork": _play_fork,
}
