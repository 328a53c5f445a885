"""Tables: which virtual pages hold a sequence, which physical ones a step sees.

Letters: G groups, S sequences, M columns. The law of a `BlockTable`: column m of a
group holds the page of positions [m * page_size, (m + 1) * page_size); columns beyond a
sequence's length are null, so nothing behind its length can be reached. Virtual ids are
stable for life; slots are arithmetic.

A `GroupTable` is one group's physical pages for one step, as short as what the group
keeps: a window's table begins at the first page that is not stale. Where the tokens of
a sequence are spread over ranks it is the same table on all of them, and each finds its
own slots: a position that another rank keeps is null here.

    table = empty(pool, num_sequences=8, max_pages=64)
    vpages, slots = locate(table, 0, positions, page_size=16)
    pages, slots = GroupTable(pages, first).locate(positions, page_size=16)
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvmem.geometry import Spread
from kvmem.mesh import DCP
from kvmem.pool.ledger import Ledger
from kvmem.pool.state import Pool

__all__ = ["BlockTable", "GroupTable", "empty", "locate", "objections"]

_NULL = np.iinfo(np.int32).max  # an id that is null to every pool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockTable:
    """The pages of S sequences in every group, and how many tokens each holds."""

    vpages: jax.Array  # i32[G, S, M] virtual pages, null beyond a length
    lengths: jax.Array  # i32[S] tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupTable:
    """The physical pages of S sequences in one group, column by column.

    Of a paged group, columns [0, k) are page ordinals 0 to k - 1 (the pages of sink
    tokens, k = 0 without any), and column k + i is ordinal first + i, first >= k; under
    full attention k and `first` are 0. Of a state group, the columns are the K parts of
    the live state, and `first` is not read.
    """

    pages: jax.Array  # i32[S, M] physical pages, null where a sequence has none
    first: jax.Array  # i32[S] ordinal of column k
    # Over which ranks of the axis "dcp" the tokens lie; pages kept whole by all of them
    # come dcp at a time, and k and `first` are multiples of it then.
    spread: Spread = dataclasses.field(default=Spread(), metadata={"static": True})

    @property
    def shard(self) -> jax.Array | int:
        """Which share of every sequence is kept here."""
        return lax.axis_index(DCP) if self.spread.shards > 1 else 0

    def ordinals(self, sink_pages: int = 0) -> jax.Array:
        """Return i32[S, M]: which page of its sequence each column holds."""
        sink_pages = self._sink_columns(sink_pages)
        column = jnp.arange(self.pages.shape[1], dtype=jnp.int32)[None, :]
        behind = self.first[:, None] + column - sink_pages
        return jnp.where(column < sink_pages, column, behind)

    def places(self, page_size: int, sink_pages: int = 0) -> jax.Array:
        """Return i32[S, M * T]: the position of every slot of the table's pages."""
        slot = jnp.arange(page_size, dtype=jnp.int32)[None, None]
        local = self.ordinals(sink_pages)[:, :, None] * page_size + slot
        local = local.reshape(self.pages.shape[0], -1)
        return self.spread.position(local, self.shard)

    def locate(
        self, positions: jax.Array, page_size: int, sink_pages: int = 0
    ) -> tuple[jax.Array, jax.Array]:
        """Return the physical page and the slot of each position, i32[S, Q] both.

        Positions that are negative, in a page that the group no longer keeps, behind
        the last column, or on another rank lie in int32's largest id, which is null to
        every pool.
        """
        column, slots = self._columns(positions, page_size, sink_pages)
        inside = column >= 0
        pages = jnp.take_along_axis(self.pages, jnp.where(inside, column, 0), axis=1)
        return jnp.where(inside, pages, _NULL), slots

    def rows(self, positions: jax.Array, page_size: int) -> jax.Array:
        """Return where each position stands among `places`, i32 of the same shape.

        Positions that this rank does not hold stand at int32's largest number.
        """
        flat = positions.reshape(positions.shape[0], -1)
        column, slots = self._columns(flat, page_size, 0)
        found = jnp.where(column >= 0, column * page_size + slots, _NULL)
        return found.reshape(positions.shape)

    def _columns(
        self, positions: jax.Array, page_size: int, sink_pages: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return the column, -1 where there is none here, and the slot of positions."""
        sink_pages = self._sink_columns(sink_pages)
        ordinals, slots = jnp.divmod(self.spread.slot(positions), page_size)
        num_columns = self.pages.shape[1]
        is_sink = (ordinals >= 0) & (ordinals < min(sink_pages, num_columns))
        # Compared before anything is added: int32's largest position must not wrap.
        behind = ordinals - self.first[:, None]
        is_kept = (behind >= 0) & (behind < num_columns - sink_pages)
        columns = jnp.where(is_sink, ordinals, sink_pages + behind)
        inside = is_sink | is_kept
        if self.spread.shards > 1:
            inside &= self.spread.owner(positions) == self.shard
        return jnp.where(inside, columns, -1), slots

    def _sink_columns(self, sink_pages: int) -> int:
        """Return the columns of sink pages: whole virtual pages are kept for them."""
        parts = self.spread.dcp if self.spread.is_whole else 1
        return -(-sink_pages // parts) * parts


def empty(books: Pool | Ledger, num_sequences: int, max_pages: int) -> BlockTable:
    """Return a table of sequences that hold nothing."""
    nulls = [group.null_vpage for group in books.groups]
    shape = (num_sequences, max_pages)
    return BlockTable(
        vpages=jnp.stack([jnp.full(shape, null, jnp.int32) for null in nulls]),
        lengths=jnp.zeros(num_sequences, jnp.int32),
    )


def locate(
    table: BlockTable, group: int, positions: jax.Array, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the virtual page and the slot of each position, i32[S, Q] both.

    Positions that are negative or behind the last column lie in int32's largest id,
    which is null to every pool.
    """
    columns, slots = jnp.divmod(positions, page_size)
    num_columns = table.vpages.shape[2]
    inside = (columns >= 0) & (columns < num_columns)
    safe = jnp.where(inside, columns, 0)
    vpages = jnp.take_along_axis(table.vpages[group], safe, axis=1)
    return jnp.where(inside, vpages, _NULL), slots


def objections(
    table: BlockTable, books: Pool | Ledger, page_sizes: tuple[int, ...]
) -> tuple[str, ...]:
    """Return what is wrong with a table, () when sound; on the host.

    Within a sequence's length every id must be held by somebody; beyond it every column
    must be null.
    """
    lengths = np.asarray(table.lengths)
    found = [
        f"sequence {s} has length {lengths[s]}" for s in np.nonzero(lengths < 0)[0]
    ]
    for g, (group, page_size) in enumerate(zip(books.groups, page_sizes, strict=True)):
        vpages, refs = np.asarray(table.vpages[g]), np.asarray(group.refs)
        needed = -(-lengths // page_size)
        num_columns = vpages.shape[1]
        found += [
            f"sequence {s} of length {lengths[s]} needs {needed[s]} pages of group "
            f"{g}, the table has {num_columns}"
            for s in np.nonzero(needed > num_columns)[0]
        ]
        live = np.arange(num_columns)[None, :] < needed[:, None]
        inside = (vpages >= 0) & (vpages < refs.size)
        held = inside & (refs[np.where(inside, vpages, 0)] > 0)
        for s, m in np.argwhere(live & ~held).tolist():
            why = "nobody holds it" if inside[s, m] else f"group {g} has {refs.size}"
            found.append(f"sequence {s} column {m}: virtual page {vpages[s, m]}, {why}")
        found += [
            f"sequence {s} column {m}: virtual page {vpages[s, m]} beyond its length "
            f"{lengths[s]}"
            for s, m in np.argwhere(~live & (vpages != refs.size)).tolist()
        ]
    return tuple(found)
