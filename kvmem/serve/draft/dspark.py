"""Draft layers on virtual ids: a linear chain that never asks where a page lies.

The weights are those of `mtp`; the rows stand behind the virtual ids of the target's
full attention (`virtual`). The law: a proposal reads and writes by those ids alone, so
pages may be moved at any time, between a proposal and its verification too.

    DSpark(mtp.draw(model), groups, draft_tokens=3).start(engine)
"""

from collections.abc import Sequence as ListLike

import jax

from kvmem.geometry import Term
from kvmem.serve.buckets import Bucket
from kvmem.serve.draft.mtp import MTPProposer
from kvmem.serve.draft.protocol import Target
from kvmem.serve.draft.virtual import (
    OnVirtualIds,
    VirtualDraft,
    VirtualPages,
    VirtualStepper,
)
from kvmem.serve.work import Feed

__all__ = ["DSpark"]


class DSpark(VirtualDraft):
    """Facts of draft layers on virtual ids, as `kvmem.model.mtp` makes them."""

    def start(self, target: Target) -> "DSparkProposer":
        """Make the draft's pool, and put the layers where the target's weights are.

        Raises:
            IncompatiblePlan: a target that the draft cannot follow.
        """
        self.require(target)
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
