"""Token records on disk, found again by what was said: keys, segments, index, store.

Importing this room touches no device and no jax; the first `put` imports Orbax.
"""

from kvmem.store.page_key import Extra, PageKey, chain_keys, link, seed
from kvmem.store.page_store import (
    GetResult,
    PageStore,
    PutResult,
    SegmentReport,
    StoreStats,
)

__all__ = [
    "Extra",
    "GetResult",
    "PageKey",
    "PageStore",
    "PutResult",
    "SegmentReport",
    "StoreStats",
    "chain_keys",
    "link",
    "seed",
]
