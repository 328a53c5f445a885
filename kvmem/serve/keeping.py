"""Keeping: which records an engine's texts leave behind, and who brings them back.

One group of full attention leaves a record a token; other groups leave windows, index
keys and states beside them, in parts. The law: what the records of some groups cannot
do is refused before a pool is made, all of it at once.

    require(virtual, store, certified, config)
    records, recall = of(table, groups, topology, order, store)
"""

from kvmem import canonical, errors
from kvmem.geometry import LifecycleGroup, Topology
from kvmem.serve.buckets import ServeConfig
from kvmem.serve.group_recall import GroupRecall
from kvmem.serve.group_records import GroupRecords
from kvmem.serve.page_table import PageTable
from kvmem.serve.recall import Recall, Records
from kvmem.store import PartedStore, RecordStore

__all__ = ["of", "require"]


def of(
    table: PageTable,
    groups: tuple[LifecycleGroup, ...],
    topology: Topology,
    order: str,
    store: RecordStore | PartedStore | None,
) -> tuple[Records | GroupRecords, Recall | GroupRecall | None]:
    """Return the records of an engine's pages, and who fetches and keeps them; None
    without a store."""
    if _has_one_record(groups):
        records = Records(canonical.plan(groups[0], topology, order), table.ledger)
        return records, None if store is None else Recall(store, records)
    records = GroupRecords(groups, topology, order, table.ledger)
    return records, None if store is None else GroupRecall(store, records, table)


def require(
    groups: tuple[LifecycleGroup, ...],
    store: RecordStore | PartedStore | None,
    certified: bool,
    config: ServeConfig,
) -> None:
    """Refuse what the records of these groups cannot do, all of it at once."""
    if _has_one_record(groups):
        return
    names = ", ".join(group.name for group in groups)
    broken = []
    if certified:
        law = "certified pages are those of one group of full attention"
        broken.append((law, "leave pool.certified out"))
    if store is not None and any(group.domain == "draft" for group in groups):
        law = "what draft layers keep of a text has no part of a store"
        broken.append((law, "leave the store out, or draft with another kind"))
    elif store is not None and not isinstance(store, PartedStore):
        law = "windows, index keys and states are kept in parts beside the tokens"
        broken.append((law, "open it with PartedStore.open(..., parts_of(groups))"))
    elif store is not None and store.writable and len(store.parts) > 1:
        broken += _laws_of_keeping(groups[0].page_size, store, config)
    if broken:
        laws, cures = zip(*broken, strict=True)
        cure = "; ".join(cures)
        raise errors.IncompatiblePlan(
            errors.say(
                f"an engine for the groups {names}",
                "; ".join(laws),
                f"{cure[0].upper()}{cure[1:]}",
            )
        )


def _has_one_record(groups: tuple[LifecycleGroup, ...]) -> bool:
    """Say whether a token's record is all that a text leaves behind."""
    return len(groups) == 1 and groups[0].lifecycle.kind == "full"


def _laws_of_keeping(
    page_size: int, store: PartedStore, config: ServeConfig
) -> list[tuple[str, str]]:
    """Return the laws, and cures, that a writer of windows or states breaks."""
    broken, chunk = [], store.facts.chunk_tokens
    if page_size % chunk:
        law = (
            f"windows and states are at hand page by page, and pages of {page_size} "
            f"tokens do not end where chunks of {chunk} do"
        )
        cure = "set store.chunk_tokens to pool.page_size or a divisor, or read_only"
        broken.append((law, cure))
    if not config.prefix_cache:
        law = "what windows and states have passed is kept out of the prefix cache"
        broken.append((law, "leave serve.prefix_cache on, or set read_only"))
    return broken
