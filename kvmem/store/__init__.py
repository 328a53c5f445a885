"""Token records on disk, found again by what was said: keys, segments, index, store.

Importing this room touches no device and no jax; the first `put` imports Orbax.
"""

from kvmem.store.facts_file import Explained
from kvmem.store.facts_file import read as read_facts
from kvmem.store.facts_file import write as explain
from kvmem.store.host_tier import HostStats, HostTier
from kvmem.store.io import Disk, Step
from kvmem.store.object_store import ObjectStore
from kvmem.store.open_root import check_options, open_root
from kvmem.store.page_key import Extra, PageKey, chain_keys, link, seed
from kvmem.store.page_store import PageStore
from kvmem.store.parted_store import PartedResult, PartedStats, PartedStore
from kvmem.store.parts import Part, Rows, part_id, parts_of, whole_id
from kvmem.store.record_store import RecordStats, RecordStore
from kvmem.store.report import ArrayReport, SegmentRow, inspect
from kvmem.store.results import (
    Erased,
    GcReport,
    GetResult,
    PutResult,
    SegmentReport,
    StoreStats,
)
from kvmem.store.segment import Facts
from kvmem.store.tiered_store import TieredStats, TieredStore
from kvmem.store.writer import PutFuture

__all__ = [
    "ArrayReport",
    "Disk",
    "Extra",
    "Explained",
    "Facts",
    "Erased",
    "GcReport",
    "GetResult",
    "HostStats",
    "HostTier",
    "ObjectStore",
    "PageKey",
    "PageStore",
    "Part",
    "PartedResult",
    "PartedStats",
    "PartedStore",
    "PutFuture",
    "PutResult",
    "RecordStats",
    "RecordStore",
    "Rows",
    "SegmentReport",
    "SegmentRow",
    "Step",
    "StoreStats",
    "TieredStats",
    "TieredStore",
    "chain_keys",
    "check_options",
    "explain",
    "inspect",
    "link",
    "open_root",
    "part_id",
    "parts_of",
    "read_facts",
    "seed",
    "whole_id",
]
