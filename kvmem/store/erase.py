"""Erasing: of a store's chunks only those that are named stay, in files of their own.

The law: when this returns, no file of the store that can be read holds a byte of a
chunk that was not named. A segment is rewritten without its dead rows however few they
are; what is named and cannot be carried over (its bytes do not read, or there is no
room beside the old segment) goes too, since a cache is worth less than a promise.

    erase.retain(keeper, lease, keep)     # Erased
"""

from collections.abc import Collection

from kvmem.store import segment
from kvmem.store.index import Index
from kvmem.store.keeper import Keeper
from kvmem.store.page_key import PageKey
from kvmem.store.results import Erased
from kvmem.store.segment import Segment
from kvmem.store.shelf import extend
from kvmem.store.writer import Lease

__all__ = ["retain"]


def retain(keeper: Keeper, lease: Lease, keep: Collection[PageKey]) -> Erased:
    """Keep the chunks of these keys alone; return what went once its bytes are gone."""
    index, wanted = keeper.index, frozenset(keep)
    extend(index, keeper.shelf)
    keeper.shelf.sweep(index)
    before = set(index.places) | set(index.masked)
    with lease.hold(), index.lock:
        for key in before - wanted:
            index.evict(key)
    for partial in _partial(index):
        _carry_over(keeper, lease, partial)
    keeper.drop_dead(lease)
    keeper.save_recency()
    after = set(index.places) | set(index.masked)
    return Erased(
        num_chunks=len(before - wanted),
        num_lost=len(before & wanted) - len(after & wanted),
        unread_nbytes=index.unread_nbytes,
    )


def _partial(index: Index) -> list[Segment]:
    """Return the segments in which some rows are live and some are not."""
    with index.lock:
        return [
            each
            for name, each in index.segments.items()
            if 0 < index.live[name] < len(each.keys)
        ]


def _carry_over(keeper: Keeper, lease: Lease, partial: Segment) -> None:
    """Write a segment's live rows into another, and let go of the old one."""
    index = keeper.index
    fits = keeper.has_room(segment.estimate(partial.facts, index.live[partial.name]))
    live = keeper.read_live(partial) if fits else None
    if live is None and fits:  # what does not read is masked now; the rest may
        _let_go(index, partial, only_masked=True)
        live = keeper.read_live(partial) if index.live[partial.name] else None
    if live is not None:
        keeper.gather(lease, [live])
    with lease.hold():
        _let_go(index, partial)
    keeper.drop_dead(lease)


def _let_go(index: Index, gone: Segment, only_masked: bool = False) -> None:
    """Forget the rows that a segment still holds."""
    with index.lock:
        for key in gone.keys:
            place = index.on_disk(key)
            is_masked = key in index.masked
            if place and place.segment is gone and (is_masked or not only_masked):
                index.evict(key)
