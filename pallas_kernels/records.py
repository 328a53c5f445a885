"""Records: which bytes of a page are which bytes of a token's record, as integers.

Letters: T slots of a page, n entries of a table of pages, K runs. A run is a part of a
record that is contiguous in a slot: bytes [page_offset + s * slot_stride, + nbytes) of
a page are bytes [record_offset, + nbytes) of the record of slot s. Runs of one call
differ only in their two offsets; those of another width are another call.

A record's runs stand at multiples of `alignment` bytes: 16, or 4 (None: 16 where the
record itself is a multiple of 16).

Row r of the records is token first + r of the table: slot (first + r) mod T of entry
(first + r) div T. The law: a copy that cuts no token moves every slot of a tile.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring, words

__all__ = ["Tiles", "Walk", "host_views", "indices", "objection", "padded_table"]
__all__ += ["scratch", "share_of", "tiles_of", "walk"]

_TILE_NBYTES = 32 << 10
_TILE_WORDS = 8_192  # of registers: 64 of each of a block's 128 lanes
_STAGED_NBYTES = 96 << 10
LANES = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The slots that one unit of work moves of one run of one page."""

    slots: int  # of a page, T
    nbytes: int
    slot_stride: int
    by_words: bool  # records stand at multiples of 4 bytes only

    @property
    def tile_slots(self) -> int:
        """Slots of a tile: a divisor of T that shared memory, or registers, hold."""
        fitting = [s for s in range(1, self.slots + 1) if self.slots % s == 0]
        most = _TILE_WORDS * words.WORD_NBYTES if self.by_words else _TILE_NBYTES
        small = [s for s in fitting if s * self.nbytes <= most] or [1]
        if self.by_words:
            whole = [s for s in small if s * self.nbytes // 4 % LANES == 0]
            small = whole or small
        return max(small)

    @property
    def per_run(self) -> int:
        """Tiles of one run of one page."""
        return self.slots // self.tile_slots

    @property
    def tile_nbytes(self) -> int:
        """Bytes of a tile."""
        return self.tile_slots * self.nbytes

    @property
    def registers(self) -> plgpu.Layout:
        """How a tile lies in registers: a word a lane, in rows of any pitch."""
        shape = self.tile_slots, self.nbytes // words.WORD_NBYTES
        return plgpu.Layout.WG_STRIDED(shape, vec_size=1)

    @property
    def stages(self) -> int:
        """Tiles that are on their way at once."""
        return max(1, min(16, _STAGED_NBYTES // self.tile_nbytes))


@dataclasses.dataclass(frozen=True)
class Walk:
    """A block's tiles while a kernel runs: which bytes unit k of its share moves."""

    work: ring.Work
    tiles: Tiles
    num_tokens: int
    ids: object  # ref i32[span], the block's part of the table of pages
    runs: object  # ref i32[padded 2 K]
    first: object  # i32[] token of row 0

    @property
    def width(self) -> int:
        """Words of a row of a tile."""
        return self.tiles.nbytes // words.WORD_NBYTES

    def page(self, k):
        """Return the page that unit k reads or writes."""
        return self.ids[self.work.entry(k) - self.work.base]

    def in_page(self, k, s):
        """Return the words of slot s of the tile, in its page."""
        stride = self.tiles.slot_stride // words.WORD_NBYTES
        return pl.ds(self._run(k, 0) + (self._first_slot(k) + s) * stride, self.width)

    def in_record(self, k):
        """Return the words of the tile's run, in a record."""
        return pl.ds(self._run(k, 1), self.width)

    def row(self, k):
        """Return the row of the records that slot 0 of the tile is."""
        slot = self.work.entry(k) * self.tiles.slots + self._first_slot(k)
        return slot - self.first

    def bounds(self, k):
        """Return the slots [low, high) of the tile that have a row."""
        low = jnp.maximum(-self.row(k), 0)
        return low, jnp.minimum(self.tiles.tile_slots, self.num_tokens - self.row(k))

    def wanted(self, k, num_pages: int):
        """Answer whether any slot of unit k has a row, and its page is somebody's."""
        low, high = self.bounds(k)
        return (low < high) & ring.guarded(self.page(k), num_pages)

    def by_words(self, k, tile: Callable, word: Callable) -> None:
        """Move a whole tile by `tile(rows, words)`, a cut one by `word(slot, word)`."""
        low, high = self.bounds(k)
        is_whole = high - low == self.tiles.tile_slots

        @pl.when(is_whole)
        def _():
            tile(pl.ds(self.row(k), self.tiles.tile_slots), self.in_record(k))

        @pl.when(~is_whole)
        def _():
            def one(i, _):
                word(low + i // self.width, lax.rem(i, self.width))

            lax.fori_loop(0, (high - low) * self.width, one, None)

        plgpu.commit_smem()  # before a copy reads the tile, or writes it again

    def _run(self, k, column):
        at = 2 * (self.work.chunk(k) // self.tiles.per_run) + column
        return self.runs[at] // words.WORD_NBYTES

    def _first_slot(self, k):
        return lax.rem(self.work.chunk(k), self.tiles.per_run) * self.tiles.tile_slots


def walk(shares: lists.Shares, tiles: Tiles, num_tokens: int, inputs, held) -> Walk:
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
    return Walk(work, tiles, num_tokens, id_ref, run_ref, first[0])


def tiles_of(records, nbytes: int, slot_stride: int, slots: int, alignment) -> Tiles:
    """Return the tiles of a call: by words where runs of records are not aligned."""
    if alignment is None:
        aligned = records.shape[1] % limits.ALIGNMENT == 0
        alignment = limits.ALIGNMENT if aligned else words.WORD_NBYTES
    return Tiles(slots, nbytes, slot_stride, alignment % limits.ALIGNMENT != 0)


def indices(
    pages, ids, table, records, first, *, nbytes, slot_stride, slots, num_pages
):
    """Return where the runs of tokens stand: page, byte of the page, of the record.

    i32[tokens, 1, 1], i32[tokens, K, nbytes], i32[1, K, nbytes]; the page is P, which
    is nobody's, where a token has none.
    """
    num_pages = pages.shape[0] if num_pages is None else num_pages
    token = first + jnp.arange(records.shape[0], dtype=jnp.int32)
    entry, slot = jnp.divmod(token, slots)
    page = ids.at[entry].get(mode="fill", fill_value=lists.NULL)
    page = jnp.where(lists.inside(page, num_pages), page, pages.shape[0])
    byte = jnp.arange(nbytes, dtype=jnp.int32)
    at = table[None, :, 0, None] + (slot * slot_stride)[:, None, None]
    in_record = table[None, :, 1, None] + byte[None, None, :]
    return page[:, None, None], at + byte[None, None, :], in_record


def host_views(pages: np.ndarray, table, *, nbytes, slot_stride, slots):
    """Yield (u8[P, T, nbytes] of the pool, first byte in a record) for each run."""
    for page_offset, record_offset in np.asarray(table).tolist():
        shape = (len(pages), slots, nbytes)
        strides = (pages.strides[0], slot_stride, 1)
        yield np.ndarray(shape, np.uint8, pages, page_offset, strides), record_offset


def share_of(ids, table, tiles: Tiles, blocks: int) -> lists.Shares:
    """Return the work of a call: every tile of every run of every page."""
    return lists.Shares(ids.shape[0], table.shape[0] * tiles.per_run, blocks)


def padded_table(table) -> jax.Array:
    """Return the table as i32[a multiple of 4], as one bulk copy takes it."""
    flat = table.reshape(-1)
    return jnp.pad(flat, (0, limits.round_up(flat.size, 4) - flat.size))


def scratch(slots, shares: lists.Shares, table, tiles: Tiles) -> tuple:
    """Return the scratch of both kernels: tiles, ids, table, and their barriers."""
    tile = (slots.stages, tiles.tile_slots, tiles.nbytes // words.WORD_NBYTES)
    return (
        plgpu.SMEM(tile, jnp.uint32),
        plgpu.SMEM((shares.span,), jnp.int32),
        plgpu.SMEM((limits.round_up(2 * table.shape[0], 4),), jnp.int32),
        plgpu.Barrier(num_barriers=slots.stages, num_arrivals=tiles.tile_slots),
        plgpu.Barrier(num_arrivals=2),
    )


def objection(
    pages, ids, table, records, *, nbytes, slot_stride, slots, alignment
) -> str | None:
    """Say why no kernel moves these records, None when one does.

    Offsets in a page must be multiples of 16, in a record of `alignment`; those of a
    table whose values are not known here are the caller's word.
    """
    refusal = limits.misaligned(
        page=pages.shape[1], run=nbytes, slot_stride=slot_stride
    ) or limits.too_long(pages=pages.shape[0], records=records.shape[0])
    if refusal:
        return refusal
    if records.shape[1] % words.WORD_NBYTES:
        return f"records of {records.shape[1]:,} B: registers move words of 4 B"
    tiles = tiles_of(records, nbytes, slot_stride, slots, alignment)
    multiple = words.WORD_NBYTES if tiles.by_words else limits.ALIGNMENT
    if records.shape[1] % multiple:
        return f"records of {records.shape[1]:,} B, said to be multiples of {multiple}"
    if not isinstance(table, jax.ShapeDtypeStruct):
        refusal = limits.misplaced(
            table[:, 0], limits.ALIGNMENT, "a page"
        ) or limits.misplaced(table[:, 1], multiple, "a record")
        if refusal:
            return refusal
    if tiles.by_words and tiles.tile_nbytes // 4 % LANES:
        return (
            f"{slots} slots of {nbytes} B in records of {records.shape[1]:,} B: no "
            f"tile of them is a multiple of {LANES} words"
        )
    shares = share_of(ids, table, tiles, 2 * limits.BLOCKS)
    scratch = tiles.stages * tiles.tile_nbytes
    if ids.shape[0] and table.shape[0]:
        scratch += 4 * shares.span + 8 * table.shape[0] + 8
    return limits.too_long(units_of_work=shares.units) or limits.not_in_shared(
        scratch, tiles.stages + 2
    )
