"""Mapping: which byte of one rank's page is which byte of the canonical page.

The canonical page is the token records of a page's tokens, one after another. Both
sides are envelopes; a mapping matches their rows by (layer, field, head) and is never
written by hand, so a page order of the engine and a canonical order are the same kind
of thing.

    mapping(group, Topology(tp=4), rank=1, order="packed_nhd")
    # (CopyRun(local_offset=0, local_stride=256, canonical_offset=256,
    #          canonical_stride=1024, nbytes=256, count=4),)

Slot s of token shard c is canonical token (s // I * dcp + c) * I + s % I, I being the
interleave, where the tokens of a group are spread (`geometry.Spread`). Windows and a
draft's groups are not: slot s is token s on every token shard. A recurrent state has
one record a checkpoint, and every token shard keeps the whole of it.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvmem.canonical.runs import CopyRun, fold, join
from kvmem.geometry import envelope
from kvmem.geometry.envelope import Entry, Envelope, Plane, parse_order
from kvmem.geometry.fields import Field
from kvmem.geometry.groups import LifecycleGroup
from kvmem.geometry.spread import Spread
from kvmem.geometry.topology import Topology

__all__ = [
    "RECORD",
    "Row",
    "TokenSpan",
    "canonical_envelope",
    "mapping",
    "page_tokens",
    "record_offsets",
    "rows",
    "token_spans",
]

RECORD = "record"  # the canonical order: token records, the only one that is stored


class Row(NamedTuple):
    """One head of one field inside an envelope: slot s stands at offset + s * stride.

    `key` names it on every topology: (layer, field, global head); `plane` is the number
    of its plane among those of the envelope.
    """

    key: tuple[str, str, int]
    field: Field
    offset: int
    stride: int
    plane: int


class TokenSpan(NamedTuple):
    """Local slots [slot, slot + count): slot + i keeps canonical token + i * step."""

    slot: int
    token: int
    step: int
    count: int


def mapping(
    group: LifecycleGroup,
    topology: Topology,
    rank: int,
    order: str = "head_major",
    canonical: str = RECORD,
) -> tuple[CopyRun, ...]:
    """Return the runs that couple one page of `rank` with its canonical page.

    Args:
        order: the page order of the rank.
        canonical: `RECORD`, or a page order of the whole model as canonical side.

    Raises:
        IncompatiblePlan: heads or an interleave that the topology cannot serve.
    """
    runs = rows(group, topology, rank, order, canonical)
    return fold(join(runs))


def rows(
    group: LifecycleGroup,
    topology: Topology,
    rank: int,
    order: str,
    canonical: str = RECORD,
    num_pages: int | None = None,
) -> tuple[CopyRun, ...]:
    """Return the uncoalesced runs of a rank: one a head, field, layer and token span.

    Fragment i of such a run is one token.
    """
    local = envelope.build(group, topology, rank, order, num_pages)
    whole = canonical_envelope(group, page_tokens(group, topology), canonical)
    places = {row.key: row for row in _rows_of(whole)}
    spans = (TokenSpan(0, 0, 1, 1),)
    if not group.is_state:
        spans = token_spans(group, topology, rank)
    return tuple(
        _couple(row, places[row.key], span) for row in _rows_of(local) for span in spans
    )


def page_tokens(group: LifecycleGroup, topology: Topology) -> int:
    """Return the records that one physical page keeps over all ranks: of a state, 1."""
    return group.slots * Spread.of(group, topology).shards


def canonical_envelope(
    group: LifecycleGroup, num_tokens: int, canonical: str = RECORD
) -> Envelope:
    """Return the envelope of the canonical page of `num_tokens` tokens.

    Token records stand end to end, without padding: layer, head, field, bytes.

    Raises:
        ConfigError: an order that is unknown, or of several arrays.
    """
    if canonical != RECORD:
        parse_order(canonical)
        whole = dataclasses.replace(group, page_size=num_tokens)
        return envelope.build(whole, Topology(), 0, canonical)
    entries, end = [], 0
    plane = Plane(0, 0, num_tokens * group.record_nbytes)
    for layer in group.layers:
        for head in range(max(field.rows for field in layer.fields)):
            for field in layer.fields:
                if head < field.rows:
                    entries.append(
                        Entry(field, end, group.record_nbytes, head, 1, plane)
                    )
                    end += field.head_nbytes
    return Envelope(tuple(entries), num_tokens, RECORD, num_tokens * end)


@functools.lru_cache(maxsize=64)
def record_offsets(group: LifecycleGroup) -> Mapping[tuple[str, str, int], int]:
    """Return where each (layer, field, head) begins in one token's record."""
    entries = canonical_envelope(group, 1).entries
    return types.MappingProxyType(
        {(e.field.layer, e.field.name, e.head0): e.offset for e in entries}
    )


def token_spans(
    group: LifecycleGroup, topology: Topology, rank: int
) -> tuple[TokenSpan, ...]:
    """Return where the slots of one page of `rank` stand among the page's tokens.

    Raises:
        IncompatiblePlan: an interleave that does not divide the page.
    """
    spread, shard = Spread.of(group, topology), topology.dcp_index(rank)
    if spread.shards == 1:
        return (TokenSpan(0, 0, 1, group.page_size),)
    width = spread.interleave
    if width == 1:
        return (TokenSpan(0, shard, spread.shards, group.page_size),)
    return tuple(
        TokenSpan(slot, spread.position(slot, shard), 1, width)
        for slot in range(0, group.page_size, width)
    )


def _rows_of(env: Envelope) -> Iterator[Row]:
    numbers = {plane: number for number, plane in enumerate(env.planes)}
    for entry in env.entries:
        for i in range(entry.nheads):
            yield Row(
                (entry.field.layer, entry.field.name, entry.head0 + i),
                entry.field,
                entry.offset + i * entry.field.head_nbytes,
                entry.slot_stride,
                numbers[entry.plane],
            )


def _couple(local: Row, whole: Row, span: TokenSpan) -> CopyRun:
    return CopyRun(
        local_offset=local.offset + span.slot * local.stride,
        local_stride=local.stride,
        canonical_offset=whole.offset + span.token * whole.stride,
        canonical_stride=span.step * whole.stride,
        nbytes=local.field.head_nbytes,
        count=span.count,
        plane=local.plane,
    )
