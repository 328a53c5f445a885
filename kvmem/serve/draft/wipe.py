"""Wiping: what a verification wrote behind the accepted text becomes zero again.

A page is zero when it is handed out, and rows are written behind each other. The law:
slots behind the last accepted token of a sequence are as they were before the step, on
every rank and in every group, so a rejected token leaves no byte behind. The pages that
hold no accepted token have been given back by then; what is left is one page a
sequence.

    wiper = Wiper(envelopes)
    pool = wiper(pool, 0, vpages=[7, 3], kept=[5, 1])     # slots 5.. of 7, 1.. of 3
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvmem import pool as pools
from kvmem.geometry import Envelope, Spread, Topology
from kvmem.pool import dispatch

__all__ = ["Wiper", "slots_of"]


class Wiper:
    """The slots of every group's pages.

    Args:
        envelopes: of each group, cut to the pool's pages; those of states are not
            asked for.
        spreads: how the tokens of each group lie on the ranks.
        topology: the ranks.
        page_tokens: tokens of a virtual page, which may lie in several physical ones.
        lanes: pages that one call wipes.
    """

    def __init__(
        self,
        envelopes: Sequence[Envelope],
        spreads: Sequence[Spread],
        topology: Topology,
        page_tokens: int,
        lanes: int,
    ):
        self._slots = [
            jnp.asarray(slots_of(envelope, spread, topology))
            for envelope, spread in zip(envelopes, spreads, strict=True)
        ]
        self._page_tokens, self._lanes = page_tokens, lanes

    def __call__(
        self, pool: pools.Pool, group: int, vpages: Sequence[int], kept: Sequence[int]
    ) -> pools.Pool:
        """Donates `pool`. Zero the slots from `kept` on, a number for each page."""
        null = pool.groups[group].null_vpage
        for at in range(0, len(vpages), self._lanes):
            pages = np.full(self._lanes, null, np.int32)
            slots = np.zeros(self._lanes, np.int32)
            some = vpages[at : at + self._lanes]
            pages[: len(some)], slots[: len(some)] = some, kept[at : at + self._lanes]
            where = self._slots[group]
            size = self._page_tokens
            pool = dispatch.call(_wipe, pool, group, size, where, pages, slots)
        return pool


def slots_of(envelope: Envelope, spread: Spread, topology: Topology) -> np.ndarray:
    """Return i32[R, E]: which token of its page each byte belongs to, -1 for padding.

    Of a virtual page in parts, which token of its part.

    Args:
        envelope: one page on a rank; the pages of all ranks have equal offsets.
        spread: which tokens a rank keeps.
        topology: the ranks.
    """
    slot = np.full(envelope.nbytes, -1, np.int32)
    for entry in envelope.entries:
        for at in range(envelope.page_size):
            start = entry.address(at)
            slot[start : start + entry.nbytes] = at
    shards = [rank % spread.shards for rank in range(topology.ranks)]
    tokens = [np.where(slot < 0, -1, spread.position(slot, shard)) for shard in shards]
    return np.stack(tokens).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=0)
def _wipe(
    pool: pools.Pool,
    group: int,
    page_tokens: int,
    slots: jax.Array,
    vpages: jax.Array,
    kept: jax.Array,
) -> pools.Pool:
    parts = pools.translate_parts(pool, group, vpages)  # i32[N, K]
    size = page_tokens // parts.shape[1]
    before = jnp.arange(parts.shape[1], dtype=jnp.int32)[None] * size
    kept = jnp.clip(kept[:, None] - before, 0, size).reshape(-1)
    physical = parts.reshape(-1)

    def wipe(at: jax.Array, pages: jax.Array) -> jax.Array:
        named = physical[at] < pages.shape[1]
        page = jnp.where(named, physical[at], 0)
        row = lax.dynamic_slice_in_dim(pages, page, 1, axis=1)
        stays = (slots < kept[at]) | ~named
        mask = jnp.where(stays, jnp.uint8(0xFF), jnp.uint8(0))
        row = row & mask[:, None]
        return lax.dynamic_update_slice_in_dim(pages, row, page, axis=1)

    pages = lax.fori_loop(0, physical.shape[0], wipe, pool.pages)
    return dataclasses.replace(pool, pages=pages)
