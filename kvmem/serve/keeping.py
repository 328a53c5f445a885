"""Keeping: which records an engine's texts leave behind, and who brings them back.

One group of full attention leaves a record a token; other groups leave windows, index
keys and states beside them, in parts. The law: what the records of some groups cannot
do is refused before a pool is made, all of it at once.

    require(virtual, store, certified, config)
    records, recall = of(table, groups, topology, order, store)
    join(recall, model, groups, proposer)
"""

from kvmem import canonical, errors
from kvmem.geometry import LifecycleGroup, Topology
from kvmem.model.loaded import LoadedModel
from kvmem.serve import travel
from kvmem.serve.buckets import ServeConfig
from kvmem.serve.group_recall import GroupRecall
from kvmem.serve.group_records import GroupRecords
from kvmem.serve.page_table import PageTable
from kvmem.serve.recall import Recall, Records
from kvmem.serve.travel import Traveller
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
    shares = GroupRecords(groups, topology, order, table.ledger)
    recall = None
    if isinstance(store, PartedStore):
        recall = GroupRecall(store, shares, table)
    if not _has_one_record(groups):
        return shares, recall
    records = Records(canonical.plan(groups[0], topology, order), table.ledger)
    if store is not None and recall is None:
        recall = Recall(store, records)
    return records, recall


def join(
    recall: Recall | GroupRecall | None,
    model: LoadedModel,
    groups: tuple[LifecycleGroup, ...],
    drafts: Traveller | None,
) -> None:
    """Let what a draft keeps travel with the target's records.

    Raises:
        IncompatiblePlan: a store in which they would not be together.
    """
    if recall is None:
        return
    travel.require(recall.store, model, groups, drafts)
    if drafts is not None and isinstance(recall, GroupRecall):
        recall.travel_with(drafts)


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
    if store is not None and not isinstance(store, PartedStore):
        law = (
            "windows, index keys, states and drafts are kept in parts beside the tokens"
        )
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
