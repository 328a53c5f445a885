"""Own pages: what a draft model keeps of the sequences that run, in a pool of its own.

Its pages are handed out, shared and cached by a table like the target's, under the same
identities, so one tenant's text is nobody else's here either. The law: what is known of
a sequence is what was fed of its accepted tokens. Rows of rejected tokens are passed
over by the next ones that are fed, their empty pages given back, and none of them is
published.

    pages.begin(sequence, may_wait=True)      # room for its tokens, a cached prefix
    mine = pages.settled(sequence)            # how many tokens of it are known
    pages.extend(mine, 33)
    pages.forget(sequence)                    # its whole pages stay in the cache
"""

from collections.abc import Sequence as ListLike

import jax
import numpy as np

from kvmem import errors, prefix
from kvmem import pool as pools
from kvmem.budget import PoolPages, members
from kvmem.geometry import LifecycleGroup, Spread, Topology
from kvmem.serve.buckets import ServeConfig
from kvmem.serve.draft import room
from kvmem.serve.group_records import GroupRecords
from kvmem.serve.holding import Holding
from kvmem.serve.page_table import PageTable
from kvmem.serve.request import Sequence

__all__ = ["Mine", "OwnPages", "paid_for"]


class Mine:
    """What is kept of one sequence: its pages, and the tokens that were fed."""

    __slots__ = ("fed", "held", "is_published")

    def __init__(self, held: Holding, fed: list[int]):
        self.held = held
        self.fed = fed
        self.is_published = False


class OwnPages:
    """The pool of a draft model, and what each sequence holds of it.

    Args:
        groups: of the draft.
        paid: its pool, as a budget pays for it.
        topology: ranks, the target's.
        config: batching, the target's.
        poison: fill fresh pages with NaN bytes.
        sharding: where the pages live.
        order: page order, the target's.
    """

    def __init__(
        self,
        groups: tuple[LifecycleGroup, ...],
        paid: PoolPages,
        topology: Topology,
        config: ServeConfig,
        poison: bool,
        sharding: jax.sharding.NamedSharding | None,
        order: str = "head_major",
    ):
        self.pool = pools.init(
            paid.pages,
            paid.page_nbytes,
            topology.ranks,
            num_vpages=paid.num_vpages,
            extents=paid.extents,
            poison=poison,
            sharding=sharding,
        )
        ledger = pools.Ledger.fresh(self.pool)
        self.page_tokens = Spread.of(groups[0], topology).virtual(groups[0]).page_size
        cache = prefix.PrefixCache(
            self.page_tokens, prefix.policy.NAMED[config.eviction]()
        )
        self.table = PageTable(ledger, cache, [group.lifecycle for group in groups])
        self._records = GroupRecords(groups, topology, order, ledger)
        self._config = config
        self._mine: dict[Sequence, Mine] = {}

    def begin(self, sequence: Sequence, may_wait: bool) -> bool:
        """Hold pages for a sequence's tokens; say whether it may run.

        One that the whole pool could not hold runs without: there is nothing to wait
        for.
        """
        tokens, identity = sequence.tokens, sequence.identity
        chunk, needs = self._config.prefill_chunk, self.table.needs
        if needs.never_fits(needs.peak(len(tokens), chunk)):
            return True
        hit = self.table.match(tokens, identity)
        if not self._config.prefix_cache:
            hit = prefix.Hit(0, (), "the prefix cache is off")
        held = self.table.begin(hit, tokens, identity, chunk)
        if held is None:
            return not may_wait
        self._mine[sequence] = Mine(held, list(tokens[: hit.num_tokens]))
        return True

    def num_fed(self, sequence: Sequence) -> int | None:
        """Return how many tokens of a sequence were fed; None: it has no pages."""
        mine = self._mine.get(sequence)
        return None if mine is None else len(mine.fed)

    def settled(self, sequence: Sequence) -> Mine | None:
        """Forget what was fed of tokens that do not stand; None: nothing is kept."""
        mine = self._mine.get(sequence)
        if mine is None:
            return None
        known = min(len(mine.fed), len(sequence.tokens) - 1)
        at = _first_difference(mine.fed, sequence.tokens, known)
        del mine.fed[at:]
        room.cut(self.table, mine.held, at)
        return mine

    def extend(self, mine: Mine, length: int, most: int = 0) -> int | None:
        """Make room for `length` tokens and up to `most` more; None: not for those."""
        if not self.table.extend(mine.held, length):
            return None
        return room.widen(self.table, mine.held, length, most)

    def passed(self, mine: Mine, tokens: ListLike[int]) -> None:
        """Note that accepted tokens were fed behind those before."""
        mine.fed.extend(tokens)
        self.table.trim(mine.held, len(mine.fed))

    def publish(self, sequence: Sequence) -> None:
        """Offer a sequence's whole pages of accepted tokens to later ones, once; not
        of one whose text is not to be cached."""
        mine = self._mine[sequence]
        is_cached = self._config.prefix_cache and not sequence.is_mixed
        if mine.is_published or not is_cached:
            return
        self.table.publish(mine.fed, mine.held, sequence.identity)
        mine.is_published = True

    def forget(self, sequence: Sequence) -> None:
        """Give a sequence's pages back; whole ones of accepted tokens are cached."""
        if sequence not in self._mine:
            return
        mine = self.settled(sequence)
        mine.is_published = False
        self.publish(sequence)
        self.table.give_back(mine.held)
        del self._mine[sequence]

    def clear(self) -> int:
        """Drop every cached page; return how many became free. Pages that sequences
        hold stay theirs."""
        free = self.table.accounts().free
        self.table.clear_cache()
        return self.table.accounts().free - free

    def export(
        self, sequence: Sequence, group: int, first: int, end: int
    ) -> np.ndarray:
        """Return u8[end - first, record] of tokens that were fed."""
        self.pool = self.table.apply(self.pool)
        vpages = self._columns(sequence, group)
        return self._records.tokens(self.pool, group, vpages, first, end)

    def fill(
        self, sequence: Sequence, group: int, first: int, records: np.ndarray
    ) -> None:
        """Write records of tokens behind those that were fed, into pages held."""
        known = max(first, len(self._mine[sequence].fed))
        rows = np.ascontiguousarray(records[known - first :])
        if len(rows):
            self.pool = self.table.apply(self.pool)
            vpages = self._columns(sequence, group)
            self.pool = self._records.fill(self.pool, group, vpages, known, rows)

    def landed(self, sequence: Sequence, length: int) -> None:
        """Count tokens whose records were written as fed."""
        mine = self._mine[sequence]
        self.passed(mine, sequence.tokens[len(mine.fed) : length])

    def _columns(self, sequence: Sequence, group: int) -> dict[int, int]:
        held = self._mine[sequence].held
        return dict(zip(held.ordinals(group), held.columns[group], strict=True))

    def objections(self) -> tuple[str, ...]:
        """Return the laws of the draft's pool and books that do not hold."""
        self.pool = self.table.apply(self.pool)
        found = (
            *pools.check(self.pool),
            *self.table.ledger.differences(self.pool),
            *self.table.objections(mine.held for mine in self._mine.values()),
        )
        return tuple(f"draft: {each}" for each in found)


def paid_for(
    groups: ListLike[LifecycleGroup], nbytes: int, topology: Topology, order: str
) -> PoolPages:
    """Return the pool that the groups of a draft have of a rank's `nbytes`.

    Raises:
        OutOfPages: not one page of each.
    """
    inside = members.members_of(groups, topology, order, "unified")
    page_nbytes = inside[0].page_nbytes
    pages = nbytes // page_nbytes
    extents = tuple(member.extents for member in inside)
    if pages < sum(extents):
        raise errors.OutOfPages(
            errors.say(
                f"{nbytes:,} B for a draft's pool",
                f"a page of each of its groups takes {sum(extents)} pages of "
                f"{page_nbytes:,} B",
                "Give the pools more memory",
            )
        )
    return PoolPages(
        page_nbytes=page_nbytes,
        pages=pages,
        groups=tuple(range(len(inside))),
        num_vpages=tuple(pages // extent for extent in extents),
        extents=extents,
    )


def _first_difference(fed: ListLike[int], tokens: ListLike[int], most: int) -> int:
    """Return how many of the first `most` tokens are equal before the first that is
    not."""
    for at in range(most):
        if fed[at] != tokens[at]:
            return at
    return most
