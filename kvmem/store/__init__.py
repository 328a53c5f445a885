"""Token records on disk, found again by what was said: keys, segments, index, store.

Importing this room touches no device and no jax; the first `put` imports Orbax.
"""

from kvmem.store.host_tier import HostStats, HostTier
from kvmem.store.page_key import Extra, PageKey, chain_keys, link, seed
from kvmem.store.page_store import (
    GetResult,
    PageStore,
    PutResult,
    SegmentReport,
    StoreStats,
)
from kvmem.store.record_store import RecordStats, RecordStore
from kvmem.store.tiered_store import TieredStats, TieredStore

__all__ = [
    "Extra",
    "GetResult",
    "HostStats",
    "HostTier",
    "PageKey",
    "PageStore",
    "PutResult",
    "RecordStats",
    "RecordStore",
    "SegmentReport",
    "StoreStats",
    "TieredStats",
    "TieredStore",
    "chain_keys",
    "link",
    "seed",
]
