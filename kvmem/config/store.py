"""The table [store]: where token records are kept, and the tiers it opens.

StoreConfig(root="/var/kv").open(model, groups)     # None where nothing is set
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from kvmem import canonical, errors, settings, store
from kvmem.geometry import LifecycleGroup
from kvmem.model import joint
from kvmem.model.loaded import LoadedModel
from kvmem.settings import Nbytes
from kvmem.store import HostTier, PartedStore, RecordStore, TieredStore, bucket

__all__ = ["StoreConfig"]


@dataclasses.dataclass(frozen=True)
class StoreConfig:
    """Where token records are kept.

    Args:
        root: the store's folder, or s3://bucket/prefix; None: nothing outlives the
            process.
        chunk_tokens: tokens of a chunk; a property of the root.
        read_only: look records up and write none; readers share a root.
        max_nbytes: bytes that one model and format may take in a folder or bucket;
            others in the root are not counted.
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

    @property
    def is_set(self) -> bool:
        """Say whether records are kept anywhere beside the pool."""
        return self.root is not None or self.host_memory is not None

    def unserved(
        self,
        groups: Sequence[LifecycleGroup],
        of_draft: Sequence[LifecycleGroup] = (),
    ) -> list[tuple[str, str, str]]:
        """Return what is set and not kept for these groups: asked, law and cure.

        Args:
            groups: of the model.
            of_draft: of its draft, where it keeps any.
        """
        if not self.is_set:
            return []
        if not any(group.lifecycle.kind == "full" for group in groups):
            names = ", ".join(group.name for group in groups)
            law = "a text is kept by the records of all its tokens"
            return [(f"a store for the groups {names}", law, "leave [store] out")]
        faults = []
        if len(store.parts_of((*groups, *of_draft))) == 1:
            return faults
        if self.host_memory is not None:
            law = "RAM in front of a root keeps one part, and several groups have more"
            faults.append(("store.host_memory", law, "leave store.host_memory out"))
        if self.max_nbytes is not None:
            law = "a budget is that of one part, and several groups have more"
            cure = "use `kvmem store gc --max-nbytes`, part by part"
            faults.append(("store.max_nbytes", law, cure))
        if bucket.scheme_of(self.root):
            law = "parts of a bucket would each want the writer's lease"
            faults.append((f"store.root = {self.root!r}", law, "give a folder"))
        return faults

    def open(
        self,
        model: LoadedModel,
        groups: Sequence[LifecycleGroup],
        draft: LoadedModel | None = None,
    ) -> RecordStore | PartedStore | None:
        """Open the tiers that are set, None without any.

        Several groups have a store of parts. A writer leaves beside the segments what
        both ids stand for.

        Args:
            model: whose records are kept.
            groups: of the model, then those of its draft.
            draft: the draft's model, where it keeps any.
        """
        if not self.is_set:
            return None  # without digesting the model
        ids = joint.model_id(model, draft), canonical.format_id(groups)
        said = joint.facts(model, draft), canonical.format_fields(groups)
        if len(groups) == 1:
            return self._open_tiers(*ids, groups[0].record_nbytes, said)
        parts = store.parts_of(groups)
        if len(parts) > 1:
            made = PartedStore.open(
                self.root, *ids, parts, self.chunk_tokens, self.read_only
            )
            return _explained(made, said)
        (base,) = parts
        name = store.part_id(ids[1], base.name)
        kept = self._open_tiers(ids[0], name, base.record_nbytes, said)
        facts = dataclasses.replace(kept.facts, format_id=ids[1])
        return PartedStore(facts, parts, {base.name: kept})

    def _open_tiers(
        self,
        model_id: str,
        format_id: str,
        record_nbytes: int,
        said: tuple[Mapping[str, object], Mapping[str, object]],
    ) -> RecordStore:
        """Open the tiers of one part, and explain a root's ids."""
        facts = {
            "model_id": model_id,
            "format_id": format_id,
            "chunk_tokens": self.chunk_tokens,
            "record_nbytes": record_nbytes,
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
        _explained(kept, said)
        return kept if host is None else TieredStore(host, kept)


def _explained[T](
    kept: T, said: tuple[Mapping[str, object], Mapping[str, object]]
) -> T:
    """Return a store that says beside its segments what both ids stand for."""
    if kept.writable:
        try:
            store.explain(kept, *said)
        except BaseException:
            kept.close()
            raise
    return kept
