"""Needs: how many virtual pages of each group a sequence must have, and when.

Full attention needs a page for every token; a window those from the first that is not
stale, and during a prefill those of the chunk; a state one. The law: a request that may
ever wait for pages fits the pool alone, with all its groups together; and windows of
all that run together find the pages that each of them holds at most.

    needs = Needs(ledger, lives, page_size=16)
    needs.peak(length=2_048, step=256)     # (128, 26, 1)
    needs.in_words((128, 26, 1))           # "128 of full, 26 of window(128), ..."
"""

from collections.abc import Collection, Sequence

from kvmem import pool as pools
from kvmem.geometry import Lifecycle
from kvmem.serve.holding import Holding

__all__ = ["Needs"]


class Needs:
    """The arithmetic of one pool's groups.

    Args:
        ledger: of the pool; only its sizes are read.
        lives: of each group.
        page_size: tokens of a page, in every group.
    """

    def __init__(
        self, ledger: pools.Ledger, lives: Sequence[Lifecycle], page_size: int
    ):
        self.lives = tuple(lives)
        self.page_size = page_size
        self.num_pages = ledger.num_pages
        self.num_vpages = tuple(group.num_vpages for group in ledger.groups)
        self.extents = tuple(group.extent for group in ledger.groups)

    def pages_for(self, length: int) -> int:
        """Return the pages that `length` tokens lie in."""
        return -(-length // self.page_size)

    def peak(self, length: int, step: int) -> tuple[int, ...]:
        """Return the most that a sequence holds of each group on its way to `length`.

        Args:
            step: tokens that one step computes at most.
        """
        return tuple(life.peak(length, self.page_size, step) for life in self.lives)

    def lacking(
        self, held: Holding, length: int, upto: int, step: int | None = None
    ) -> tuple[int, ...]:
        """Return what a sequence lacks of each group.

        Args:
            length: tokens that full attention is to have pages for.
            upto: tokens that windows are to have pages for.
            step: count what windows hold at most on their way there, in steps so long.
        """
        counts = []
        for group, life in enumerate(self.lives):
            columns = len(held.columns[group])
            if life.kind == "state":
                count = 1 - columns
            elif life.kind == "full":
                count = self.pages_for(length) - columns
            elif step is None:
                count = self.pages_for(upto) - held.end(group)
            else:
                count = life.peak(length, self.page_size, max(1, step)) - columns
            counts.append(max(0, count))
        return tuple(counts)

    def promised(self, holdings: Collection[Holding]) -> tuple[int, ...]:
        """Return the vpages of windows that sequences will hold and do not yet.

        What full attention needs for the tokens known is handed out at once.
        """
        total = [0] * len(self.lives)
        for group, life in enumerate(self.lives):
            if life.kind == "window":
                total[group] = sum(
                    max(0, held.peaks[group] - len(held.columns[group]))
                    for held in holdings
                )
        return tuple(total)

    def never_fits(self, counts: Sequence[int]) -> bool:
        """Say whether `counts` of each group are more than there are."""
        rows = tuple(zip(counts, self.extents, self.num_vpages, strict=True))
        pages = sum(count * extent for count, extent, _ in rows)
        return pages > self.num_pages or any(count > most for count, _, most in rows)

    @property
    def limits_in_words(self) -> str:
        """Say how many pages there are, and what a divided pool grants each group."""
        rows = tuple(zip(self.num_vpages, self.extents, self.lives, strict=True))
        if all(most == self.num_pages // extent for most, extent, _ in rows):
            return f"{self.num_pages}"
        parts = ", ".join(f"{most} of {life}" for most, _, life in rows)
        return f"{self.num_pages}, divided into {parts}"

    def in_words(self, counts: Sequence[int]) -> str:
        """Say what `counts` of each group are in physical pages."""
        if len(counts) == 1 and self.extents == (1,):
            return f"{counts[0]} pages of {self.page_size} tokens"
        rows = tuple(zip(counts, self.lives, self.extents, strict=True))
        parts = [
            f"{count} of {life}" + f" in {extent} parts each" * (extent > 1)
            for count, life, extent in rows
        ]
        total = sum(count * extent for count, _, extent in rows)
        return f"{', '.join(parts)}: {total} pages"
