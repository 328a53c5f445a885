"""Block drafts: all tokens of a proposal in one forward, from the target's rows.

After each step of the target the draft keeps its rows of the tokens that were read; to
propose, it reads the last token with masks behind it, all at once
(`kvmem.model.dflash`). What it keeps stands behind the virtual ids of the target's full
attention (`virtual`), whole on every token shard. The law: the kept row of a token
follows from the target's row of it alone. So nothing is remembered beside the pages:
behind a cached prefix, after a preemption or a rejection a proposal is what it would
have been without, and rows of rejected tokens are written over before they are seen.

    DFlash(dflash.draw(model), groups, draft_tokens=4).start(engine)
"""

from collections.abc import Sequence as ListLike

import jax
import jax.numpy as jnp
import numpy as np

from kvmem.geometry import Term
from kvmem.serve.buckets import Bucket
from kvmem.serve.draft import chain
from kvmem.serve.draft.mtp import from_the_left
from kvmem.serve.draft.protocol import Forgetful, Proposal, Target
from kvmem.serve.draft.virtual import OnVirtualIds, VirtualDraft, VirtualPages
from kvmem.serve.request import Sequence
from kvmem.serve.work import Feed

__all__ = ["DFlash", "DFlashProposer"]


class DFlash(VirtualDraft):
    """Facts of a block draft: layers as `kvmem.model.dflash` makes them.

    A block has as many masks as `draft_tokens`.
    """

    def start(self, target: Target) -> "DFlashProposer":
        """Make the draft's pool, and put the layers where the target's weights are.

        Raises:
            IncompatiblePlan: a target that the draft cannot follow.
        """
        self.require(target)
        return DFlashProposer(self, target)


class DFlashProposer(OnVirtualIds, Forgetful):
    """A block draft behind one engine's model, on the virtual ids of its pages."""

    wants_features = True

    def __init__(self, facts: DFlash, target: Target):
        self.num_drafted = facts.draft_tokens
        self.whose = facts.model
        self._hidden = facts.model.spec.hidden
        self._target = target
        self._virtual = VirtualPages(facts.model, facts.draft_groups, target)
        self._stepper = self._virtual.stepper

    @property
    def pages(self) -> jax.Array:
        """Return u8[R, P, E], the draft's pages."""
        return self._virtual.pages

    def observe(self, feeds: ListLike[Feed], features: jax.Array) -> None:
        """Keep the target's rows of what it has just read, drafted tokens too."""
        counts = np.zeros(features.shape[0], np.int32)
        counts[: len(feeds)] = [len(feed.tokens) for feed in feeds]
        longest = max(feed.end for feed in feeds)
        pages = self._target.buckets.decode(len(feeds), longest).pages
        bucket = Bucket(*features.shape[:2], pages, logits=0)
        self._virtual.run(feeds, bucket, None, from_the_left(features, counts))

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int]) -> Proposal:
        """Propose a block behind each sequence, and cut it where it is too long.

        A token that is sampled is drawn with the noise that its target will draw with.
        """
        feeds = [Feed((s.tokens[-1],), s.num_computed, s.held) for s in sequences]
        longest = max(feed.end for feed in feeds)
        bucket = self._block(self._target.buckets.decode(len(feeds), longest))
        (logits,) = self._virtual.run(feeds, bucket, None, None)
        rows = logits.reshape(bucket.rows, self.num_drafted, -1)
        choose = chain.Chooser(chain.keys_of(sequences))
        chosen = [choose(rows[:, place], place) for place in range(max(most))]
        return chain.proposal_of(chain.chains_of(*zip(*chosen, strict=True), most))

    def warm_up(self) -> int:
        """Compile what follows each declared bucket of the target, and every block."""
        before = sum(self._stepper.num_traces.values())
        for each in self._target.buckets.all():
            rows = jnp.zeros((each.rows, each.tokens, self._hidden), jnp.float32)
            rows = from_the_left(rows, np.zeros(each.rows, np.int32))
            kept = Bucket(each.rows, each.tokens, each.pages, logits=0)
            self._virtual.run((), kept, None, rows)
            if each.tokens == 1:
                self._virtual.run((), self._block(each), None, None)
        return sum(self._stepper.num_traces.values()) - before

    def claims(self) -> tuple[Term, ...]:
        """Return what the draft keeps of each row of the target."""
        return self._virtual.terms

    def _block(self, bucket: Bucket) -> Bucket:
        """Return the bucket of blocks behind the rows of a decode step."""
        return bucket._replace(logits=self.num_drafted, features=0)
