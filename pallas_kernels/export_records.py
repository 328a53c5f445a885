"""export_records: tokens out of pages into token records, on the device.

Contract: donates `records` u8[num_tokens, record], which it fills from pages u8[P, E].
For every run k of table i32[K, 2] (offset in a page, offset in a record) and every
token whose page is inside [0, num_pages), the run's bytes of its slot become those of
its record. Row 0 is token `first` of ids i32[n], T = `slots` a page; tokens before or
behind the table, tokens of nobody's page, and bytes of no run keep their values.

    export_records.reference(records, pages, ids, table, first,
                             layout=Layout(256, 256, 16))
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, records, ring, words
from pallas_kernels import walk as walking
from pallas_kernels.records import Layout, Tiles

__all__ = ["host", "kernel", "reference", "supports"]


def reference(
    into, pages, ids, table, first, *, layout: Layout, num_pages: int | None = None
) -> jax.Array:
    """Return the records with the tokens of the pages in them."""
    page, at, in_record = records.indices(
        pages, ids, table, into, first, layout=layout, num_pages=num_pages
    )
    found = pages.at[page, at].get(mode="fill", fill_value=0)
    token = jnp.arange(into.shape[0], dtype=jnp.int32)[:, None, None]
    row = jnp.where(page < pages.shape[0], token, into.shape[0])
    return into.at[row, in_record].set(found, mode="drop")


def host(
    into: np.ndarray,
    pages: np.ndarray,
    ids,
    table,
    first,
    *,
    layout: Layout,
    num_pages: int | None = None,
) -> np.ndarray:
    """Do the same in numpy, in place."""
    num_pages = len(pages) if num_pages is None else num_pages
    page, slot = records.host_places(ids, first, len(into), layout.slots)
    named = (page >= 0) & (page < num_pages)
    for view, at in records.host_views(pages, table, layout):
        into[named, at : at + layout.nbytes] = view[page[named], slot[named]]
    return into


def kernel(
    into,
    pages,
    ids,
    table,
    first,
    *,
    layout: Layout,
    num_pages: int | None = None,
    blocks: int = 2 * limits.BLOCKS,
    stages: int | None = None,
    interpret=None,
) -> jax.Array:
    """Do the same: tiles of slots come by bulk copies, and leave row by row.

    Rows leave by bulk copies where records are multiples of 16 bytes, else from
    registers, a word a lane.
    """
    if not (ids.shape[0] and table.shape[0] and into.shape[0]):
        return into
    num_pages = pages.shape[0] if num_pages is None else num_pages
    tiles = layout.tiles(into.shape[1])
    shares = records.share_of(ids, table, tiles, blocks)
    ring_of = ring.Slots(tiles.nbytes, stages or tiles.stages, 0)
    run = plgpu.kernel(
        _body(shares, tiles, ring_of, into.shape[0], num_pages),
        out_type=(),
        scratch_types=walking.scratch(ring_of, shares, table, tiles),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    out = jax.new_ref(words.as_words(into))
    listed = shares.padded(ids), records.padded_table(table)
    run(out, words.as_words(pages), *listed, jnp.reshape(first, 1))
    return words.as_bytes(out[...])


def _body(shares, tiles: Tiles, ring_of: ring.Slots, num_tokens: int, num_pages: int):
    """Return the body of the kernel."""

    def export_records(out_ref, pages_ref, ids_ref, table_ref, first_ref, *scratch):
        # in:  records u32[tokens, record / 4], written; pages u32[P, E / 4];
        #      ids i32[padded n]; table i32[2 K]; first i32[1]
        # scratch: tiles u32[stages, rows, width], ids, table, barriers
        tile_ref, id_ref, run_ref, loaded, listed = scratch
        inputs, held = (ids_ref, table_ref, first_ref), (id_ref, run_ref, listed)
        walk = walking.begin(shares, tiles, num_tokens, inputs, held)

        def load(k, slot):
            def row(s, _):
                source = pages_ref.at[walk.page(k), walk.in_page(k, s)]
                ring.bulk_load(source, tile_ref.at[slot, s], loaded.at[slot])

            @pl.when(walk.wanted(k, num_pages))
            def _():
                lax.fori_loop(0, tiles.slots, row, None)

        def store_rows(k, slot):
            def row(s, _):
                target = out_ref.at[walk.row(k) + s, walk.in_record(k)]
                plgpu.copy_smem_to_gmem(tile_ref.at[slot, s], target)

            lax.fori_loop(*walk.bounds(k), row, None)

        def store_words(k, slot):
            def tile(*at):
                layout = tiles.registers
                values = plgpu.load(tile_ref.at[slot], layout=layout, optimized=False)
                out_ref.at[at][...] = values

            def word(s, w):
                value = tile_ref[slot, s, w]
                out_ref[walk.row(k) + s, walk.in_record(k).start + w] = value

            walk.by_words(k, tile, word)

        def store(k, slot):
            @pl.when(walk.wanted(k, num_pages))
            def _():
                plgpu.barrier_wait(loaded.at[slot])
                (store_words if tiles.by_words else store_rows)(k, slot)

        ring.turn(walk.work.count, ring_of, load, store)

    return export_records


def supports(
    into, pages, ids, table, first, *, layout: Layout, num_pages: int | None = None
) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    return records.objection(pages, ids, table, into, layout)
