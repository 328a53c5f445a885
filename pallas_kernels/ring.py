"""The ring: loads run ahead of stores through a few slots of shared memory.

Every page kernel is this loop with its own two halves. A slot is loaded again only when
the store that read it has read it: after unit k was stored, all stores but the newest
`delay` have read their slots, so the slot of unit k - delay takes unit k - delay +
stages. The law of the halves: `store` ends in exactly one group of stores, or, where it
stores nothing, waits for all of them; otherwise "all but the newest" counts wrong.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits
from pallas_kernels.lists import Shares

__all__ = ["Slots", "Work", "bulk_load", "drain", "guarded", "my_share", "objection"]
__all__ += ["turn"]

_STAGED_NBYTES = 192 << 10
_LEAST_CHUNK = 1 << 10


@dataclasses.dataclass(frozen=True)
class Slots:
    """Slots of shared memory: how many, of how many bytes, stores left unread."""

    nbytes: int
    stages: int
    delay: int

    @classmethod
    def of(cls, nbytes: int, stages: int | None = None) -> "Slots":
        """Return as many slots of `nbytes` as a block's memory takes, up to 32."""
        fitting = max(1, _STAGED_NBYTES // nbytes)
        stages = min(limits.MAX_BARRIERS, fitting) if stages is None else stages
        return cls(nbytes, stages, stages // 4)

    def scratch_nbytes(self, shares: Shares, zeros: bool = False) -> int:
        """Return bytes of slots, a share of the list, and a slot of zeros."""
        spare = limits.round_up(self.nbytes, 1024) if zeros else 0
        return self.nbytes * self.stages + 4 * shares.span + spare


@dataclasses.dataclass(frozen=True)
class Work:
    """One block's share: unit k of it is chunk `chunk(k)` of entry `entry(k)`."""

    first: object  # i32[] unit
    count: object  # i32[] units
    base: object  # i32[] entry where the copied part of the list begins
    per_entry: int

    def entry(self, k):
        """Return which entry of the list unit k of the share is of."""
        return (self.first + k) // self.per_entry

    def chunk(self, k):
        """Return which part of its entry unit k of the share is."""
        return lax.rem(self.first + k, self.per_entry)


def my_share(shares: Shares) -> Work:
    """Return the share of this block of the grid's axis "block"."""
    first = lax.axis_index("block") * shares.per_block
    count = jnp.minimum(shares.per_block, shares.units - first)
    base = first // shares.per_entry // 4 * 4
    return Work(first, count, base, shares.per_entry)


def bulk_load(source, target, barrier) -> None:
    """Copy contiguous bytes, known to lie inside, by one instruction of any length."""
    plgpu.copy_gmem_to_smem(
        source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    )


def guarded(page, num_pages: int):
    """Answer whether a page id may be used as an index at all."""
    return (page >= 0) & (page < num_pages)


def turn(count, slots: Slots, load: Callable, store: Callable) -> None:
    """Load and store units 0 to count - 1: `load(k, slot)` begins, `store(k, slot)`."""

    def fill(k, _):
        pl.when(k < count)(lambda: load(k, k))

    def step(k, _):
        store(k, lax.rem(k, slots.stages))
        plgpu.wait_smem_to_gmem(slots.delay, wait_read_only=True)
        freed = k - slots.delay
        following = freed + slots.stages

        @pl.when((freed >= 0) & (following < count))
        def _():
            load(following, lax.rem(following, slots.stages))

    lax.fori_loop(0, slots.stages, fill, None)
    lax.fori_loop(0, count, step, None)
    plgpu.wait_smem_to_gmem(0)


def drain() -> None:
    """Wait until every store has read its slot: for a unit that stores nothing."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def objection(shape: tuple[int, ...], entries: int, zeros: bool = False) -> str | None:
    """Say why no ring moves whole pages of a pool [P, E], None when one does."""
    num_pages, page_nbytes = shape
    refusal = limits.misaligned(page=page_nbytes) or limits.too_long(
        pages=num_pages, bytes_of_a_page=page_nbytes, entries=entries
    )
    if refusal or not entries or not page_nbytes:
        return refusal
    slots = Slots.of(limits.chunk_nbytes(page_nbytes))
    if slots.nbytes < min(_LEAST_CHUNK, page_nbytes):
        return (
            f"pages of {page_nbytes:,} B: their largest part that divides them is "
            f"{slots.nbytes:,} B, a copy too small below {_LEAST_CHUNK:,} B"
        )
    shares = Shares(entries, page_nbytes // slots.nbytes, limits.BLOCKS)
    return limits.too_long(units_of_work=shares.units) or limits.not_in_shared(
        slots.scratch_nbytes(shares, zeros), slots.stages + 1
    )
