"""Blocked scales: a page keeps all values of its slots, then all their scales.

Letters: V bytes of values and S of scales of a slot, BS slots of a page; outside, a
token's row is its V bytes and then its S. Both are words of 4 bytes, so four rows are a
multiple of 16 bytes whatever their width, and the copies move rows by fours.

    block at `offset`: [BS * V values][BS * S scales]  <->  rows [BS, V + S]
"""

import dataclasses

import jax.numpy as jnp

from pallas_kernels import limits
from pallas_kernels.words import WORD_NBYTES

__all__ = ["Shape"]

ROWS = 4  # that move as one


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a block."""

    slots: int
    value_nbytes: int
    scale_nbytes: int

    @property
    def row_nbytes(self) -> int:
        """Bytes of a token's row, V + S."""
        return self.value_nbytes + self.scale_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.slots * self.row_nbytes

    @property
    def tall(self) -> int:
        """Rows of fours."""
        return self.slots // ROWS

    @property
    def value_words(self) -> int:
        """Words of a slot's values."""
        return self.value_nbytes // WORD_NBYTES

    @property
    def scale_words(self) -> int:
        """Words of a slot's scales."""
        return self.scale_nbytes // WORD_NBYTES

    @property
    def row_words(self) -> int:
        """Words of a row."""
        return self.row_nbytes // WORD_NBYTES

    def objection(self, pages, offsets, entries: int) -> str | None:
        """Say why no kernel turns these blocks into rows, None when one does."""
        refusal = limits.misplaced(offsets, limits.ALIGNMENT, "a page")
        refusal = (
            refusal
            or limits.misaligned(page=pages.shape[1])
            or limits.too_long(
                pages=pages.shape[0],
                units_of_work=entries * offsets.shape[0],
                rows=entries * offsets.shape[0] * max(self.tall, 1),
            )
        )
        if refusal:
            return refusal
        for name, count in (
            ("values", self.value_nbytes),
            ("scales", self.scale_nbytes),
        ):
            if count % WORD_NBYTES or not count:
                return f"{count} B of {name} a slot: registers move words of 4 B"
        if self.slots % ROWS:
            return f"{self.slots} slots of a page: rows move by fours"
        if self.tall * self.value_words % limits.LANES:
            return (
                f"{self.slots} slots of {self.value_nbytes} B: a fourth of them is "
                f"{self.tall * self.value_words} words, no multiple of {limits.LANES}"
            )
        return limits.not_in_shared(2 * self.nbytes, 1) or limits.outside(
            offsets, self.nbytes, pages.shape[1], "a page"
        )

    def block_columns(self, offsets):
        """Return i32[1, K, BS * (V + S)]: the bytes of each block in its page."""
        byte = jnp.arange(self.nbytes, dtype=jnp.int32)
        return offsets[None, :, None] + byte[None, None, :]

    def rows_of(self, blocks):
        """Return u8[n, K, BS, V + S] of u8[n, K, bytes of a block]."""
        n, count, _ = blocks.shape
        split = self.slots * self.value_nbytes
        of_slots = n, count, self.slots
        values = blocks[..., :split].reshape(*of_slots, self.value_nbytes)
        scales = blocks[..., split:].reshape(*of_slots, self.scale_nbytes)
        return jnp.concatenate([values, scales], axis=-1)

    def blocks_of(self, rows):
        """Return u8[n, K, bytes of a block] of u8[n, K, BS, V + S]."""
        values, scales = jnp.split(rows, [self.value_nbytes], axis=-1)
        of_block = rows.shape[:2]
        flat = [
            part.reshape(*of_block, self.slots * part.shape[-1])
            for part in (values, scales)
        ]
        return jnp.concatenate(flat, axis=-1)
