"""The ledger: the books of a pool, mirrored on the host.

The law: fed the same arguments, a ledger answers with the very ids that the device
verbs give, bit for bit in every book, without waiting for the device. So it is asked
first: it refuses with numbers, and then it has changed nothing.

    ledger = Ledger(num_pages=1024)
    vpages = ledger.handout(0, want=[2, 1], max_pages=4)     # or OutOfPages
    pool, same, ok = handout(pool, 0, [2, 1], 4)             # no need to look at ok

No verb but `compact` looks at more than the pages it is told.
"""

from collections.abc import Iterator

import jax
import numpy as np

from kvmem import errors
from kvmem.pool import refusals
from kvmem.pool.ids import as_group, as_host_ids, as_size, require_one_part
from kvmem.pool.state import Pool, settled_sizes

__all__ = ["Ledger", "LedgerGroup"]


class LedgerGroup:
    """The host's `GroupBooks`: the same fields, changed in place."""

    def __init__(self, num_vpages: int, num_pages: int, extent: int = 1):
        self.v2p = np.full((num_vpages, extent), num_pages, np.int32)
        self.refs = np.zeros(num_vpages, np.int32)
        self.pins = np.zeros(num_vpages, np.int32)
        self.vfree = np.arange(num_vpages - 1, -1, -1, dtype=np.int32)
        self.num_vfree = num_vpages

    @property
    def num_vpages(self) -> int:
        """Virtual pages of the group, V."""
        return self.refs.size

    @property
    def extent(self) -> int:
        """Physical pages of one virtual page, K."""
        return self.v2p.shape[1]

    @property
    def null_vpage(self) -> int:
        """The id that is nobody's: V, one past the end."""
        return self.num_vpages


class Ledger:
    """The host's `Pool`, without the bytes: the same books and the same verbs.

    Args:
        num_pages, num_vpages, extents: as in `init`, and refused as there.
    """

    def __init__(
        self,
        num_pages: int,
        num_vpages: tuple[int, ...] | None = None,
        extents: tuple[int, ...] | None = None,
    ):
        sizes = {"num_pages": num_pages}
        counts, extents = settled_sizes(sizes, num_vpages, extents)
        self.groups = [
            LedgerGroup(count, num_pages, extent)
            for count, extent in zip(counts, extents, strict=True)
        ]
        self.p2v = np.tile(np.int32([self.null_owner]), (num_pages, 1))
        self.free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    @classmethod
    def fresh(cls, pool: Pool) -> "Ledger":
        """Return the ledger of a pool that nothing was taken of; waits for nothing."""
        sizes = [(books.num_vpages, books.extent) for books in pool.groups]
        return cls(pool.num_pages, *zip(*sizes, strict=True))

    @classmethod
    def of(cls, pool: Pool) -> "Ledger":
        """Return the ledger of a pool as it stands; waits for the device once."""
        ledger = cls.fresh(pool)
        for group, books in zip(
            ledger.groups, jax.device_get(pool.groups), strict=True
        ):
            group.v2p, group.refs = books.v2p.copy(), books.refs.copy()
            group.pins, group.vfree = books.pins.copy(), books.vfree.copy()
            group.num_vfree = int(books.num_vfree)
        ledger.p2v, ledger.free = np.array(pool.p2v), np.array(pool.free)
        ledger.num_free = int(pool.num_free)
        return ledger

    @property
    def num_pages(self) -> int:
        """Physical pages of each rank, P."""
        return self.free.size

    @property
    def null_page(self) -> int:
        """The physical id that is nobody's: P, one past the end."""
        return self.num_pages

    @property
    def null_owner(self) -> tuple[int, int]:
        """The owner of a free page, as in `Pool`."""
        return len(self.groups), max(group.num_vpages for group in self.groups)

    def headroom(self, group: int) -> int:
        """Return how many virtual pages a handout to `group` could take now."""
        books = self._group(group)
        return min(self.num_free // books.extent, books.num_vfree)

    def handout(
        self, group: int, want: np.typing.ArrayLike, max_pages: int
    ) -> np.ndarray:
        """Give each of S sequences `want` fresh pages: i32[S, max_pages], null beyond.

        Raises:
            OutOfPages: too few pages are free, or exist.
            ConfigError: a want outside [0, max_pages], or a width that is none.
            InvalidId: no such group, or a want that is not i32[S].
        """
        books, want = self._group(group), as_host_ids(want, "want", 1)
        max_pages = as_size(max_pages, "max_pages")
        if want.size and not 0 <= want.min() <= want.max() <= max_pages:
            raise errors.ConfigError(
                errors.say(
                    f"want of {int(want.min())} to {int(want.max())} pages a sequence",
                    f"each want lies in [0, max_pages={max_pages}]",
                    "Raise max_pages, or hand out in several calls",
                )
            )
        total = int(want.sum(dtype=np.int64))
        self._require_room(group, total, "handout", want.size)
        vpages = np.full((want.size, max_pages), books.null_vpage, np.int32)
        vpages[np.arange(max_pages) < want[:, None]] = self._take(group, total)
        return vpages

    def release(self, group: int, vpages: np.typing.ArrayLike) -> np.ndarray:
        """Drop one reference for each id; return the virtual pages that became free.

        Ids beyond the end are padding, as on the device. The returned ids stand in the
        order in which they joined the free stack.

        Raises:
            InvalidId: a negative id, one listed more often than it is held, or one that
                would be freed while pinned. Then nothing has changed for any id.
        """
        books = self._group(group)
        ids = refusals.without_padding(books, vpages)
        ids, first, counts = np.unique(ids, return_index=True, return_counts=True)
        refusals.require_releasable(group, books, ids, counts)
        left = books.refs[ids] - counts
        books.refs[ids] = left
        freed = ids[left == 0][np.argsort(first[left == 0])]
        self._give_back(books, freed)
        return freed

    def retain(self, group: int, vpages: np.typing.ArrayLike) -> None:
        """Add one reference for each id; ids beyond the end are padding.

        Raises:
            InvalidId: an id that nobody holds. Then nothing has changed for any id.
        """
        books = self._group(group)
        ids = refusals.without_padding(books, vpages)
        refusals.require_held("retain", group, books, ids)
        np.add.at(books.refs, ids, 1)

    def fork(self, group: int, vpages: np.typing.ArrayLike, copied: int) -> np.ndarray:
        """Share a sequence's pages, with a fresh one for column `copied`: i32[M].

        Raises:
            OutOfPages: no page is left for the copy.
            InvalidId: an id that nobody holds, or a column that holds no page.
        """
        books, vpages = self._group(group), as_host_ids(vpages, "vpages", 1)
        copied = int(as_host_ids(copied, "copied", 0))
        refusals.require_held(
            "fork", group, books, refusals.without_padding(books, vpages)
        )
        wants_copy = copied < vpages.size
        if copied < 0 or (wants_copy and vpages[copied] >= books.num_vpages):
            raise errors.InvalidId(
                errors.say(
                    f"fork with a copy of column {copied} of {vpages.size}",
                    "the copied column holds the partial last page",
                    f"Use {vpages.size} when the last page is full",
                )
            )
        self._require_room(group, int(wants_copy), "fork", 1)
        child = np.minimum(vpages, books.null_vpage)
        fresh = self._take(group, int(wants_copy))
        shared = np.arange(vpages.size) != copied
        np.add.at(books.refs, child[shared & (child < books.num_vpages)], 1)
        child[copied : copied + 1] = fresh
        return child

    def pin(self, group: int, vpages: np.typing.ArrayLike) -> None:
        """Keep pages where they are: one pin more for each id.

        Raises:
            InvalidId: an id that nobody holds. Then nothing has changed for any id.
        """
        books = self._group(group)
        ids = refusals.without_padding(books, vpages)
        refusals.require_held("pin", group, books, ids)
        np.add.at(books.pins, ids, 1)

    def unpin(self, group: int, vpages: np.typing.ArrayLike) -> None:
        """Take back one pin for each id.

        Raises:
            InvalidId: an id that is listed more often than it is pinned. Then nothing
                has changed for any id.
        """
        books = self._group(group)
        ids = refusals.without_padding(books, vpages)
        ids, counts = np.unique(ids, return_counts=True)
        refusals.require_pinned(group, books, ids, counts)
        books.pins[ids] -= counts.astype(np.int32)

    def translate(self, group: int, vpages: np.typing.ArrayLike) -> np.ndarray:
        """Return the physical page of each virtual page, null_page for other ids.

        Raises:
            IncompatiblePlan: a virtual page of this group has more than one part.
        """
        require_one_part(self._group(group).extent, group)
        return self.translate_parts(group, vpages)[..., 0]

    def translate_parts(self, group: int, vpages: np.typing.ArrayLike) -> np.ndarray:
        """Return i32[..., K]: the pages of each virtual page, null_page for others."""
        books, vpages = self._group(group), as_host_ids(vpages, "vpages")
        inside = (vpages >= 0) & (vpages < books.num_vpages)
        pages = books.v2p[np.where(inside, vpages, 0)]
        return np.where(inside[..., None], pages, np.int32(self.null_page))

    def compact(self) -> int:
        """Move what is in use and not pinned to the lowest pages; count the moves.

        The books that `kvmem.pool.compact` leaves, bit for bit; reads them all.
        """
        num_groups = len(self.groups)
        in_use = self.p2v[:, 0] < num_groups
        movable = np.flatnonzero(~self._is_pinned())
        num_low = int(in_use[movable].sum())
        low, high = movable[:num_low], movable[num_low:]
        sources, destinations = high[in_use[high]], low[~in_use[low]]
        self.p2v[destinations] = self.p2v[sources]
        self.p2v[sources] = self.null_owner
        moved_to = np.arange(self.num_pages + 1, dtype=np.int32)
        moved_to[sources] = destinations
        for books in self.groups:
            books.v2p = moved_to[books.v2p]
        is_free = self.p2v[:, 0] == num_groups
        self.free[: self.num_free] = np.flatnonzero(is_free)[::-1]
        return sources.size

    def differences(self, pool: Pool) -> tuple[str, ...]:
        """Return the books in which the device and this ledger differ, () if none."""
        pairs = zip(_books(self), _books(pool), strict=True)
        return tuple(
            f"{name} of the device differs from the ledger's"
            for (name, mine), (_, theirs) in pairs
            if not np.array_equal(np.asarray(mine), np.asarray(theirs))
        )

    def _group(self, group: int) -> LedgerGroup:
        return self.groups[as_group(group, len(self.groups))]

    def _is_pinned(self) -> np.ndarray:
        """Return bool[P]: which pages are held in place."""
        pinned = np.zeros(self.num_pages, bool)
        for books in self.groups:
            pinned[books.v2p[books.pins > 0]] = True
        return pinned

    def _require_room(self, group: int, total: int, verb: str, sequences: int) -> None:
        if total <= self.headroom(group):
            return
        books = self.groups[group]
        most = min(self.num_pages // books.extent, books.num_vpages)
        parts = f" of {books.extent} parts" if books.extent > 1 else ""
        raise errors.OutOfPages(
            errors.say(
                f"{verb} of {total} pages{parts} to {sequences} sequences of group "
                f"{group}",
                f"free are {self.num_free} of {self.num_pages} physical pages and "
                f"{books.num_vfree} of {books.num_vpages} virtual ones",
                "Release pages first, or wait until a sequence ends"
                if total <= most
                else f"It can never fit: raise the pool above {most} pages",
            )
        )

    def _take(self, group: int, total: int) -> np.ndarray:
        """Pop both stacks and write the owners down."""
        books = self.groups[group]
        count = total * books.extent
        vpages = books.vfree[books.num_vfree - total : books.num_vfree][::-1]
        pages = self.free[self.num_free - count : self.num_free][::-1]
        books.v2p[vpages] = pages.reshape(total, books.extent)
        books.refs[vpages] = 1
        self.p2v[pages, 0] = group
        self.p2v[pages, 1] = vpages.repeat(books.extent)
        books.num_vfree -= total
        self.num_free -= count
        return vpages

    def _give_back(self, books: LedgerGroup, vpages: np.ndarray) -> None:
        """Push ids on both stacks, in this order."""
        pages = books.v2p[vpages].reshape(-1)
        books.v2p[vpages] = self.null_page
        self.p2v[pages] = self.null_owner
        books.vfree[books.num_vfree : books.num_vfree + vpages.size] = vpages
        self.free[self.num_free : self.num_free + pages.size] = pages
        books.num_vfree += vpages.size
        self.num_free += pages.size


def _books(
    books: "Pool | Ledger",
) -> Iterator[tuple[str, jax.Array | np.ndarray | int]]:
    """Return every book of a pool or ledger, with its name."""
    yield from ((name, getattr(books, name)) for name in ("p2v", "free", "num_free"))
    for i, group in enumerate(books.groups):
        for name in ("v2p", "refs", "pins", "vfree", "num_vfree"):
            yield f"groups[{i}].{name}", getattr(group, name)
