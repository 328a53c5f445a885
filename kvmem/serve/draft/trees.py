"""Trees: several chains of drafted tokens behind one text, drawn and moved.

The likeliest tokens behind a text begin a chain each, and each chain goes on greedily:
a request is drafted as so many one-token sequences, which see the text and their own
chain. They lie chain behind chain in the slots behind the text. The law: the accepted
tokens of one chain are moved, byte for byte, to the slots that plain steps would have
put them in; every read comes before the first write.

    pool, chains = draw(stepper, pool, feeds, buckets, lengths=[2, 2], width=3)
    pool = Mover(envelope, lanes=8)(pool, 0, [(7, 2, 7, 1)])    # page 7: slot 2 to 1
"""

import dataclasses
import functools
from collections.abc import Sequence as ListLike

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvmem import pool as pools
from kvmem.geometry import Envelope, Spread, Topology
from kvmem.pool import dispatch
from kvmem.serve import sampler
from kvmem.serve.buckets import Buckets
from kvmem.serve.draft.chain import Chain, chains_of
from kvmem.serve.draft.wipe import slots_of
from kvmem.serve.step import Stepper
from kvmem.serve.work import Chains, Feed
from kvmem.speculative.capacity import attention_rows

__all__ = ["Mover", "draw"]


def draw(
    stepper: Stepper,
    pool: pools.Pool,
    feeds: ListLike[Feed],
    buckets: Buckets,
    lengths: ListLike[int],
    width: int,
) -> tuple[pools.Pool, list[Chain]]:
    """Donates `pool`. Read what rows feed, then draw `width` chains behind each.

    Args:
        stepper: the draft.
        pool: its pages, with room for every token but the last of each chain.
        feeds: one token a row.
        buckets: of the engine.
        lengths: tokens of each chain, of each row.
        width: chains of a row.

    Returns:
        The pool, and the tokens of all chains of a row, one chain behind the other.
    """
    longest = max(f.end + n * width for f, n in zip(feeds, lengths, strict=True))
    bucket = buckets.decode(len(feeds), longest)
    pool, logits = stepper(pool, stepper.pack(feeds, bucket))
    first, wrong = _likeliest(logits, width)
    steps, faults = [first.reshape(-1)], [jnp.repeat(wrong, width)]
    rows = attention_rows(bucket.rows, width)
    bucket = bucket._replace(rows=rows, chains=width)
    for step in range(1, max(lengths)):
        reading = [
            Feed(
                (0,) if step < length else (),
                feed.end + chain * length + step - 1,
                feed.held,
                Chains(feed.end, length, width),
            )
            for feed, length in zip(feeds, lengths, strict=True)
            for chain in range(width)
        ]
        batch = stepper.pack(reading, bucket)
        batch = dataclasses.replace(batch, tokens=steps[-1][:, None])
        pool, logits = stepper(pool, batch)
        steps.append(sampler.greedy(logits))
        faults.append(sampler.has_nan(logits))
    tokens, wrong = (
        [np.asarray(rows).reshape(-1, width) for rows in each]
        for each in (steps, faults)
    )
    return pool, chains_of(tokens, wrong, lengths)


class Mover:
    """Moves the rows of tokens inside one group's pages, on every rank.

    Args:
        envelope: of the group.
        topology: the ranks, of one token shard.
        lanes: rows that one call moves.
    """

    def __init__(self, envelope: Envelope, topology: Topology, lanes: int):
        slot = slots_of(envelope, Spread(), topology)[0]
        rows = [np.flatnonzero(slot == at) for at in range(envelope.page_size)]
        self._rows = jnp.asarray(np.stack(rows).astype(np.int32))
        self._lanes = lanes

    def __call__(
        self, pool: pools.Pool, group: int, moves: ListLike[tuple[int, int, int, int]]
    ) -> pools.Pool:
        """Donates `pool`. Move rows: (vpage, slot) from where, then where to."""
        null = pool.groups[group].null_vpage
        for at in range(0, len(moves), self._lanes):
            some = moves[at : at + self._lanes]
            padded = np.full((self._lanes, 4), (null, 0, null, 0), np.int32)
            padded[: len(some)] = some
            pool = dispatch.call(_move, pool, group, self._rows, padded)
        return pool


@functools.partial(jax.jit, static_argnums=1)
def _likeliest(logits: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Return i32[S, width] the likeliest tokens, and bool[S] where logits are NaN."""
    ids = lax.top_k(logits, width)[1].astype(jnp.int32)
    return ids, sampler.has_nan(logits)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _move(
    pool: pools.Pool, group: int, rows: jax.Array, moves: jax.Array
) -> pools.Pool:
    source = pools.translate(pool, group, moves[:, 0])
    target = pools.translate(pool, group, moves[:, 2])
    taken = pool.pages.at[:, source[:, None], rows[moves[:, 1]]].get(
        mode="fill", fill_value=0
    )
    pages = pool.pages.at[:, target[:, None], rows[moves[:, 3]]].set(taken, mode="drop")
    return dataclasses.replace(pool, pages=pages)
