"""The table [store]: where token records are kept, and the tiers it opens.

StoreConfig(root="/var/kv").open(model, group)     # None where nothing is set
"""

import dataclasses
from typing import Literal

from kvmem import canonical, errors, settings, store
from kvmem.geometry import LifecycleGroup
from kvmem.model.loaded import LoadedModel
from kvmem.settings import Nbytes
from kvmem.store import HostTier, RecordStore, TieredStore

__all__ = ["StoreConfig"]


@dataclasses.dataclass(frozen=True)
class StoreConfig:
    """Where token records are kept.

    Args:
        root: the store's folder, or s3://bucket/prefix; None: nothing outlives the
            process.
        chunk_tokens: tokens of a chunk; a property of the root.
        read_only: look records up and write none; readers share a root.
        max_nbytes: bytes that a folder's files of this model and format may take.
        host_memory: bytes of RAM in front of the root, once for all ranks; without a
            root, RAM alone.
        host_kind: memory of the RAM tier, pinned_host where the backend has it.
        endpoint: address of an s3:// root's server; None: Amazon's.
        region: region of an s3:// root's bucket; None: the environment's.
    """

    root: str | None = None
    chunk_tokens: int = 16
    read_only: bool = False
    max_nbytes: Nbytes | None = None
    host_memory: Nbytes | None = None
    host_kind: Literal["pageable", "pinned_host"] = "pageable"
    endpoint: str | None = None
    region: str | None = None

    def __post_init__(self):
        settings.settle(self)
        settings.require_positive(
            chunk_tokens=self.chunk_tokens,
            max_nbytes=self.max_nbytes,
            host_memory=self.host_memory,
        )
        if self.host_memory is None and self.host_kind != "pageable":
            raise errors.ConfigError(
                errors.say(
                    f"host_kind = {self.host_kind!r} alone",
                    "it is the kind of host_memory",
                    "Give store.host_memory too",
                )
            )
        store.check_options(
            self.root,
            max_nbytes=self.max_nbytes,
            endpoint=self.endpoint,
            region=self.region,
        )

    def open(self, model: LoadedModel, group: LifecycleGroup) -> RecordStore | None:
        """Open the tiers that are set, None without any.

        A writer leaves beside the segments what both ids stand for.
        """
        if self.root is None and self.host_memory is None:
            return None  # without digesting the model
        facts = {
            "model_id": model.model_id,
            "format_id": canonical.format_id([group]),
            "record_nbytes": group.record_nbytes,
            "chunk_tokens": self.chunk_tokens,
        }
        host = None
        if self.host_memory is not None:
            host = HostTier(self.host_memory, memory=self.host_kind, **facts)
        if self.root is None:
            return host
        kept = store.open_root(
            self.root,
            **facts,
            read_only=self.read_only,
            max_nbytes=self.max_nbytes,
            endpoint=self.endpoint,
            region=self.region,
        )
        if kept.writable:
            try:
                store.explain(kept, model.facts, canonical.format_fields([group]))
            except BaseException:
                kept.close()
                raise
        return kept if host is None else TieredStore(host, kept)
