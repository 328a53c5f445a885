"""The envelope: what the bytes of one page mean on one rank.

The address law, here and nowhere else: the bytes of slot s of an entry in page p stand
at byte plane.base + p * plane.page_stride + entry.offset + s * entry.slot_stride of
array plane.index, `entry.nbytes` of them, contiguous. A page order is a line of axis
names, outermost first (`kvmem.geometry.order`), so every order is one call of `build`.

    build(group, Topology(tp=3), rank=1, order="layer head field token")
    # page [L, h, K/V, T, D]: one entry a (layer, head, field), whole rows of T * D

Without a bar in its order an envelope has one plane, page p being row p of the pool.
Offsets, strides and the page's size are multiples of 16 bytes, padding included (of
what the order declares, in pages that others allocated), and are equal on every rank of
a topology: only `head0` differs. Scales stand at their own
width, so a block of rows followed by its scales is two entries.

A state may be larger than a page of its pool. `cut` parts such an envelope between
entries into extents, each in a page of its own: the address of an entry is then inside
the page of its extent.
"""

import dataclasses
import functools
import itertools

from kvmem import errors
from kvmem.geometry.fields import Field
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.order import (
    ALIGNMENT,
    AXES,
    ORDERS,
    Order,
    apart,
    parse,
    parse_order,
)
from kvmem.geometry.topology import Topology

__all__ = [
    "ALIGNMENT",
    "AXES",
    "ORDERS",
    "Entry",
    "Envelope",
    "Plane",
    "apart",
    "build",
    "cut",
    "parse_order",
]


@dataclasses.dataclass(frozen=True)
class Plane:
    """Pages at even distances in array `index`: page p at base + p * page_stride."""

    index: int
    base: int
    page_stride: int

    def address(self, page: int) -> int:
        """Return the byte of the array where `page` begins."""
        return self.base + page * self.page_stride


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run of heads of one field inside a page; `head0` is global.

    Slot s of the entry is bytes [offset + s * slot_stride, + nbytes) of its plane's
    page; of the page of extent number `extent`, where the envelope is parted.
    """

    field: Field
    offset: int
    slot_stride: int
    head0: int
    nheads: int
    plane: Plane
    extent: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of this entry, contiguous."""
        return self.nheads * self.field.head_nbytes

    def address(self, slot: int) -> int:
        """Return the byte offset of `slot` inside any page of its plane."""
        return self.offset + slot * self.slot_stride


@dataclasses.dataclass(frozen=True)
class Envelope:
    """The meaning of one page on one rank: entries in canonical order and its size.

    `page_size` counts slots; `nbytes` are those of all `extents` together.
    """

    entries: tuple[Entry, ...]
    page_size: int
    order: str
    nbytes: int
    extents: int = 1

    @functools.cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that a page is spread over, by array and base."""
        found = {entry.plane for entry in self.entries}
        return tuple(sorted(found, key=lambda plane: (plane.index, plane.base)))

    @functools.cached_property
    def plane_starts(self) -> tuple[int, ...]:
        """Where each plane's page begins when a page's planes are laid end to end."""
        sizes = [plane.page_stride for plane in self.planes]
        return tuple(itertools.accumulate(sizes[:-1], initial=0))

    @property
    def payload_nbytes(self) -> int:
        """Bytes of a page that belong to an entry."""
        return self.page_size * sum(entry.nbytes for entry in self.entries)

    @property
    def padding_nbytes(self) -> int:
        """Bytes of a page that belong to none."""
        return self.nbytes - self.payload_nbytes

    def entries_of(self, layer: str, name: str) -> tuple[Entry, ...]:
        """Return the entries of one field of one layer, by head."""
        found = tuple(
            e for e in self.entries if e.field.layer == layer and e.field.name == name
        )
        if not found:
            raise errors.InvalidId(
                errors.say(
                    f"field {name!r} of layer {layer!r}",
                    "the envelope has no such entry",
                    "Use a layer of the group it was built from",
                )
            )
        return found


@functools.lru_cache(maxsize=1024)
def build(
    group: LifecycleGroup,
    topology: Topology,
    rank: int,
    order: str = "head_major",
    num_pages: int | None = None,
) -> Envelope:
    """Return the envelope of `group` on one rank.

    A row is the unit that stays contiguous for one slot: all local heads of a field
    where "head" is the innermost axis, else one head. Rows are laid down in the order
    of the axes, each padded to 16 bytes, or to what the field declares; scales are not.

    Args:
        order: see `kvmem.geometry.order`.
        num_pages: pages of the pool; only orders with regions need it.

    Raises:
        ConfigError: unknown order, a rank outside the topology, or regions without a
            number of pages.
        IncompatiblePlan: heads that the topology can neither divide nor replicate.
    """
    parsed = parse(order)
    if not 0 <= rank < topology.ranks:
        raise errors.ConfigError(
            errors.say(
                f"rank {rank} of a topology of {topology.ranks}",
                "ranks are counted from zero",
                f"Give a rank below {topology.ranks}",
            )
        )
    rows = _rows(group, topology, together=parsed.page[-1] == "head")
    places = _places(rows, parsed, group.slots, num_pages)
    entries = tuple(
        Entry(
            field=row.field,
            offset=places[row].offset,
            slot_stride=places[row].slot_stride,
            head0=topology.shard(row.field, rank).start + row.head,
            nheads=row.nheads,
            plane=places[row].plane,
        )
        for row in rows
    )
    planes = {place.plane for place in places.values()}
    nbytes = sum(plane.page_stride for plane in planes)
    return Envelope(entries, group.slots, order, nbytes)


@functools.lru_cache(maxsize=1024)
def cut(envelope: Envelope, page_nbytes: int) -> Envelope:
    """Return the envelope parted into extents of one page each, between its entries.

    An envelope that fits one page stays whole; its page is then `page_nbytes` long.

    Raises:
        IncompatiblePlan: an entry that no page holds, slots of a token among those
            (only a state is parted), or an envelope of several arrays.
    """
    _require_whole_entries(envelope, page_nbytes)
    extent = end = 0
    plane, placed = Plane(0, 0, page_nbytes), {}
    for entry in sorted(envelope.entries, key=lambda entry: entry.offset):
        size = _round_up(entry.nbytes) if envelope.page_size == 1 else 0
        offset = end if envelope.page_size == 1 else entry.offset
        if offset + size > page_nbytes:
            extent, offset = extent + 1, 0
        end = offset + size
        stride = page_nbytes if envelope.page_size == 1 else entry.slot_stride
        placed[entry] = dataclasses.replace(
            entry, offset=offset, slot_stride=stride, plane=plane, extent=extent
        )
    return dataclasses.replace(
        envelope,
        entries=tuple(placed[entry] for entry in envelope.entries),
        nbytes=page_nbytes * (extent + 1),
        extents=extent + 1,
    )


def _require_whole_entries(envelope: Envelope, page_nbytes: int) -> None:
    """Refuse an envelope that cannot be parted between entries."""
    rows = max(_round_up(entry.nbytes) for entry in envelope.entries)
    least = envelope.nbytes if envelope.page_size > 1 else rows
    if len(envelope.planes) > 1 or least > page_nbytes or page_nbytes % ALIGNMENT:
        raise errors.IncompatiblePlan(
            errors.say(
                f"pages of {page_nbytes:,} B for an envelope of {envelope.nbytes:,} B "
                f"in {len(envelope.planes)} planes",
                "a page holds the slots of all its tokens, or whole entries of a state",
                f"Use pages of at least {_round_up(least):,} B, a multiple of "
                f"{ALIGNMENT}, in one array",
            )
        )


@dataclasses.dataclass(frozen=True)
class _Row:
    """One slot's contiguous bytes: local heads [head, head + nheads) of a field."""

    field: Field
    layer_at: int
    field_at: int
    head: int
    nheads: int

    def padded_nbytes(self, alignment: int) -> int:
        nbytes = self.nheads * self.field.row_nbytes
        return nbytes if self.field.is_scale else _round_up(nbytes, alignment)

    def at(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the place of this row along `axes`, "token" not among them."""
        at = {"layer": self.layer_at, "field": self.field_at, "head": self.head}
        return tuple(at[axis] for axis in axes)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a row stands: its plane, and how its slots stand in the plane's page."""

    plane: Plane
    offset: int
    slot_stride: int


def _rows(group: LifecycleGroup, topology: Topology, together: bool) -> list[_Row]:
    """List a rank's rows in canonical order: layer, head, field."""
    rows = []
    for layer_at, layer in enumerate(group.layers):
        for field_at, field in enumerate(layer.fields):
            count = topology.shard(field, 0).count
            # A padded row stands alone: heads side by side would not be contiguous.
            alone = field.row_nbytes != field.head_nbytes
            width = count if together and not alone else 1
            for head in range(0, count, width):
                rows.append(_Row(field, layer_at, field_at, head, width))
    return sorted(rows, key=lambda r: (r.layer_at, r.head, r.field_at))


def _places(
    rows: list[_Row], order: Order, page_size: int, num_pages: int | None
) -> dict[_Row, _Place]:
    """Give every row its plane and offsets: planes by array, then by region."""
    if bool(order.regions) != (num_pages is not None):
        raise errors.ConfigError(
            errors.say(
                f"num_pages = {num_pages} with regions by {order.regions or 'no axis'}",
                "a region begins behind all pages of the one before it, and nothing "
                "else depends on their number",
                "Give num_pages exactly where an order has two bars",
            )
        )
    places: dict[_Row, _Place] = {}
    arrays = sorted({row.at(order.arrays) for row in rows})
    for index, array in enumerate(arrays):
        inside = [row for row in rows if row.at(order.arrays) == array]
        base = 0
        for region in sorted({row.at(order.regions) for row in inside}):
            own = [row for row in inside if row.at(order.regions) == region]
            slots, nbytes = _lay_down(own, order, page_size)
            nbytes = _stride(nbytes, order.page_nbytes)
            plane = Plane(index, base, nbytes)
            for row, (offset, stride) in slots.items():
                stride = nbytes if page_size == 1 else stride
                places[row] = _Place(plane, offset, stride)
            base += nbytes * (num_pages or 0)
    return places


def _stride(nbytes: int, declared: int | None) -> int:
    """Return the bytes from page to page: a page's own, or the more that are declared.

    Raises:
        ConfigError: pages that are declared to overlap.
    """
    if declared is not None and declared < nbytes:
        raise errors.ConfigError(
            errors.say(
                f"pages of {declared:,} B apart",
                f"a page keeps {nbytes:,} B, and pages do not overlap",
                f"Declare at least {nbytes:,} B from page to page",
            )
        )
    return nbytes if declared is None else declared


def _lay_down(
    rows: list[_Row], order: Order, page_size: int
) -> tuple[dict[_Row, tuple[int, int]], int]:
    """Give every row (byte of slot 0, bytes from slot to slot), and the page's size.

    Rows that agree on every axis outside "token" stand in one block for each slot, so a
    block's size is what its rows are apart from slot to slot.
    """
    axes, align = order.page, order.alignment
    cut = axes.index("token")
    outer, inner = axes[:cut], axes[cut + 1 :]
    ordered = sorted(rows, key=lambda row: (row.at(outer), row.at(inner)))
    found: dict[_Row, tuple[int, int]] = {}
    end = 0
    for _, block in itertools.groupby(ordered, key=lambda row: row.at(outer)):
        inside = tuple(block)
        starts, stride = _side_by_side(inside, align)
        for row, start in zip(inside, starts, strict=True):
            found[row] = (end + start, stride)
        end = _round_up(end + stride * page_size, align)
    return found, end


def _side_by_side(rows: tuple[_Row, ...], align: int) -> tuple[list[int], int]:
    """Return where rows of one slot begin in their block, and the slot's bytes."""
    if len(rows) == 1:
        return [0], rows[0].padded_nbytes(align)
    sizes = [_round_up(row.padded_nbytes(align), align) for row in rows]
    ends = list(itertools.accumulate(sizes, initial=0))
    return ends[:-1], ends[-1]


def _round_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment
