"""Rows of any dtype in pages: fp8 rows, their scales, and states parted into extents.

A field's bytes are read and written as windows (page, byte offset), each as long as the
longest run that the page order leaves contiguous; nobody multiplies a page id by a
stride. The law: a window is what `entry.address(slot)` names in the page of the entry's
extent; a page outside the pool drops a write whole and reads as zeros.

    plan = plan_of(envelope, "layers.0", "latent")
    pages = write(pages, plan, ids, slots, rows)       # ids i32[..., K], one an extent
    rows = read(pages, plan, ids)                      # [..., T, H, D], as stored

Letters: P pages, E page bytes, K extents, T slots a page, H local heads, D elements.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Envelope, np_dtype
from kvmem.pool.table import GroupTable

__all__ = [
    "FieldPlan",
    "append",
    "has_field",
    "plan_of",
    "read",
    "read_slots",
    "write",
]

_GATHER = lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
)
_SCATTER = lax.ScatterDimensionNumbers(
    update_window_dims=(1,),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0, 1),
)


@dataclasses.dataclass(frozen=True, eq=False)
class FieldPlan:
    """Where one field of one layer stands: N entries, each a run of local heads."""

    extents: np.ndarray  # i32[N] which page of a vpage
    offsets: np.ndarray  # i32[N] byte of slot 0
    stride: int  # bytes from slot to slot
    slots: int  # T
    nheads: int  # of each entry
    head_dim: int  # elements
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of one entry, contiguous."""
        return self.nheads * self.head_dim * self.dtype.itemsize

    @property
    def heads(self) -> int:
        """Local heads of the field; 1 where a row is replicated."""
        return self.nheads * len(self.extents)

    def require(self, shape: tuple[int, ...], what: str) -> None:
        """Refuse rows [..., H, D] that are not those of the pages."""
        held = (self.heads, self.head_dim)
        if tuple(shape[-2:]) != held:
            raise IncompatiblePlan(
                say(
                    f"{what} rows of {tuple(shape[-2:])}",
                    f"the pages hold {held[0]} rows of {held[1]} elements",
                    "Give this rank's heads, or build the envelope for them",
                )
            )


@functools.lru_cache(maxsize=4096)
def plan_of(envelope: Envelope, layer: str, name: str) -> FieldPlan:
    """Plan every read and write of one field of one layer."""
    entries = envelope.entries_of(layer, name)
    planes = {entry.plane for entry in envelope.entries if entry.field.layer == layer}
    if len(planes) != 1 or planes.pop().base:
        raise IncompatiblePlan(
            say(
                f"layer {layer!r} over pages in order {envelope.order!r}",
                "the fields of a layer share a page of one array",
                "Use an order with the field axis inside the page",
            )
        )
    (nheads,) = {entry.nheads for entry in entries}
    (stride,) = {entry.slot_stride for entry in entries}
    field = entries[0].field
    dtype = np_dtype(field.dtype)
    return FieldPlan(
        extents=np.asarray([entry.extent for entry in entries], np.int32),
        offsets=np.asarray([entry.offset for entry in entries], np.int32),
        stride=stride,
        slots=envelope.page_size,
        nheads=nheads,
        head_dim=field.head_nbytes // dtype.itemsize,
        dtype=dtype,
    )


def has_field(envelope: Envelope, layer: str, name: str) -> bool:
    """Say whether a layer keeps a field of that name."""
    return any(
        entry.field.layer == layer and entry.field.name == name
        for entry in envelope.entries
    )


def read(pages: jax.Array, plan: FieldPlan, ids: jax.Array) -> jax.Array:
    """Gather every slot of the pages `ids` i32[..., K]: [..., T, H, D] in plan.dtype.

    Null pages read as zeros. Slots that no token wrote come as they lie.
    """
    contiguous = plan.slots == 1 or plan.stride == plan.nbytes
    runs = 1 if contiguous else plan.slots
    begin = np.arange(runs, dtype=np.int32) * plan.stride
    offset = plan.offsets[:, None] + begin[None, :]  # [N, runs]
    page = jnp.take(ids, plan.extents, axis=-1)[..., None]  # [..., N, 1]
    got = _gather(pages, page, offset, plan.nbytes * (plan.slots // runs))
    lead = got.shape[: ids.ndim]
    rows = _typed(got.reshape(*lead, plan.slots, plan.nheads, -1), plan)
    rows = jnp.moveaxis(rows, ids.ndim - 1, ids.ndim)  # [..., T, N, nheads, D]
    return rows.reshape(*lead[:-1], plan.slots, plan.heads, plan.head_dim)


def read_slots(
    pages: jax.Array, plan: FieldPlan, ids: jax.Array, slots: jax.Array
) -> jax.Array:
    """Gather one slot of each page: ids i32[..., K], slots i32[...] to [..., H, D]."""
    page, offset = _windows(plan, ids, slots)
    got = _gather(pages, page, offset, plan.nbytes)
    lead = slots.shape
    rows = _typed(got.reshape(*lead, plan.heads, -1), plan)
    return rows.reshape(*lead, plan.heads, plan.head_dim)


def write(
    pages: jax.Array,
    plan: FieldPlan,
    ids: jax.Array,
    slots: jax.Array,
    rows: jax.Array,
) -> jax.Array:
    """Write rows [..., H, D] to slots i32[...] of pages ids i32[..., K], in place.

    One lone window is padded with a null one: XLA's CPU backend turns a scatter of
    exactly one into a slice update, and behind a second layer that copies the pool.
    """
    page, offset = _windows(plan, ids, slots)
    at = jnp.stack([page, jnp.broadcast_to(offset, page.shape)], axis=-1).reshape(-1, 2)
    raw = lax.bitcast_convert_type(rows.astype(plan.dtype), jnp.uint8)
    raw = raw.reshape(-1, plan.nbytes)
    if at.shape[0] == 1:
        null = jnp.asarray([[pages.shape[0], 0]], jnp.int32)
        at, raw = jnp.concatenate([at, null]), jnp.concatenate([raw, raw])
    return lax.scatter(
        pages, at, raw, _SCATTER, mode=lax.GatherScatterMode.FILL_OR_DROP
    )


def append(
    pages: jax.Array,
    envelope: Envelope,
    layer: str,
    parts: Mapping[str, jax.Array],
    table: GroupTable,
    starts: jax.Array,
    num_new: jax.Array,
) -> jax.Array:
    """Write replicated rows of new tokens behind those in the pages, in place.

    Args:
        parts: [S, Q, D] rows by field name.
        table: the group's pages; rows that it has no page for are dropped.
        starts: i32[S] tokens already in the pages; or i32[S, Q], where each stands.
        num_new: i32[S] how many of the Q rows are real; the rest is dropped.
    """
    plans = {name: plan_of(envelope, layer, name) for name in parts}
    for name, part in parts.items():
        plans[name].require((1, part.shape[-1]), f"{name!r} of layer {layer!r}:")
    (steps,) = {part.shape[1] for part in parts.values()}
    step = jnp.arange(steps, dtype=jnp.int32)[None, :]
    at = starts if starts.ndim == 2 else starts[:, None] + step
    page, slots = table.locate(at, envelope.page_size)
    ids = jnp.where(step < num_new[:, None], page, pages.shape[0])[..., None]
    for name, part in parts.items():
        pages = write(pages, plans[name], ids, slots, part[:, :, None])
    return pages


def _windows(
    plan: FieldPlan, ids: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the page and the byte of one slot of each entry, i32[..., N] both."""
    lead = (1,) * slots.ndim
    page = jnp.take(ids, plan.extents, axis=-1)
    offset = plan.offsets.reshape(*lead, -1) + slots[..., None] * plan.stride
    return page, offset


def _gather(pages, page, offset, nbytes: int) -> jax.Array:
    """Gather windows of `nbytes`; page and offset broadcast to the leading shape."""
    shape = jnp.broadcast_shapes(page.shape, offset.shape)
    lead = (1,) * (len(shape) - offset.ndim)
    offset = jnp.broadcast_to(jnp.reshape(offset, (*lead, *offset.shape)), shape)
    at = jnp.stack([jnp.broadcast_to(page, shape), offset], axis=-1)
    got = lax.gather(
        pages,
        at.reshape(-1, 2),
        _GATHER,
        slice_sizes=(1, nbytes),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=0,
    )
    return got.reshape(*shape, nbytes)


def _typed(raw: jax.Array, plan: FieldPlan) -> jax.Array:
    """Give bytes [..., D * item] their dtype: [..., D].

    Without the barrier XLA's CPU backend puts words together from bytes in the order
    that the next product wants, at a stride.
    """
    item = plan.dtype.itemsize
    if item > 1:
        raw = raw.reshape(*raw.shape[:-1], -1, item)
    return lax.optimization_barrier(lax.bitcast_convert_type(raw, plan.dtype))
