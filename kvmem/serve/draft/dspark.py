"""Draft layers on virtual ids: a linear chain that never asks where a page lies.

The weights are those of `mtp`; the rows stand behind the virtual ids of the target's
full attention (`virtual`). The law: a proposal reads and writes by those ids alone, so
pages may be moved at any time, between a proposal and its verification too.

    DSpark(mtp.draw(model), groups, draft_tokens=3).start(engine)
"""

import dataclasses
from collections.abc import Sequence as ListLike
from typing import ClassVar

import jax

from kvmem import settings
from kvmem.geometry import LifecycleGroup, Term
from kvmem.model.loaded import LoadedModel
from kvmem.serve.buckets import Bucket
from kvmem.serve.draft.mtp import MTPProposer, require_rows
from kvmem.serve.draft.protocol import Target
from kvmem.serve.draft.virtual import (
    OnVirtualIds,
    VirtualPages,
    VirtualStepper,
    require_pages,
)
from kvmem.serve.work import Feed

__all__ = ["DSpark"]


@dataclasses.dataclass(frozen=True, eq=False)
class DSpark:
    """Facts of draft layers on virtual ids.

    Args:
        model: the layers, as `kvmem.model.mtp` makes them for the target.
        draft_groups: theirs, one of full attention, of domain "draft".
        draft_tokens: tokens proposed for a sequence at most.
    """

    model: LoadedModel
    draft_groups: tuple[LifecycleGroup, ...]
    draft_tokens: int = 4
    groups: ClassVar[tuple[LifecycleGroup, ...]] = ()

    def __post_init__(self):
        settings.require_positive(draft_tokens=self.draft_tokens)

    def start(self, target: Target) -> "DSparkProposer":
        """Make the draft's pool, and put the layers where the target's weights are.

        Raises:
            IncompatiblePlan: layers of another shape than the target's, other pages, or
                a target without full attention.
        """
        require_rows(self.model, target)
        require_pages(self.draft_groups, target)
        return DSparkProposer(self, target)


class DSparkProposer(OnVirtualIds, MTPProposer):
    """Draft layers behind one engine's model, on the virtual ids of its pages."""

    def __init__(self, facts: DSpark, target: Target):
        self._virtual = VirtualPages(facts.model, facts.draft_groups, target)
        super().__init__(facts, target)

    @property
    def pages(self) -> jax.Array:
        """Return u8[R, P, E], the draft's pages."""
        return self._virtual.pages

    def claims(self) -> tuple[Term, ...]:
        """Return what the draft keeps of each row of the target."""
        return self._virtual.terms

    def _stepper_of(self, facts: DSpark, target: Target) -> VirtualStepper:
        """Return steps whose tables are virtual ids."""
        return self._virtual.stepper

    def _compute(
        self,
        feeds: ListLike[Feed],
        bucket: Bucket,
        tokens: jax.Array | None,
        hidden: jax.Array,
    ) -> list[jax.Array]:
        """Read tokens into the draft's own pages; return logits and own rows."""
        return self._virtual.run(feeds, bucket, tokens, hidden)
