"""Records of several lifecycle groups, out of a sequence's pages and into them.

The law: a token's record in one group, or the record of a state, is the same bytes at
every topology and page size; which page of the pool holds it is looked up here and
nowhere else in the way of a store.

    records = GroupRecords(groups, topology, order, ledger)
    records.tokens(pool, 1, {40: 7, 41: 3}, first=640, end=672)   # u8[32, record]
    pool = records.fill_state(pool, 2, vpage, record)
"""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as ListLike

import numpy as np

from kvmem import canonical, transfer
from kvmem import pool as pools
from kvmem.geometry import LifecycleGroup, Spread, Topology
from kvmem.serve.request import Sequence
from kvmem.serve.step import envelopes

__all__ = ["GroupRecords"]

_THREADS = 2
Pages = Mapping[int, int]  # virtual pages by which page of the text each one is


class GroupRecords:
    """The records of every group of one pool.

    Args:
        groups: the pool's groups.
        topology: ranks.
        order: the page order.
        ledger: says which physical pages a virtual one is.
    """

    def __init__(
        self,
        groups: ListLike[LifecycleGroup],
        topology: Topology,
        order: str,
        ledger: pools.Ledger,
    ):
        self.groups = tuple(groups)
        self._plans = [canonical.plan(group, topology, order) for group in groups]
        self._cuts = envelopes(groups, topology, order)
        rows = [(Spread.of(group, topology), group) for group in groups]
        self._page_tokens = [s.virtual(group).page_size for s, group in rows]
        self._ledger = ledger

    def tokens(
        self, pool: pools.Pool, group: int, vpages: Pages, first: int, end: int
    ) -> np.ndarray:
        """Return u8[end - first, record] of tokens that lie in `vpages`."""
        return transfer.export_records(
            pool.pages,
            self._table(group, vpages),
            self._plans[group],
            num_tokens=end - first,
            first_token=first,
            threads=_THREADS,
        )

    def fill(
        self,
        pool: pools.Pool,
        group: int,
        vpages: Pages,
        first: int,
        records: np.ndarray,
    ) -> pools.Pool:
        """Donates `pool`. Write the records of the tokens from `first` on."""
        pages = transfer.import_records(
            pool.pages,
            self._table(group, vpages),
            records,
            self._plans[group],
            first_token=first,
            threads=_THREADS,
        )
        return dataclasses.replace(pool, pages=pages)

    def state(self, pool: pools.Pool, group: int, vpage: int) -> np.ndarray:
        """Return u8[record] of a live state or of a snapshot."""
        plan, cut = self._plans[group], self._cuts[group]
        return transfer.export_state(pool.pages, self._parts(group, vpage), plan, cut)

    def fill_state(
        self, pool: pools.Pool, group: int, vpage: int, record: np.ndarray
    ) -> pools.Pool:
        """Donates `pool`. Let a state be what a record says."""
        plan, cut = self._plans[group], self._cuts[group]
        parts = self._parts(group, vpage)
        pages = transfer.import_state(pool.pages, parts, record, plan, cut)
        return dataclasses.replace(pool, pages=pages)

    def export(self, pool: pools.Pool, sequence: Sequence) -> dict[str, np.ndarray]:
        """Return what a sequence holds of each group, by the group's name.

        Of full attention u8[num_computed, record], of a window the trailing tokens that
        it holds, of a state u8[1, record].
        """
        found, held = {}, sequence.held
        for number, group in enumerate(self.groups):
            vpages = dict(zip(held.ordinals(number), held.columns[number], strict=True))
            if group.is_state:
                (live,) = held.columns[number]
                found[group.name] = self.state(pool, number, live)[None]
                continue
            first = 0
            if group.lifecycle.kind == "window":
                first = held.firsts[number] * self._page_tokens[number]
            end = max(first, sequence.num_computed)
            found[group.name] = self.tokens(pool, number, vpages, first, end)
        return found

    def _table(self, group: int, vpages: Pages) -> np.ndarray:
        """Return physical pages by their place in the text, 0 where none is held.

        Those of a virtual page in parts follow each other.
        """
        extent = self._ledger.groups[group].extent
        table = np.zeros((max(vpages, default=-1) + 1, extent), np.int64)
        if vpages:
            ids = self._ledger.translate_parts(group, list(vpages.values()))
            table[list(vpages)] = ids
        return table.reshape(-1)

    def _parts(self, group: int, vpage: int) -> np.ndarray:
        return self._ledger.translate_parts(group, [vpage])[0]
