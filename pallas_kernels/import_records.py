"""import_records: token records into the slots of their pages, on the device.

Contract: the mirror of export_records. Donates `pages` u8[P, E]; for every run of table
i32[K, 2] and every token whose page is inside [0, num_pages), the run's bytes of its
record become those of its slot. Slots of other tokens, and bytes of no run, keep their
values. An entry of `ids` that a later one repeats writes nothing.

    import_records.reference(pages, ids, table, records, first,
                             layout=Layout(256, 256, 16))
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, records, ring, words
from pallas_kernels import walk as walking
from pallas_kernels.records import Layout, Tiles
from pallas_kernels.walk import Walk

__all__ = ["body", "host", "kernel", "reference", "ring_for", "supports"]


def reference(
    pages, ids, table, rows, first, *, layout: Layout, num_pages: int | None = None
) -> jax.Array:
    """Return the pool with the records in the slots of their tokens."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    settled = lists.settle(ids, num_pages)
    page, at, in_record = records.indices(
        pages, settled, table, rows, first, layout=layout, num_pages=num_pages
    )
    token = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None, None]
    found = rows.at[token, in_record].get(mode="promise_in_bounds")
    return pages.at[page, at].set(found, mode="drop")


def host(
    pages: np.ndarray,
    ids,
    table,
    rows,
    first,
    *,
    layout: Layout,
    num_pages: int | None = None,
) -> np.ndarray:
    """Do the same in numpy, in place."""
    num_pages = len(pages) if num_pages is None else num_pages
    last = {int(page): at for at, page in enumerate(ids)}
    own = [page if last[int(page)] == at else -1 for at, page in enumerate(ids)]
    page, slot = records.host_places(own, first, len(rows), layout.slots)
    named = (page >= 0) & (page < num_pages)
    for view, at in records.host_views(pages, table, layout):
        view[page[named], slot[named]] = rows[named, at : at + layout.nbytes]
    return pages


def kernel(
    pages,
    ids,
    table,
    rows,
    first,
    *,
    layout: Layout,
    num_pages: int | None = None,
    blocks: int = 2 * limits.BLOCKS,
    stages: int | None = None,
    interpret=None,
) -> jax.Array:
    """Do the same: rows come one by one, by bulk copies or as words, and leave so."""
    if not (ids.shape[0] and table.shape[0] and rows.shape[0]):
        return pages
    num_pages = pages.shape[0] if num_pages is None else num_pages
    tiles = layout.tiles(rows.shape[1])
    shares = records.share_of(ids, table, tiles, blocks)
    ring_of = ring_for(tiles, stages)
    move = body(shares, tiles, ring_of, rows.shape[0], num_pages)

    def import_records(pages_ref, ids_ref, table_ref, rows_ref, first_ref, *scratch):
        # in:  pages u32[P, E / 4], written; ids i32[padded n]; table i32[2 K];
        #      records u32[tokens, record / 4]; first i32[1]
        # scratch: tiles u32[stages, rows, width], ids, table, barriers
        move((pages_ref, rows_ref), (ids_ref, table_ref, first_ref), scratch)

    run = plgpu.kernel(
        import_records,
        out_type=(),
        scratch_types=walking.scratch(ring_of, shares, table, tiles),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    pool = jax.new_ref(words.as_words(pages))
    listed = shares.padded(lists.settle(ids, num_pages)), records.padded_table(table)
    run(pool, *listed, words.as_words(rows), jnp.reshape(first, 1))
    return words.as_bytes(pool[...])


def ring_for(tiles: Tiles, stages: int | None) -> ring.Slots:
    """Return the ring of an import: one tile at a time where words bring it."""
    stages = 1 if tiles.by_words else stages or tiles.stages
    return ring.Slots(tiles.nbytes, stages, 0)


def body(
    shares: lists.Shares,
    tiles: Tiles,
    ring_of: ring.Slots,
    num_tokens: int,
    num_pages: int,
    turn: Callable | None = None,
) -> Callable:
    """Return what an import does with its references.

    Args:
        turn: `turn(walk, k, tile)` changes a tile u32[rows, width] of shared memory,
            unit k of the walk, before it is stored; `tile(words)` is a part of it.
    """

    def move(moved, inputs, scratch):
        pages_ref, rows_ref = moved
        tile_ref, id_ref, run_ref, loaded, listed = scratch
        walk = walking.begin(
            shares, tiles, num_tokens, inputs, (id_ref, run_ref, listed)
        )
        load = (_words_loader if tiles.by_words else _rows_loader)(
            walk, rows_ref, tile_ref, loaded
        )

        def load_wanted(k, slot):
            pl.when(walk.wanted(k, num_pages))(lambda: load(k, slot))

        def store(k, slot):
            @pl.when(walk.wanted(k, num_pages))
            def _():
                if not tiles.by_words:
                    plgpu.barrier_wait(loaded.at[slot])
                if turn is not None:
                    turn(walk, k, lambda some: tile_ref.at[slot, :, some])

                def row(s, _):
                    target = pages_ref.at[walk.page(k), walk.in_page(k, s)]
                    plgpu.copy_smem_to_gmem(tile_ref.at[slot, s], target)

                lax.fori_loop(*walk.bounds(k), row, None)

        ring.turn(walk.work.count, ring_of, load_wanted, store)

    return move


def _rows_loader(walk: Walk, rows_ref, tile_ref, loaded) -> Callable:
    """Return how rows come by bulk copies: `load(k, slot)`."""

    def load(k, slot):
        def row(s, _):  # a row that is not wanted brings the nearest that is
            token = jnp.clip(walk.row(k) + s, 0, walk.num_tokens - 1)
            source = rows_ref.at[token, walk.in_record(k)]
            ring.bulk_load(source, tile_ref.at[slot, s], loaded.at[slot])

        lax.fori_loop(0, walk.tiles.slots, row, None)

    return load


def _words_loader(walk: Walk, rows_ref, tile_ref, loaded) -> Callable:
    """Return how rows come as words, through registers: `load(k, slot)`."""

    def load(k, slot):
        def tile(*at):
            layout = walk.tiles.registers
            values = plgpu.load(rows_ref.at[at], layout=layout, optimized=False)
            tile_ref.at[slot][...] = values

        def word(s, w):
            value = rows_ref[walk.row(k) + s, walk.in_record(k).start + w]
            tile_ref[slot, s, w] = value

        walk.by_words(k, tile, word)

    return load


def supports(
    pages, ids, table, rows, first, *, layout: Layout, num_pages: int | None = None
) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    return records.objection(pages, ids, table, rows, layout)
