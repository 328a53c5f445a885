"""A solved budget: pools of physical pages, and what each lifecycle group has of them.

One pool may serve several groups, target and draft: a page that one leaves behind is
one that another may take. So the pages of a group are what the plan counts with, not a
wall; the walls are the pools.

    solved.pools[0].pages          # physical pages, of pools[0].page_nbytes each
    solved.groups[1].extents       # physical pages that one page of group 1 lies in
"""

import dataclasses

from kvmem.budget.limits import Limit
from kvmem.geometry import Term, width

__all__ = ["Budget", "GroupPages", "Padding", "PoolPages"]


@dataclasses.dataclass(frozen=True)
class GroupPages:
    """What one lifecycle group gets: bytes a rank, tokens of the model.

    Args:
        name, lifecycle, layers, page_size: of the group. `page_size` counts slots of a
            rank; with token shards a virtual page covers dcp times as many tokens.
        page_nbytes: bytes of a physical page of its pool.
        pages: virtual pages of the group that the plan counts with; of states, one a
            sequence.
        tokens: tokens of the model that these keep; of states, none.
        domain: "target" or "draft".
        extents: physical pages that one page of the group lies in.
        payload_nbytes: bytes of one page of the group that mean something.
        pool: index of its pool in `Budget.pools`.
    """

    name: str
    lifecycle: str
    layers: int
    page_size: int
    page_nbytes: int
    pages: int
    tokens: int
    domain: str = "target"
    extents: int = 1
    payload_nbytes: int = 0
    pool: int = 0


@dataclasses.dataclass(frozen=True)
class PoolPages:
    """Physical pages of one size, with one free list.

    Args:
        page_nbytes: bytes of a page.
        pages: how many there are on a rank.
        groups: indices of the groups that take from it, in `Budget.groups`.
        num_vpages: virtual ids of each of these groups: all the pages it could hold.
        extents: physical pages that one page of each of these groups lies in.
    """

    page_nbytes: int
    pages: int
    groups: tuple[int, ...]
    num_vpages: tuple[int, ...]
    extents: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool on one rank."""
        return self.pages * self.page_nbytes

    @property
    def first_wrapping(self) -> int | None:
        """The first page whose flat byte address needs more than 31 bits, if any.

        kvmem addresses by (page, offset) and has no such path; a foreign kernel may.
        """
        first = width.first_wrapping(self.page_nbytes)
        return first if first < self.pages else None


@dataclasses.dataclass(frozen=True)
class Padding:
    """Bytes of a group's pages that mean nothing, and page sizes that waste fewer.

    Args:
        group: its name.
        nbytes: padding of one page of the group, alignment included.
        of_nbytes: bytes that the page takes in its pool.
        page_sizes: of a paged group, the sizes of its own from the first to the last
            that fill the pool's page to 87.5 %; of a state, sizes of the other groups'
            pages. () where no size does: a pool of its own does.
    """

    group: str
    nbytes: int
    of_nbytes: int
    page_sizes: tuple[int, ...]

    @property
    def share(self) -> float:
        """What part of the pool's bytes the padding is."""
        return self.nbytes / self.of_nbytes


@dataclasses.dataclass(frozen=True)
class Budget:
    """A solved budget of one rank; every rank's is the same.

    Args:
        groups: what each lifecycle group has, in the order they were given.
        terms: what a row of the target pool claims on a rank, and what was owed before
            the first.
        limits: every cap in bytes; the smallest wins.
        draft_pages, draft_page_nbytes: a draft pool that follows the target's ids.
        max_pages: a cap in pages that a person set, None when there is none.
        host_terms: claims on the machine's memory, outside the pools.
        pools: the pools of `groups`.
        fixed_nbytes: bytes that others than the pools claim (workspaces).
        step_nbytes: bytes that one more row of pages would take.
        paddings: groups that waste more than an eighth of their pages.
        kind: "unified" (one page size for all) or "split" (each group its own).
        split_tokens: of a unified plan, tokens of the first group that keeps all of
            them if the plan were split; None where that is not more.
    """

    groups: tuple[GroupPages, ...]
    terms: tuple[Term, ...]
    limits: tuple[Limit, ...]
    draft_pages: int = 0
    draft_page_nbytes: int = 0
    max_pages: int | None = None
    host_terms: tuple[Term, ...] = ()
    pools: tuple[PoolPages, ...] = ()
    fixed_nbytes: int = 0
    step_nbytes: int = 0
    paddings: tuple[Padding, ...] = ()
    kind: str = "unified"
    split_tokens: int | None = None

    @property
    def limit(self) -> Limit:
        """The smallest limit."""
        return min(self.limits, key=lambda limit: limit.nbytes)

    @property
    def pool_nbytes(self) -> int:
        """What the pools of one rank may take: the smallest limit."""
        return self.limit.nbytes

    @property
    def used_nbytes(self) -> int:
        """What one rank does take: pools, draft pool and fixed claims."""
        pools = sum(pool.nbytes for pool in self.pools)
        return pools + self.draft_pages * self.draft_page_nbytes + self.fixed_nbytes

    @property
    def left_nbytes(self) -> int:
        """What page rounding, or a cap in pages, leaves unused."""
        return self.pool_nbytes - self.used_nbytes

    @property
    def binding_limit(self) -> str:
        """Name of the limit that decided the number of pages."""
        if self.max_pages is None or self.left_nbytes < self.step_nbytes:
            return self.limit.name
        return "max_pages"

    @property
    def limiting_rank(self) -> int | None:
        """The rank whose memory decided, None where every rank's did."""
        if self.binding_limit != self.limit.name:
            return None
        ranks = [each.nbytes for each in self.limits if each.rank is not None]
        return self.limit.rank if max(ranks, default=0) > self.limit.nbytes else None

    @property
    def largest_id(self) -> int:
        """The largest page id in any pool; the null id is one above."""
        pages = [pool.pages for pool in self.pools]
        return max([*pages, self.draft_pages]) - 1
