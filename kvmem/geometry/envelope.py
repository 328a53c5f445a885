"""The envelope: what the bytes of one page mean on one rank.

The address law, here and nowhere else: the bytes of slot s of an entry stand at
(page, entry.offset + s * entry.slot_stride), `entry.nbytes` of them, contiguous. A page
order is a line of axis names, outermost first, so every order is one call of `build`.

    build(group, Topology(tp=3), rank=1, order="layer head field token")
    # page [L, h, K/V, T, D]: one entry a (layer, head, field), whole rows of T * D

Offsets, strides and the page's size are multiples of 16 bytes, padding included, and
are equal on every rank of a topology: only `head0` differs.
"""

import dataclasses
import functools
import itertools

from kvmem import errors
from kvmem.geometry.fields import Field
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.topology import Topology

__all__ = ["ALIGNMENT", "AXES", "ORDERS", "Entry", "Envelope", "build", "parse_order"]

ALIGNMENT = 16
AXES = ("layer", "field", "head", "token")
ORDERS = {
    "head_major": "layer head field token",
    "token_major": "layer field token head",
    "split_hnd": "layer field head token",
    "packed_nhd": "layer token head field",
    "packed_hnd": "layer head token field",
    "slot_major": "token layer head field",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run of heads of one field inside a page; `head0` is global.

    Slot s of the entry is bytes [offset + s * slot_stride, + nbytes) of the page.
    """

    field: Field
    offset: int
    slot_stride: int
    head0: int
    nheads: int

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of this entry, contiguous."""
        return self.nheads * self.field.head_nbytes

    def address(self, slot: int) -> int:
        """Return the byte offset of `slot` inside any page."""
        return self.offset + slot * self.slot_stride


@dataclasses.dataclass(frozen=True)
class Envelope:
    """The meaning of one page on one rank: entries in canonical order and its size."""

    entries: tuple[Entry, ...]
    page_size: int
    order: str
    nbytes: int

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


def parse_order(order: str) -> tuple[str, ...]:
    """Return the axis names of a page order, outermost first.

    Args:
        order: a key of `ORDERS`, or its axes in words ("layer head field token").

    Raises:
        ConfigError: not a permutation of the four axes.
    """
    axes = tuple(ORDERS.get(order, order).split())
    if sorted(axes) != sorted(AXES):
        raise errors.ConfigError(
            errors.say(
                f"page order {order!r}",
                f"an order names each of {', '.join(AXES)} once",
                f"Use one of {', '.join(ORDERS)}",
            )
        )
    return axes


@functools.lru_cache(maxsize=1024)
def build(
    group: LifecycleGroup, topology: Topology, rank: int, order: str = "head_major"
) -> Envelope:
    """Return the envelope of `group` on one rank.

    A row is the unit that stays contiguous for one slot: all local heads of a field
    where "head" is the innermost axis, else one head. Rows are laid down in the order
    of the axes, each padded to 16 bytes.

    Raises:
        ConfigError: unknown order or a rank outside the topology.
        IncompatiblePlan: heads that the topology can neither divide nor replicate.
    """
    axes = parse_order(order)
    if not 0 <= rank < topology.ranks:
        raise errors.ConfigError(
            errors.say(
                f"rank {rank} of a topology of {topology.ranks}",
                "ranks are counted from zero",
                f"Give a rank below {topology.ranks}",
            )
        )
    rows = _rows(group, topology, together=axes[-1] == "head")
    offsets, nbytes = _lay_down(rows, axes, group.page_size)
    entries = tuple(
        Entry(
            field=row.field,
            offset=offsets[row][0],
            slot_stride=_slot_stride(offsets[row], row, nbytes),
            head0=topology.shard(row.field, rank).start + row.head,
            nheads=row.nheads,
        )
        for row in rows
    )
    return Envelope(entries, group.page_size, order, nbytes)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One slot's contiguous bytes: local heads [head, head + nheads) of a field."""

    field: Field
    layer_at: int
    field_at: int
    head: int
    nheads: int

    @property
    def padded_nbytes(self) -> int:
        return _round_up(self.nheads * self.field.head_nbytes)


def _rows(group: LifecycleGroup, topology: Topology, together: bool) -> list[_Row]:
    """List a rank's rows in canonical order: layer, head, field."""
    rows = []
    for layer_at, layer in enumerate(group.layers):
        for field_at, field in enumerate(layer.fields):
            count = topology.shard(field, 0).count
            width = count if together else 1
            for head in range(0, count, width):
                rows.append(_Row(field, layer_at, field_at, head, width))
    return sorted(rows, key=lambda r: (r.layer_at, r.head, r.field_at))


def _lay_down(
    rows: list[_Row], axes: tuple[str, ...], page_size: int
) -> tuple[dict[_Row, list[int]], int]:
    """Give every (row, slot) its byte offset, in the order of the axes."""

    def place(cell: tuple[_Row, int]) -> tuple[int, ...]:
        row, slot = cell
        at = {
            "layer": row.layer_at,
            "field": row.field_at,
            "head": row.head,
            "token": slot,
        }
        return tuple(at[axis] for axis in axes)

    offsets: dict[_Row, list[int]] = {row: [] for row in rows}
    end = 0
    for row, _ in sorted(itertools.product(rows, range(page_size)), key=place):
        offsets[row].append(end)
        end += row.padded_nbytes
    return offsets, end


def _slot_stride(offsets: list[int], row: _Row, page_nbytes: int) -> int:
    """Return the one distance between neighbouring slots of a row."""
    if len(offsets) == 1:
        return page_nbytes
    strides = {b - a for a, b in itertools.pairwise(offsets)}
    assert len(strides) == 1, f"slots of {row.field} are not evenly spaced"
    return strides.pop()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
