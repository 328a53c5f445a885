"""Records: which bytes of a page are which bytes of a token's record, as integers.

Letters: T slots of a page, n entries of a table of pages, K runs. A run is a part of a
record that is contiguous in a slot: bytes [page_offset + s * slot_stride, + nbytes) of
a page are bytes [record_offset, + nbytes) of the record of slot s. Runs of one call
share a `Layout` and differ in their two offsets; those of another width are another
call.

Row r of the records is token first + r of the table: slot (first + r) mod T of entry
(first + r) div T.

    Layout(nbytes=256, slot_stride=256, slots=16)    # a head's keys in pages of 16
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, words

__all__ = ["Layout", "Tiles", "host_places", "host_views", "indices", "objection"]
__all__ += ["padded_table", "share_of"]

_TILE_NBYTES = 32 << 10
_TILE_WORDS = 8_192  # of registers: 64 of each of a block's 128 lanes
_STAGED_NBYTES = 96 << 10
_TURNED = 16  # slots whose keys registers hold with their cosines and sines


@dataclasses.dataclass(frozen=True)
class Layout:
    """How each run of a call lies in its slots, in bytes.

    Args:
        nbytes: of a run.
        slot_stride: from a slot's run to that of the next.
        slots: of a page, T.
        alignment: of runs in a record, 16 or 4; None: 16 where the record is a multiple
            of 16.
    """

    nbytes: int
    slot_stride: int
    slots: int
    alignment: int | None = None

    def tiles(self, record_nbytes: int, widths: tuple[int, ...] = ()) -> "Tiles":
        """Return the tiles of a call: by words where runs of records are not aligned.

        Args:
            widths: words of rows that registers hold of a tile, besides its own.
        """
        alignment = self.alignment
        if alignment is None:
            aligned = record_nbytes % limits.ALIGNMENT == 0
            alignment = limits.ALIGNMENT if aligned else words.WORD_NBYTES
        by_words = alignment % limits.ALIGNMENT != 0
        own = (self.nbytes // words.WORD_NBYTES,) if by_words else ()
        return Tiles(self, by_words, (*own, *widths), _TURNED if widths else self.slots)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The slots that one unit of work moves of one run of one page."""

    layout: Layout
    by_words: bool  # records stand at multiples of 4 bytes only
    widths: tuple[int, ...]  # words of rows that registers hold
    most_slots: int

    @property
    def slots(self) -> int:
        """Slots of a tile: a divisor of T that shared memory, or registers, hold."""
        whole = self.layout.slots
        fitting = [s for s in range(1, whole + 1) if whole % s == 0]
        most = _TILE_WORDS * words.WORD_NBYTES if self.by_words else _TILE_NBYTES
        small = [
            s
            for s in fitting
            if s <= self.most_slots and s * self.layout.nbytes <= most
        ] or [1]
        return max([s for s in small if self.fills_lanes(s)] or small)

    def fills_lanes(self, slots: int) -> bool:
        """Answer whether registers hold rows of `slots` slots a word a lane."""
        return all(slots * width % limits.LANES == 0 for width in self.widths)

    @property
    def per_run(self) -> int:
        """Tiles of one run of one page."""
        return self.layout.slots // self.slots

    @property
    def nbytes(self) -> int:
        """Bytes of a tile."""
        return self.slots * self.layout.nbytes

    @property
    def row_words(self) -> int:
        """Words of a run."""
        return self.layout.nbytes // words.WORD_NBYTES

    @property
    def registers(self) -> plgpu.Layout:
        """How a tile lies in registers: a word a lane, in rows of any pitch."""
        return plgpu.Layout.WG_STRIDED((self.slots, self.row_words), vec_size=1)

    @property
    def stages(self) -> int:
        """Tiles that are on their way at once."""
        return max(1, min(16, _STAGED_NBYTES // self.nbytes))


def indices(pages, ids, table, records, first, *, layout: Layout, num_pages):
    """Return where the runs of tokens stand: page, byte of the page, of the record.

    i32[tokens, 1, 1], i32[tokens, K, nbytes], i32[1, K, nbytes]; the page is P, which
    is nobody's, where a token has none.
    """
    num_pages = pages.shape[0] if num_pages is None else num_pages
    token = first + jnp.arange(records.shape[0], dtype=jnp.int32)
    entry, slot = jnp.divmod(token, layout.slots)
    listed = jnp.append(ids, jnp.int32(lists.NULL))  # an empty list has an entry, too
    known = (entry >= 0) & (entry < ids.shape[0])
    entry = jnp.where(known, entry, ids.shape[0])
    page = listed.at[entry].get(mode="promise_in_bounds")
    page = jnp.where(lists.inside(page, num_pages), page, pages.shape[0])
    byte = jnp.arange(layout.nbytes, dtype=jnp.int32)
    at = table[None, :, 0, None] + (slot * layout.slot_stride)[:, None, None]
    in_record = table[None, :, 1, None] + byte[None, None, :]
    return page[:, None, None], at + byte[None, None, :], in_record


def host_places(ids, first, count: int, slots: int):
    """Return (page, slot) of `count` tokens from `first` on; page -1 where none is."""
    entry, slot = np.divmod(int(first) + np.arange(count), slots)
    known = (entry >= 0) & (entry < len(ids))
    listed = np.append(np.asarray(ids, np.int64), lists.NULL)
    return listed[np.where(known, entry, len(ids))], slot


def host_views(pages: np.ndarray, table, layout: Layout):
    """Yield (u8[P, T, nbytes] of the pool, first byte in a record) for each run."""
    for page_offset, record_offset in np.asarray(table).tolist():
        shape = (len(pages), layout.slots, layout.nbytes)
        strides = (pages.strides[0], layout.slot_stride, 1)
        yield np.ndarray(shape, np.uint8, pages, page_offset, strides), record_offset


def share_of(ids, table, tiles: Tiles, blocks: int) -> lists.Shares:
    """Return the work of a call: every tile of every run of every page."""
    return lists.Shares(ids.shape[0], table.shape[0] * tiles.per_run, blocks)


def padded_table(table) -> jax.Array:
    """Return the table as i32[a multiple of 4], as one bulk copy takes it."""
    flat = table.reshape(-1)
    return jnp.pad(flat, (0, limits.round_up(flat.size, 4) - flat.size))


def objection(
    pages, ids, table, records, layout: Layout, widths=(), more_nbytes: int = 0
) -> str | None:
    """Say why no kernel moves these records, None when one does.

    Offsets in a page must be multiples of 16, in a record of the layout's alignment;
    those of a table whose values are not known here are the caller's word.

    Args:
        widths: as `Layout.tiles` has them.
        more_nbytes: of shared memory that a kernel takes besides.
    """
    refusal = limits.misaligned(
        page=pages.shape[1], run=layout.nbytes, slot_stride=layout.slot_stride
    ) or limits.too_long(pages=pages.shape[0], records=records.shape[0])
    if refusal:
        return refusal
    record_nbytes = records.shape[1]
    if record_nbytes % words.WORD_NBYTES:
        return f"records of {record_nbytes:,} B: registers move words of 4 B"
    tiles = layout.tiles(record_nbytes, widths)
    multiple = words.WORD_NBYTES if tiles.by_words else limits.ALIGNMENT
    if record_nbytes % multiple:
        return f"records of {record_nbytes:,} B, said to be multiples of {multiple}"
    refusal = _misplaced(table, multiple) or _outside(
        table, layout, pages.shape[1], record_nbytes
    )
    if refusal:
        return refusal
    if not tiles.fills_lanes(tiles.slots):
        return (
            f"{layout.slots} slots of {layout.nbytes} B in records of "
            f"{record_nbytes:,} B: no tile of them is a multiple of {limits.LANES} "
            "words"
        )
    shares = share_of(ids, table, tiles, 2 * limits.BLOCKS)
    held = tiles.stages * tiles.nbytes + more_nbytes
    if ids.shape[0] and table.shape[0]:
        held += 4 * shares.span + 8 * table.shape[0] + 8
    return limits.too_long(units_of_work=shares.units) or limits.not_in_shared(
        held, tiles.stages + 2
    )


def _misplaced(table, multiple: int) -> str | None:
    """Say which run stands where no copy can, None where none does or none is known."""
    if isinstance(table, jax.ShapeDtypeStruct):
        return None
    return limits.misplaced(
        table[:, 0], limits.ALIGNMENT, "a page"
    ) or limits.misplaced(table[:, 1], multiple, "a record")


def _outside(table, layout: Layout, page_nbytes: int, record_nbytes: int) -> str | None:
    """Say which run leaves its page or its record, None where none does."""
    if isinstance(table, jax.ShapeDtypeStruct):
        return None
    whole = (layout.slots - 1) * layout.slot_stride + layout.nbytes
    return limits.outside(table[:, 0], whole, page_nbytes, "a page") or limits.outside(
        table[:, 1], layout.nbytes, record_nbytes, "a record"
    )
