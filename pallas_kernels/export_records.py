"""export_records: tokens out of pages into token records, on the device.

Contract: donates `records` u8[num_tokens, record], which it fills from pages u8[P, E].
For every run k of table i32[K, 2] (offset in a page, offset in a record) and every
token whose page is inside [0, num_pages), the run's bytes of its slot become those of
its record. Row 0 is token `first` of ids i32[n], T = `slots` a page; tokens behind the
table, tokens of nobody's page, and bytes of no run keep their values.

    export_records.reference(records, pages, ids, table, first, nbytes=256,
                             slot_stride=256, slots=16)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, records, ring, words

__all__ = ["host", "kernel", "reference", "supports"]


def reference(
    into,
    pages,
    ids,
    table,
    first,
    *,
    nbytes,
    slot_stride,
    slots,
    alignment=None,
    num_pages=None,
) -> jax.Array:
    """Return the records with the tokens of the pages in them."""
    page, at, in_record = records.indices(
        pages,
        ids,
        table,
        into,
        first,
        nbytes=nbytes,
        slot_stride=slot_stride,
        slots=slots,
        num_pages=num_pages,
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
    nbytes,
    slot_stride,
    slots,
    alignment=None,
    num_pages=None,
) -> np.ndarray:
    """Do the same in numpy, in place."""
    num_pages = len(pages) if num_pages is None else num_pages
    entry, slot = np.divmod(int(first) + np.arange(len(into)), slots)
    page = np.append(ids, -1)[np.minimum(entry, len(ids))]
    named = (page >= 0) & (page < num_pages)
    sizes = {"nbytes": nbytes, "slot_stride": slot_stride, "slots": slots}
    for view, at in records.host_views(pages, table, **sizes):
        into[named, at : at + nbytes] = view[page[named], slot[named]]
    return into


def kernel(
    into,
    pages,
    ids,
    table,
    first,
    *,
    nbytes,
    slot_stride,
    slots,
    alignment=None,
    num_pages=None,
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
    tiles = records.tiles_of(into, nbytes, slot_stride, slots, alignment)
    shares = records.share_of(ids, table, tiles, blocks)
    ring_of = ring.Slots(tiles.tile_nbytes, stages or tiles.stages, 0)
    num_tokens, width, rows = into.shape[0], nbytes // 4, tiles.tile_slots

    def export_records(out_ref, pages_ref, ids_ref, table_ref, first_ref, *scratch):
        # in:  records u32[tokens, record / 4], written; pages u32[P, E / 4];
        #      ids i32[padded n]; table i32[2 K]; first i32[1]
        # scratch: tiles u32[stages, rows, width], ids, table, barriers
        tile_ref, id_ref, run_ref, loaded, listed = scratch
        work = ring.my_share(shares)
        ring.bulk_load(ids_ref.at[pl.ds(work.base, shares.span)], id_ref, listed)
        ring.bulk_load(table_ref, run_ref, listed)
        plgpu.barrier_wait(listed)
        start = first_ref[0]

        def page_of(k):
            return id_ref[work.entry(k) - work.base]

        def run_of(k, column):
            return run_ref[2 * (work.chunk(k) // tiles.per_run) + column] // 4

        def first_slot(k):
            return lax.rem(work.chunk(k), tiles.per_run) * rows

        def row_of(k):
            return work.entry(k) * slots + first_slot(k) - start

        def wanted(k):
            inside = (row_of(k) + rows > 0) & (row_of(k) < num_tokens)
            return inside & ring.guarded(page_of(k), num_pages)

        def load(k, slot):
            @pl.when(wanted(k))
            def _():
                def row(s, _):
                    at = run_of(k, 0) + (first_slot(k) + s) * (slot_stride // 4)
                    source = pages_ref.at[page_of(k), pl.ds(at, width)]
                    ring.bulk_load(source, tile_ref.at[slot, s], loaded.at[slot])

                lax.fori_loop(0, rows, row, None)

        def store_rows(k, slot):
            def row(s, _):
                target = out_ref.at[row_of(k) + s, pl.ds(run_of(k, 1), width)]
                plgpu.copy_smem_to_gmem(tile_ref.at[slot, s], target)

            low = jnp.maximum(-row_of(k), 0)
            lax.fori_loop(low, jnp.minimum(rows, num_tokens - row_of(k)), row, None)

        def store_words(k, slot):
            low = jnp.maximum(-row_of(k), 0)
            high = jnp.minimum(rows, num_tokens - row_of(k))
            is_whole = high - low == rows

            @pl.when(is_whole)
            def _():
                layout = plgpu.Layout.WG_STRIDED((rows, width), vec_size=1)
                tile = plgpu.load(tile_ref.at[slot], layout=layout, optimized=False)
                at = pl.ds(row_of(k), rows), pl.ds(run_of(k, 1), width)
                out_ref.at[at][...] = tile

            @pl.when(~is_whole)
            def _():
                def word(i, _):
                    s, w = low + i // width, lax.rem(i, width)
                    value = tile_ref[slot, s, w]
                    out_ref[row_of(k) + s, run_of(k, 1) + w] = value

                lax.fori_loop(0, (high - low) * width, word, None)

            plgpu.commit_smem()  # these reads stand before the next copy into the tile

        def store(k, slot):
            @pl.when(wanted(k))
            def _():
                plgpu.barrier_wait(loaded.at[slot])
                (store_words if tiles.by_words else store_rows)(k, slot)

        ring.turn(work.count, ring_of, load, store)

    run = plgpu.kernel(
        export_records,
        out_type=(),
        scratch_types=records.scratch(ring_of, shares, table, tiles),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    out = jax.new_ref(words.as_words(into))
    listed = shares.padded(ids), records.padded_table(table)
    run(out, words.as_words(pages), *listed, jnp.reshape(first, 1))
    return words.as_bytes(out[...])


def supports(
    into,
    pages,
    ids,
    table,
    first,
    *,
    nbytes,
    slot_stride,
    slots,
    alignment=None,
    num_pages=None,
) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    sizes = {"nbytes": nbytes, "slot_stride": slot_stride, "slots": slots}
    sizes["alignment"] = alignment
    return records.objection(pages, ids, table, into, **sizes)
