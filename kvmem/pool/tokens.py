"""Rows in pages: one entry's bytes of one token, or state, written and read in place.

The law: an address is a pair (page, byte within the page), and stays one; a page id is
never multiplied by anything. Rows whose page is null or out of range, and slots outside
the page, write nothing and read zeros. Nothing is claimed about the order or the
distinctness of rows: two rows at one address are the caller's mistake, and the
`checked_` verbs refuse them.

Offsets and strides of an entry are free, so layers and slots may stand in any order; an
entry's bytes of one slot are contiguous, and one whose slots overlap or leave the page
is refused. A state larger than a page lies in K parts: its entries are addressed by all
K pages of it (`translate_parts`), and each takes the page of its own extent.

The pool is bytes for a reason: on CPU, XLA widens a bf16 or fp8 scatter to f32 over
the whole pool, and a scatter of u8 rows costs the rows alone. One rank's pages are
u8[P, E]; `jax.vmap` or `jax.shard_map` gives the rank axis.

    pages = tokens.write(pages, entry, page_ids, slots, rows, page_size=16)
    rows = tokens.read(pages, entry, page_ids, slots, page_size=16)   # u8[N, nbytes]
    conv = tokens.read(pages, entry, parts, [0, 0], page_size=1)      # parts i32[2, K]
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvmem import errors
from kvmem.geometry import Entry
from kvmem.pool import dispatch
from kvmem.pool.ids import as_host_ids, as_ids

__all__ = [
    "WriteFn",
    "checked_read",
    "checked_write",
    "read",
    "read_rows",
    "write",
    "write_rows",
]


WriteFn = Callable[..., jax.Array]
"""How a model writes one layer's new rows on one rank, for use inside jit:
(pages u8[P, E], envelope, layer, k [S, Q, H, D], v [S, Q, H, Dv], table i32[S, M],
starts i32[S], num_new i32[S]) -> pages. Token i of sequence s has position
starts[s] + i; rows from num_new[s] on, and those of null pages, are dropped."""


def write(
    pages: jax.Array,
    entry: Entry,
    page_ids: jax.typing.ArrayLike,
    slots: jax.typing.ArrayLike,
    values: jax.Array,
    *,
    page_size: int | None = None,
) -> jax.Array:
    """Donates `pages`. Write one entry's bytes for N tokens.

    Args:
        pages: u8[P, E] of one rank.
        entry: which bytes of the page.
        page_ids: i32[N] physical pages, or i32[N, K] all parts of N virtual pages; null
            and all others outside [0, P) are dropped.
        slots: i32[N] slots inside the page; 0 for a state.
        values: u8[N, entry.nbytes].
        page_size: slots of a page, to drop slots beyond; 1 for a state; None bounds
            them by the page's last byte only.

    Raises:
        FormatMismatch: values that are not u8[N, entry.nbytes]; an entry whose slots
            overlap or leave the page; or page ids without the entry's extent.
    """
    _require_bytes(values, entry)
    bound = _num_slots(entry, pages.shape[-1], page_size)
    page_ids, slots = _pages_of(entry, page_ids), as_ids(slots, "slots")
    place = np.int32([entry.offset, entry.slot_stride, bound])
    return dispatch.call(_write, pages, page_ids, slots, values, place)


def read(
    pages: jax.Array,
    entry: Entry,
    page_ids: jax.typing.ArrayLike,
    slots: jax.typing.ArrayLike,
    *,
    page_size: int | None = None,
) -> jax.Array:
    """Return u8[N, entry.nbytes]: one entry's bytes of N tokens, zeros where none is.

    Args as in `write`.
    """
    bound = _num_slots(entry, pages.shape[-1], page_size)
    page_ids, slots = _pages_of(entry, page_ids), as_ids(slots, "slots")
    place = np.int32([entry.offset, entry.slot_stride, bound])
    return dispatch.call(_read, pages, page_ids, slots, place, entry.nbytes)


def checked_write(
    pages: jax.Array,
    entry: Entry,
    page_ids: np.typing.ArrayLike,
    slots: np.typing.ArrayLike,
    values: jax.Array,
    *,
    page_size: int,
) -> jax.Array:
    """Donates `pages`. `write`, after a look at the ids on the host.

    Raises:
        InvalidId: an id outside [0, P] (P is padding), a slot outside the page, or two
            rows at one address.
    """
    num_pages = pages.shape[0]
    page_ids = _pages_of(entry, as_host_ids(page_ids, "page_ids"))
    slots = as_host_ids(slots, "slots")
    named = page_ids != num_pages
    _require_inside(page_ids[named], num_pages, "page id")
    _require_inside(slots[named], page_size, "slot")
    rows = np.stack([page_ids[named], slots[named]], axis=1)
    rows, counts = np.unique(rows, axis=0, return_counts=True)
    twice = [f"page {p} slot {s}" for p, s in rows[counts > 1].tolist()]
    if twice:
        raise errors.InvalidId(
            errors.say(
                f"write of {page_ids.size} rows with {', '.join(twice)} more than once",
                "which of two rows at one address would stay is left to the device",
                "Keep one row for each token",
            )
        )
    whole = dataclasses.replace(entry, extent=0)  # its pages are chosen already
    return write(pages, whole, page_ids, slots, values, page_size=page_size)


def checked_read(
    pages: jax.Array,
    entry: Entry,
    page_ids: np.typing.ArrayLike,
    slots: np.typing.ArrayLike,
    *,
    page_size: int,
) -> jax.Array:
    """Do `read`, after a look at the ids on the host; null is refused here too.

    Raises:
        InvalidId: an id outside [0, P) or a slot outside the page.
    """
    page_ids = _pages_of(entry, as_host_ids(page_ids, "page_ids"))
    slots = as_host_ids(slots, "slots")
    _require_inside(page_ids, pages.shape[0], "page id")
    _require_inside(slots, page_size, "slot")
    whole = dataclasses.replace(entry, extent=0)  # its pages are chosen already
    return read(pages, whole, page_ids, slots, page_size=page_size)


def write_rows(
    pages: jax.Array, page_ids: jax.Array, starts: jax.Array, rows: jax.Array
) -> jax.Array:
    """Return `pages` with row i at (page_ids[i], starts[i]); for use inside jit.

    Args: pages u8[P, E], page_ids i32[N], starts i32[N] bytes, rows u8[N, W]. A row not
    wholly inside a page is dropped.
    """
    if rows.shape[0] == 1:
        # A null row: in some programs XLA rewrites a scatter of one row to a select
        # that reads the old row, and copies the whole pool to keep it.
        rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
        null = jnp.full(1, pages.shape[0], jnp.int32)
        page_ids = jnp.concatenate([page_ids, null])
        starts = jnp.concatenate([starts, jnp.zeros(1, jnp.int32)])
    addresses = jnp.stack([page_ids, starts], axis=1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, 1),
    )
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(pages, addresses, rows, numbers, mode=drop)


def read_rows(
    pages: jax.Array, page_ids: jax.Array, starts: jax.Array, nbytes: int
) -> jax.Array:
    """Return u8[N, nbytes], row i from (page_ids[i], starts[i]); for use inside jit.

    A row not wholly inside a page reads as zeros.
    """
    addresses = jnp.stack([page_ids, starts], axis=1)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    fill = lax.GatherScatterMode.FILL_OR_DROP
    shape = (1, nbytes)
    return lax.gather(pages, addresses, numbers, shape, mode=fill, fill_value=0)


@functools.partial(jax.jit, donate_argnums=0)
def _write(pages, page_ids, slots, values, place):
    page_ids, starts = _addresses(page_ids, slots, place, pages.shape[0])
    return write_rows(pages, page_ids, starts, values)


@functools.partial(jax.jit, static_argnums=4)
def _read(pages, page_ids, slots, place, nbytes):
    page_ids, starts = _addresses(page_ids, slots, place, pages.shape[0])
    return read_rows(pages, page_ids, starts, nbytes)


def _addresses(page_ids: jax.Array, slots: jax.Array, place: jax.Array, null_page: int):
    """Return (page, byte) pairs; a slot outside the page sends its row to null."""
    offset, slot_stride, num_slots = place
    inside = (slots >= 0) & (slots < num_slots)
    page_ids = jnp.where(inside, page_ids, null_page)
    return page_ids, offset + jnp.where(inside, slots, 0) * slot_stride


def _num_slots(entry: Entry, page_nbytes: int, page_size: int | None) -> int:
    """Return how many slots an entry has in a page; refuse one that has not its own."""
    room = page_nbytes - entry.offset - entry.nbytes
    num_slots = room // max(entry.slot_stride, 1) + 1
    least = 1 if page_size is None else page_size
    if entry.offset < 0 or num_slots < least or entry.slot_stride < entry.nbytes:
        raise errors.FormatMismatch(
            errors.say(
                f"{least} slots of {entry.nbytes} bytes from byte {entry.offset} on, "
                f"{entry.slot_stride} apart, in a page of {page_nbytes}",
                "an entry's bytes of one slot are contiguous, inside the page, and "
                "apart from those of the next slot",
                "Use an entry of the envelope that the pool was made for",
            )
        )
    return num_slots if page_size is None else page_size


def _pages_of(entry: Entry, page_ids: jax.typing.ArrayLike) -> jax.Array | np.ndarray:
    """Return i32[N]: the pages in which the entry lies."""
    ids = as_ids(page_ids, "page_ids")
    parts = ids.shape[1] if ids.ndim == 2 else 1
    if ids.ndim not in (1, 2) or entry.extent >= parts:
        raise errors.FormatMismatch(
            errors.say(
                f"page_ids of shape {list(ids.shape)} for an entry of extent "
                f"{entry.extent}",
                "an envelope of K parts is addressed by all of their pages",
                "Pass i32[N, K], as translate_parts gives them",
            )
        )
    return ids[:, entry.extent] if ids.ndim == 2 else ids


def _require_bytes(values: jax.Array, entry: Entry) -> None:
    if values.dtype != jnp.uint8 or values.shape[1:] != (entry.nbytes,):
        raise errors.FormatMismatch(
            errors.say(
                f"write of {values.dtype}{list(values.shape)}",
                f"this entry holds {entry.nbytes} bytes a token, as u8[N, "
                f"{entry.nbytes}]",
                "Bitcast the rows to uint8 and flatten heads and bytes",
            )
        )


def _require_inside(ids: np.ndarray, end: int, what: str) -> None:
    wrong = np.unique(ids[(ids < 0) | (ids >= end)]).tolist()
    if wrong:
        raise errors.InvalidId(
            errors.say(
                f"{what} {', '.join(map(str, wrong))} of {end}",
                f"a {what} lies in [0, {end})",
                "Look at the table it came from, and at the length it was read up to",
            )
        )
