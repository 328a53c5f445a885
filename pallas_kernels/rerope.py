"""rerope: keys of pages rotated by a change of position, in place.

Contract: donates `pages` u8[P, E]. In every slot s of page ids[i] and for every offset
of `offsets` i32[K], the window of 2 F elements at byte offset + s * slot_stride is F
pairs (x, y): pair f becomes (x c - y s, y c + x s) of cos[i, s, f] and sin[i, s, f].
Pairs are (f, f + F) in style "half" and (2 f, 2 f + 1) in style "interleaved". Where
the cosine is 1 and the sine 0 the bytes stay as they are, NaNs among them. An entry
whose id is outside [0, num_pages), or that a later entry repeats, writes nothing.

The arithmetic is float32, and for 16-bit keys the same to the last bit everywhere; see
`rotation`.

    cos, sin = rotation.tables(deltas, frequencies)
    rerope.reference(pages, ids, offsets, cos, sin, style="half", dtype="bfloat16",
                     slot_stride=256)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import limits, lists, ring, rotation, words

__all__ = ["STYLES", "host", "kernel", "reference", "supports"]

STYLES = ("half", "interleaved")
_DTYPES = ("bfloat16", "float16", "float32")
_TILE_ROWS = 16
_LANES = 128
_BLOCKS = 8 * limits.BLOCKS


def reference(
    pages,
    ids,
    offsets,
    cos,
    sin,
    *,
    style: str,
    dtype: str,
    slot_stride: int,
    num_pages=None,
) -> jax.Array:
    """Return the pool with the windows rotated."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    _, slots, pairs = cos.shape
    element = jnp.dtype(dtype)
    settled = lists.settle(ids, num_pages)
    page = jnp.where(settled < 0, pages.shape[0], settled)[:, None, None, None]
    slot = jnp.arange(slots, dtype=jnp.int32) * slot_stride
    byte = jnp.arange(2 * pairs * element.itemsize, dtype=jnp.int32)
    at = offsets[:, None, None] + slot[None, :, None] + byte[None, None, :]
    old = pages.at[page, at[None]].get(mode="fill", fill_value=0)  # u8[n, K, T, W]
    keys = lax.bitcast_convert_type(
        old.reshape(*old.shape[:3], 2 * pairs, element.itemsize), element
    )
    shape = (
        (*keys.shape[:3], 2, pairs) if style == "half" else (*keys.shape[:3], pairs, 2)
    )
    axis = -2 if style == "half" else -1
    x, y = (
        jnp.take(keys.reshape(shape), half, axis=axis).astype(jnp.float32)
        for half in (0, 1)
    )
    c, s = (jnp.broadcast_to(table[:, None], x.shape) for table in (cos, sin))
    pair = [part.astype(element) for part in rotation.turned(x, y, c, s, dtype)]
    new = lax.bitcast_convert_type(jnp.stack(pair, axis=axis), jnp.uint8)
    still = jnp.stack([rotation.is_still(c, s)] * 2, axis=axis).reshape(keys.shape)
    new = new.reshape(*keys.shape, element.itemsize)
    kept = jnp.where(still[..., None], old.reshape(new.shape), new)
    return pages.at[page, at[None]].set(kept.reshape(old.shape), mode="drop")


def host(pages: np.ndarray, *arrays, **facts) -> np.ndarray:
    """Do the same on the CPU, by the reference."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        pages[...] = np.asarray(
            jax.jit(lambda *a: reference(*a, **facts))(pages, *arrays)
        )
    return pages


def kernel(
    pages,
    ids,
    offsets,
    cos,
    sin,
    *,
    style: str,
    dtype: str,
    slot_stride: int,
    num_pages=None,
    blocks: int = _BLOCKS,
    interpret=None,
) -> jax.Array:
    """Do the same: a tile of slots, its tables once, then every window of the tile."""
    num_pages = pages.shape[0] if num_pages is None else num_pages
    n, slots, pairs = cos.shape
    if not n * offsets.shape[0]:
        return pages
    width, columns = _words_of(pairs, style, dtype)
    rows = _tile_rows(slots, columns)
    tiles = n * (slots // rows)
    per_block = -(-offsets.shape[0] // max(1, min(offsets.shape[0], blocks // tiles)))
    groups = -(-offsets.shape[0] // per_block)
    split = _tables_of(cos, sin, style, dtype)

    def rerope(pages_ref, ids_ref, offsets_ref, *refs):
        # in:  pages u32[P, E / 4], written; ids i32[n]; offsets i32[K];
        #      tables f32[n T, columns]
        # scratch: window u32[rows, width], tables f32[rows, columns], barriers
        table_refs, (window_ref, *held) = refs[: len(split)], refs[len(split) :]
        *held, tabled, loaded = held
        tile = lax.axis_index("tile")
        page = ids_ref[tile // (slots // rows)]
        first_slot = lax.rem(tile, slots // rows) * rows
        first = lax.axis_index("group") * per_block
        last = jnp.minimum(first + per_block, offsets.shape[0])

        def window(k):
            start = offsets_ref[k] // 4

            def at(s):
                place = start + (first_slot + s) * (slot_stride // 4)
                return pages_ref.at[page, pl.ds(place, width)]

            def load(s, _):
                ring.bulk_load(at(s), window_ref.at[s], loaded)

            def store(s, _):
                plgpu.copy_smem_to_gmem(window_ref.at[s], at(s))

            lax.fori_loop(0, rows, load, None)
            plgpu.barrier_wait(loaded)
            rotation.turn_tile(window_ref, held, rows, columns, style, dtype)
            plgpu.commit_smem()
            lax.fori_loop(0, rows, store, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(ring.guarded(page, num_pages))
        def _():
            for table_ref, own in zip(table_refs, held, strict=True):
                ring.bulk_load(table_ref.at[pl.ds(tile * rows, rows)], own, tabled)
            plgpu.barrier_wait(tabled)
            lax.fori_loop(first, last, lambda k, _: window(k), None)
            plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        rerope,
        out_type=(),
        scratch_types=(
            plgpu.SMEM((rows, width), jnp.uint32),
            *(plgpu.SMEM((rows, columns), jnp.float32) for _ in split),
            plgpu.Barrier(num_arrivals=len(split)),
            plgpu.Barrier(num_arrivals=rows),
        ),
        grid=(tiles, groups),
        grid_names=("tile", "group"),
        interpret=interpret,
    )
    pool = jax.new_ref(words.as_words(pages))
    run(pool, lists.settle(ids, num_pages), offsets, *split)
    return words.as_bytes(pool[...])


def _words_of(pairs: int, style: str, dtype: str) -> tuple[int, int]:
    """Return words of a window, and columns of a tile of its pairs."""
    if dtype == "float32":
        return 2 * pairs, pairs
    return pairs, pairs if style == "interleaved" else pairs // 2


def _tile_rows(slots: int, columns: int) -> int:
    """Return the rows of a tile: a divisor of the slots that fills the lanes."""
    fitting = [
        rows
        for rows in range(1, min(slots, _TILE_ROWS) + 1)
        if slots % rows == 0 and rows * columns % _LANES == 0
    ]
    return max(fitting, default=0)


def _tables_of(cos, sin, style: str, dtype: str) -> list[jax.Array]:
    """Return cosines and sines by the column of a tile that they turn."""
    flat = [table.reshape(-1, table.shape[-1]) for table in (cos, sin)]
    if style == "interleaved" or dtype == "float32":
        return flat
    return [table[:, start::2] for table in flat for start in (0, 1)]


def supports(
    pages,
    ids,
    offsets,
    cos,
    sin,
    *,
    style: str,
    dtype: str,
    slot_stride: int,
    num_pages=None,
) -> str | None:
    """Say why the kernel cannot serve these shapes, None when it can."""
    if style not in STYLES or dtype not in _DTYPES:
        return f"style {style!r} of {dtype}: one of {STYLES} and of {_DTYPES}"
    if dtype == "float32" and style == "interleaved":
        return "interleaved pairs of float32 stand in two lanes' words"
    n, slots, pairs = cos.shape
    if dtype != "float32" and style == "half" and pairs % 2:
        return f"{pairs} pairs: two keys of 16 bits share a word"
    width, columns = _words_of(pairs, style, dtype)
    refusal = limits.misaligned(
        page=pages.shape[1],
        window=4 * width,
        slot_stride=slot_stride,
        table=4 * columns,
    ) or limits.too_long(pages=pages.shape[0], slots=n * slots)
    refusal = refusal or limits.misplaced(offsets, limits.ALIGNMENT, "a page")
    if refusal:
        return refusal
    rows = _tile_rows(slots, columns)
    if not rows:
        return (
            f"{slots} slots of {columns} columns: no tile of at most {_TILE_ROWS} "
            f"slots is a multiple of {_LANES} words"
        )
    return limits.not_in_shared(4 * rows * (width + 4 * columns), 2)
