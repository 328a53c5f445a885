"""import_turned: token records into the slots of their pages, keys turned on the way.

Contract: as import_records, of records whose keys have turned as `rerope` turns them:
in the run of every token, the window of 2 F elements from byte `window_offset` on is F
pairs that cos[i, s, f] and sin[i, s, f] turn, where the token is slot s of entry i of
`ids`. The records themselves stay. Runs that do not turn, values say, are a call of
import_records.

One pass over the bytes in place of two: a chunk that comes back at another place in a
text is turned between the copy that brings a tile and the copies that take it away.

    import_turned.reference(pages, ids, keys, records, first, cos, sin, style="half",
                            dtype="bfloat16", layout=Layout(256, 256, 16))
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import import_records, limits, lists, records, ring, rotation, words
from pallas_kernels import walk as walking
from pallas_kernels.records import Layout
from pallas_kernels.rotation import Window
from pallas_kernels.walk import Walk

__all__ = ["host", "kernel", "reference", "supports"]


def reference(
    pages,
    ids,
    table,
    rows,
    first,
    cos,
    sin,
    *,
    layout: Layout,
    style: str,
    dtype: str,
    window_offset: int = 0,
    num_pages: int | None = None,
) -> jax.Array:
    """Return the pool with the records, turned, in the slots of their tokens."""
    if not ids.shape[0]:
        return pages
    window = Window(style, dtype, cos.shape[-1])
    token = first + jnp.arange(rows.shape[0], dtype=jnp.int32)
    place = jnp.divmod(token, layout.slots)
    c = cos.at[place].get(mode="fill", fill_value=1)[:, None]
    s = sin.at[place].get(mode="fill", fill_value=0)[:, None]
    byte = window_offset + jnp.arange(window.nbytes, dtype=jnp.int32)
    at = table[:, 1, None] + byte[None, :]
    rows = rows.at[:, at].set(window.turned_bytes(rows[:, at], c, s))
    return import_records.reference(
        pages, ids, table, rows, first, layout=layout, num_pages=num_pages
    )


def host(pages: np.ndarray, *arrays, **facts) -> np.ndarray:
    """Do the same on the CPU, by the reference."""
    return rotation.on_host(reference, pages, *arrays, **facts)


def kernel(
    pages,
    ids,
    table,
    rows,
    first,
    cos,
    sin,
    *,
    layout: Layout,
    style: str,
    dtype: str,
    window_offset: int = 0,
    num_pages: int | None = None,
    blocks: int = 2 * limits.BLOCKS,
    stages: int | None = None,
    interpret=None,
) -> jax.Array:
    """Do the same: an import whose tiles turn while they are in shared memory."""
    if not (ids.shape[0] and table.shape[0] and rows.shape[0]):
        return pages
    num_pages = pages.shape[0] if num_pages is None else num_pages
    window = Window(style, dtype, cos.shape[-1])
    tiles = layout.tiles(rows.shape[1], (window.columns,))
    shares = records.share_of(ids, table, tiles, blocks)
    ring_of = import_records.ring_for(tiles, stages)
    split = window.by_column(cos, sin)
    sizes = shares, tiles, ring_of, rows.shape[0], num_pages

    def import_turned(pages_ref, ids_ref, table_ref, rows_ref, first_ref, *refs):
        # in:  as import_records, and tables f32[n T, columns]
        # scratch: as import_records, and a tile of each table and their barrier
        tables, (*refs, tabled) = refs[: len(split)], refs[len(split) :]
        held, scratch = refs[: len(split)], refs[len(split) :]
        turn = _turner(window, window_offset // 4, tables, held, tabled)
        move = import_records.body(*sizes, turn)
        move((pages_ref, rows_ref), (ids_ref, table_ref, first_ref), scratch)

    run = plgpu.kernel(
        import_turned,
        out_type=(),
        scratch_types=(
            *(plgpu.SMEM((tiles.slots, window.columns), jnp.float32) for _ in split),
            *walking.scratch(ring_of, shares, table, tiles),
            plgpu.Barrier(num_arrivals=len(split)),
        ),
        grid=(shares.blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    pool = jax.new_ref(words.as_words(pages))
    listed = shares.padded(lists.settle(ids, num_pages)), records.padded_table(table)
    run(pool, *listed, words.as_words(rows), jnp.reshape(first, 1), *split)
    return words.as_bytes(pool[...])


def _turner(window: Window, start: int, tables, held, tabled):
    """Return what turns a tile; tables come once for all runs of the tile's slots."""

    def turn(walk: Walk, k, tile):
        @pl.when(walk.is_new_tile(k))
        def _():
            here = pl.ds(walk.slot(k), walk.tiles.slots)
            for table, own in zip(tables, held, strict=True):
                ring.bulk_load(table.at[here], own, tabled)
            plgpu.barrier_wait(tabled)

        def at(some):
            return tile(pl.ds(start + some.start, some.size))

        window.turn_tile(at, held, walk.tiles.slots)
        plgpu.commit_smem()  # before copies read the tile, or write it or the tables

    return turn


def supports(
    pages,
    ids,
    table,
    rows,
    first,
    cos,
    sin,
    *,
    layout: Layout,
    style: str,
    dtype: str,
    window_offset: int = 0,
    num_pages: int | None = None,
) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    window = Window(style, dtype, cos.shape[-1])
    refusal = window.objection() or limits.misaligned(table=4 * window.columns)
    if refusal:
        return refusal
    if window_offset % words.WORD_NBYTES:
        return f"a window from byte {window_offset}: registers move words of 4 B"
    if not 0 <= window_offset <= layout.nbytes - window.nbytes:
        return (
            f"a window of {window.nbytes} B from byte {window_offset} of a run of "
            f"{layout.nbytes} B"
        )
    if tuple(cos.shape[:2]) != (ids.shape[0], layout.slots):
        return f"cosines of {cos.shape[0]} x {cos.shape[1]} slots, not those of `ids`"
    tiles = layout.tiles(rows.shape[1], (window.columns,))
    tables = 4 * window.num_tables * tiles.slots * window.columns + 8
    widths = (window.columns,)
    return records.objection(pages, ids, table, rows, layout, widths, tables)
