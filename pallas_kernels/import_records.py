"""import_records: token records into the slots of their pages, on the device.

Contract: the mirror of export_records. Donates `pages` u8[P, E]; for every run of table
i32[K, 2] and every token whose page is inside [0, num_pages), the run's bytes of its
record become those of its slot. Slots of other tokens, and bytes of no run, keep their
values. An entry of `ids` that a later one repeats writes nothing.

    import_records.reference(pages, ids, table, records, first, nbytes=256,
                             slot_stride=256, slots=16)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, records, ring, words

__all__ = ["host", "kernel", "reference", "supports"]


def reference(
    pages,
    ids,
    table,
    rows,
    first,
    *,
    nbytes,
    slot_stride,
    slots,
    alignment=None,
    num_pages=None,
) -> jax.Array:
    """Return the pool with the records in the slots of their tokens."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    page, at, in_record = records.indices(
        pages,
        lists.settle(ids, num_pages),
        table,
        rows,
        first,
        nbytes=nbytes,
        slot_stride=slot_stride,
        slots=slots,
        num_pages=num_pages,
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
    nbytes,
    slot_stride,
    slots,
    alignment=None,
    num_pages=None,
) -> np.ndarray:
    """Do the same in numpy, in place."""
    num_pages = len(pages) if num_pages is None else num_pages
    last = {int(page): at for at, page in enumerate(ids)}
    own = [page if last[int(page)] == at else -1 for at, page in enumerate(ids)]
    entry, slot = np.divmod(int(first) + np.arange(len(rows)), slots)
    page = np.array([*own, -1])[np.minimum(entry, len(own))]
    named = (page >= 0) & (page < num_pages)
    sizes = {"nbytes": nbytes, "slot_stride": slot_stride, "slots": slots}
    for view, at in records.host_views(pages, table, **sizes):
        view[page[named], slot[named]] = rows[named, at : at + nbytes]
    return pages


def kernel(
    pages,
    ids,
    table,
    rows,
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
    """Do the same: rows come one by one, by bulk copies or as words, and leave so."""
    if not (ids.shape[0] and table.shape[0] and rows.shape[0]):
        return pages
    num_pages = pages.shape[0] if num_pages is None else num_pages
    tiles = records.tiles_of(rows, nbytes, slot_stride, slots, alignment)
    shares = records.share_of(ids, table, tiles, blocks)
    stages = 1 if tiles.by_words else stages or tiles.stages
    ring_of = ring.Slots(tiles.tile_nbytes, stages, 0)
    num_tokens = rows.shape[0]

    def import_records(pages_ref, ids_ref, table_ref, rows_ref, first_ref, *scratch):
        # in:  pages u32[P, E / 4], written; ids i32[padded n]; table i32[2 K];
        #      records u32[tokens, record / 4]; first i32[1]
        # scratch: tiles u32[stages, tall, width], ids, table, barriers
        tile_ref, id_ref, run_ref, loaded, listed = scratch
        inputs, held = (ids_ref, table_ref, first_ref), (id_ref, run_ref, listed)
        walk = records.walk(shares, tiles, num_tokens, inputs, held)

        def load_rows(k, slot):
            def row(s, _):  # a row that is not wanted brings the nearest that is
                token = jnp.clip(walk.row(k) + s, 0, num_tokens - 1)
                source = rows_ref.at[token, walk.in_record(k)]
                ring.bulk_load(source, tile_ref.at[slot, s], loaded.at[slot])

            lax.fori_loop(0, tiles.tile_slots, row, None)

        def load_words(k, slot):
            def tile(*at):
                layout = tiles.registers
                values = plgpu.load(rows_ref.at[at], layout=layout, optimized=False)
                tile_ref.at[slot][...] = values

            def word(s, w):
                value = rows_ref[walk.row(k) + s, walk.in_record(k).start + w]
                tile_ref[slot, s, w] = value

            walk.by_words(k, tile, word)

        def load(k, slot):
            pl.when(walk.wanted(k, num_pages))(
                lambda: (load_words if tiles.by_words else load_rows)(k, slot)
            )

        def store(k, slot):
            @pl.when(walk.wanted(k, num_pages))
            def _():
                if not tiles.by_words:
                    plgpu.barrier_wait(loaded.at[slot])

                def row(s, _):
                    target = pages_ref.at[walk.page(k), walk.in_page(k, s)]
                    plgpu.copy_smem_to_gmem(tile_ref.at[slot, s], target)

                lax.fori_loop(*walk.bounds(k), row, None)

        ring.turn(walk.work.count, ring_of, load, store)

    run = plgpu.kernel(
        import_records,
        out_type=(),
        scratch_types=records.scratch(ring_of, shares, table, tiles),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    pool = jax.new_ref(words.as_words(pages))
    listed = shares.padded(lists.settle(ids, num_pages)), records.padded_table(table)
    run(pool, *listed, words.as_words(rows), jnp.reshape(first, 1))
    return words.as_bytes(pool[...])


def supports(
    pages,
    ids,
    table,
    rows,
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
    return records.objection(pages, ids, table, rows, **sizes)
