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

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, words

__all__ = ["Tiles", "host_views", "indices", "objection", "padded_table", "scratch"]
__all__ += ["share_of", "tiles_of"]

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
    def stages(self) -> int:
        """Tiles that are on their way at once."""
        return max(1, min(16, _STAGED_NBYTES // self.tile_nbytes))


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
