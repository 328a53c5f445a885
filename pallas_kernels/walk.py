"""Walk: a block's tiles of records while a kernel runs, and what they stand on.

Every kernel of records walks the same way: a share of the tiles, the lists that say
where they are, and rows that are cut where a text begins or ends. The law: a copy that
cuts no token moves every slot of a tile.

    here = walk.begin(shares, tiles, num_tokens, inputs, held)
    target = out_ref.at[here.row(k) + s, here.in_record(k)]
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring, words
from pallas_kernels.records import Tiles

__all__ = ["Walk", "begin", "scratch"]


@dataclasses.dataclass(frozen=True)
class Walk:
    """A block's tiles while a kernel runs: which bytes unit k of its share moves.

    Units of a page go tile by tile, and each tile run by run: records are written in
    their own order, and what is known of a tile's slots serves all of its runs.
    """

    work: ring.Work
    tiles: Tiles
    num_runs: int
    num_tokens: int
    ids: object  # ref i32[span], the block's part of the table of pages
    runs: object  # ref i32[padded 2 K]
    first: object  # i32[] token of row 0

    def page(self, k):
        """Return the page that unit k reads or writes."""
        return self.ids[self.work.entry(k) - self.work.base]

    def in_page(self, k, s):
        """Return the words of slot s of the tile, in its page."""
        stride = self.tiles.layout.slot_stride // words.WORD_NBYTES
        start = self._run(k, 0) + (self._first_slot(k) + s) * stride
        return pl.ds(start, self.tiles.row_words)

    def in_record(self, k):
        """Return the words of the tile's run, in a record."""
        return pl.ds(self._run(k, 1), self.tiles.row_words)

    def slot(self, k):
        """Return slot 0 of the tile, counted over the whole table of pages."""
        return self.work.entry(k) * self.tiles.layout.slots + self._first_slot(k)

    def row(self, k):
        """Return the row of the records that slot 0 of the tile is."""
        return self.slot(k) - self.first

    def is_new_tile(self, k):
        """Answer whether the unit before this one was of other slots, or none."""
        return (k == 0) | (lax.rem(self.work.chunk(k), self.num_runs) == 0)

    def bounds(self, k):
        """Return the slots [low, high) of the tile that have a row."""
        low = jnp.maximum(-self.row(k), 0)
        return low, jnp.minimum(self.tiles.slots, self.num_tokens - self.row(k))

    def wanted(self, k, num_pages: int):
        """Answer whether any slot of unit k has a row, and its page is somebody's."""
        low, high = self.bounds(k)
        return (low < high) & ring.guarded(self.page(k), num_pages)

    def by_words(self, k, tile: Callable, word: Callable) -> None:
        """Move a whole tile by `tile(rows, words)`, a cut one by `word(slot, word)`."""
        low, high = self.bounds(k)
        width = self.tiles.row_words
        is_whole = high - low == self.tiles.slots

        @pl.when(is_whole)
        def _():
            tile(pl.ds(self.row(k), self.tiles.slots), self.in_record(k))

        @pl.when(~is_whole)
        def _():
            def one(i, _):
                word(low + i // width, lax.rem(i, width))

            lax.fori_loop(0, (high - low) * width, one, None)

        plgpu.commit_smem()  # before a copy reads the tile, or writes it again

    def _run(self, k, column):
        run = lax.rem(self.work.chunk(k), self.num_runs)
        return self.runs[2 * run + column] // words.WORD_NBYTES

    def _first_slot(self, k):
        return self.work.chunk(k) // self.num_runs * self.tiles.slots


def begin(shares: lists.Shares, tiles: Tiles, num_tokens: int, inputs, held) -> Walk:
    """Bring this block's lists to shared memory; return where its tiles stand.

    Args:
        inputs: refs of ids i32[padded n], table i32[2 K], first i32[1].
        held: scratch for ids and table, and the barrier that both arrive at.
    """
    ids, table, first = inputs
    id_ref, run_ref, listed = held
    work = ring.my_share(shares)
    ring.bulk_load(ids.at[pl.ds(work.base, shares.span)], id_ref, listed)
    ring.bulk_load(table, run_ref, listed)
    plgpu.barrier_wait(listed)
    num_runs = shares.per_entry // tiles.per_run
    return Walk(work, tiles, num_runs, num_tokens, id_ref, run_ref, first[0])


def scratch(slots, shares: lists.Shares, table, tiles: Tiles) -> tuple:
    """Return the scratch of every kernel: tiles, ids, table, and their barriers."""
    return (
        plgpu.SMEM((slots.stages, tiles.slots, tiles.row_words), jnp.uint32),
        plgpu.SMEM((shares.span,), jnp.int32),
        plgpu.SMEM((limits.round_up(2 * table.shape[0], 4),), jnp.int32),
        plgpu.Barrier(num_barriers=slots.stages, num_arrivals=tiles.slots),
        plgpu.Barrier(num_arrivals=2),
    )
