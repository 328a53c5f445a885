"""Travel: what a draft keeps of a text leaves and comes back with the target's records.

Rows in pages of the target's pool are records like any other. A draft with pages of its
own is a `Traveller`: its groups' records stand behind the target's in one part of a
store, so there is no key under which one is without the other. The law: both land or
neither does, and both are kept or neither is; rows made by other weights, of either
model, have another id and are not found.

    travel.require(store, model, groups, proposer)     # before the first text
    traveller.caught_up(sequence)                      # tokens whose rows are at hand
    traveller.fill(sequence, 0, first=32, records=rows)
"""

from collections.abc import Sequence as ListLike
from typing import Protocol

import numpy as np

from kvmem import errors
from kvmem.geometry import LifecycleGroup, Term
from kvmem.model import joint
from kvmem.model.loaded import LoadedModel
from kvmem.serve.request import Sequence
from kvmem.store import PartedStore, RecordStore, parts_of

__all__ = ["Traveller", "require"]


class Traveller(Protocol):
    """Who drafts, as a store sees it.

    `whose` keys and values are kept: the draft's model, None where it keeps none.
    `apart` are the groups whose rows are in pages of its own; those of a draft that
    shares the target's pool are the engine's.
    """

    whose: LoadedModel | None
    apart: tuple[LifecycleGroup, ...]

    def known(self, sequence: Sequence) -> int | None:
        """Return of how many tokens the rows are at hand; None: there are no pages for
        this sequence."""

    def caught_up(self, sequence: Sequence) -> int:
        """Read what the draft has not read of a sequence; return of how many tokens the
        rows are at hand, fewer than are computed where it has no room for more."""

    def export(
        self, sequence: Sequence, group: int, first: int, end: int
    ) -> np.ndarray:
        """Return u8[end - first, record] of tokens whose rows are at hand."""

    def fill(
        self, sequence: Sequence, group: int, first: int, records: np.ndarray
    ) -> None:
        """Write the records of the tokens from `first` on; known ones stay."""

    def landed(self, sequence: Sequence, length: int) -> None:
        """Learn that the rows of the first `length` tokens are at hand now."""

    def claims(self) -> tuple[Term, ...]:
        """Return what it claims of a rank's memory, in a pool of its own."""


def require(
    store: RecordStore | PartedStore,
    model: LoadedModel,
    groups: ListLike[LifecycleGroup],
    drafts: Traveller | None,
) -> None:
    """Refuse a store in which target and draft would not be together.

    Args:
        store: of the engine.
        model: the target.
        groups: of the engine's pool, those of a draft that shares it behind the
            target's.
        drafts: who drafts; None: nobody.

    Raises:
        IncompatiblePlan: rows that no part has, parts of other groups, or a store of
            other weights; all of it at once.
    """
    whose = None if drafts is None else drafts.whose
    apart = () if drafts is None else drafts.apart
    keeps = drafts is not None and bool(drafts.claims())
    broken = []
    if keeps and not apart:
        law = "what this draft keeps of a text has no part of a store"
        cure = "leave the store out, or draft with ngram or frozen_kv, which keep none"
        broken.append((law, cure))
    elif apart and not isinstance(store, PartedStore):
        law = "a text would come back from it without what its draft keeps of it"
        cure = "open it with PartedStore.open(..., parts_of((*groups, *draft_groups)))"
        broken.append((law, cure))
    elif isinstance(store, PartedStore) and store.parts != parts_of((*groups, *apart)):
        law = (
            f"its parts ({', '.join(p.name for p in store.parts)}) are of other groups"
        )
        cure = "make parts with parts_of of all groups, the draft's among them"
        broken.append((law, cure))
    if whose is not None and store.facts.model_id != joint.model_id(model, whose):
        law = "its records are not those of this target and this draft together"
        cure = "open it under kvmem.model.joint.model_id(model, draft)"
        broken.append((law, cure))
    if broken:
        laws, cures = zip(*broken, strict=True)
        cure = "; ".join(cures)
        raise errors.IncompatiblePlan(
            errors.say(
                "a store beside this draft" if whose else "a store for these groups",
                "; ".join(laws),
                f"{cure[0].upper()}{cure[1:]}",
            )
        )
