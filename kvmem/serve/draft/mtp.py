"""Draft layers in the target's own pool: multi-token prediction in one engine.

Their groups stand behind the target's in one manager, so target and draft pages are
handed out, shared, cached, rolled back and stored together, or not at all. After each
step of the target the layers read its hidden rows, which writes their own keys and
values of the same tokens; to propose, they go on from the last row, then from their
own. The law: what they keep of a token follows from the text before it, whoever
computed that.

Behind a cached prefix or a fetched one no hidden row is at hand. So its last token is
computed again by the target, in a copy of its page, for the row; what the layers have
of that token stays. Where states stand only between pages, the last page is. Zeros
stand for the row before the first token of a text alone.

    MTP(mtp.draw(model), groups, draft_tokens=3).start(engine)
"""

import dataclasses
from collections.abc import Sequence as ListLike

import jax
import jax.numpy as jnp
import numpy as np

from kvmem import errors, settings
from kvmem.geometry import LifecycleGroup
from kvmem.model.loaded import LoadedModel
from kvmem.serve import sampler
from kvmem.serve.buckets import Bucket
from kvmem.serve.draft import chain
from kvmem.serve.draft.protocol import Forgetful, Proposal, Target
from kvmem.serve.holding import Holding
from kvmem.serve.request import Sequence
from kvmem.serve.step import Batch, Stepper
from kvmem.serve.work import Feed

__all__ = ["MTP", "MTPProposer", "from_the_left", "require_rows", "with_rows"]

_AGAIN = 1  # tokens of what is found: the last one, for its hidden row


@dataclasses.dataclass(frozen=True, eq=False)
class MTP:
    """Facts of draft layers.

    Args:
        model: the layers, as `kvmem.model.mtp` makes them for the target.
        groups: theirs, of domain "draft"; the engine's budget knows of them.
        draft_tokens: tokens proposed for a sequence at most.
    """

    model: LoadedModel
    groups: tuple[LifecycleGroup, ...]
    draft_tokens: int = 4

    def __post_init__(self):
        settings.require_positive(draft_tokens=self.draft_tokens)

    def start(self, target: Target) -> "MTPProposer":
        """Put the layers where the target's weights are.

        Raises:
            IncompatiblePlan: layers of another shape than the target's, a target
                without full attention, or a store of what it cannot go back in.
        """
        require_rows(self.model, target)
        return MTPProposer(self, target)


class MTPProposer(Forgetful):
    """Draft layers behind one engine's model."""

    wants_features = True
    needs_room = True

    def __init__(self, facts: MTP, target: Target):
        self.num_drafted = facts.draft_tokens
        self.whose = facts.model
        self._target = target
        self._stepper = self._stepper_of(facts, target)
        self._zeros = jnp.zeros(facts.model.spec.hidden, jnp.float32)
        _require_way_back(target)
        target.table.shelf.compute_again(_AGAIN)
        # The row before the next token, and all rows of the last step, by holding; and
        # where that step began, with the row before it.
        self._tips: dict[Holding, jax.Array] = {}
        self._rows: dict[Holding, jax.Array] = {}
        self._befores: dict[Holding, tuple[int, jax.Array]] = {}

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int]) -> Proposal:
        """Go on from the target's last row of each sequence, then from one's own.

        None for one of which the target has computed nothing since it began.
        """
        asked = [at for at, s in enumerate(sequences) if s.held in self._tips]
        tokens = [()] * len(sequences)
        if not asked:
            return Proposal(tuple(tokens))
        drawn = self._draw([sequences[at] for at in asked], [most[at] for at in asked])
        for at, each in zip(asked, drawn.tokens, strict=True):
            tokens[at] = each
        faults = {asked[row]: why for row, why in drawn.faults.items()}
        return Proposal(tuple(tokens), faults=faults)

    def _draw(self, sequences: ListLike[Sequence], most: ListLike[int]) -> Proposal:
        """Propose for sequences whose last rows are at hand."""
        rows = zip(sequences, most, strict=True)
        longest = max(len(s.tokens) + count for s, count in rows) - 1
        bucket = self._bucket(len(sequences), longest)
        tokens = np.zeros((bucket.rows, 1), np.int32)
        tokens[: len(sequences), 0] = [s.tokens[-1] for s in sequences]
        tips = [self._tips[s.held] for s in sequences]
        tips += [self._zeros] * (bucket.rows - len(tips))
        hidden, tokens = jnp.stack(tips)[:, None], jnp.asarray(tokens)
        chosen = []
        for step in range(max(most)):
            feeds = [
                chain.after(s.num_computed, s.held, step, count)
                for s, count in zip(sequences, most, strict=True)
            ]
            logits, hidden = self._compute(feeds, bucket, tokens, hidden)
            tokens = sampler.greedy(logits)[:, None]
            chosen.append((tokens[:, 0], sampler.has_nan(logits)))
        return chain.proposal_of(chain.chains_of(*zip(*chosen, strict=True), most))

    def observe(self, feeds: ListLike[Feed], features: jax.Array) -> None:
        """Read the same tokens behind the target's rows of those before them.

        Where the row before the first one is not at hand, that token was found, and
        what is kept of it is there. A step from where the last one began reads tokens
        of that one into states again.
        """
        target, width = self._target, features.shape[1]
        longest = max(feed.end for feed in feeds)
        pages = target.buckets.decode(len(feeds), longest).pages
        bucket = Bucket(features.shape[0], width, pages, logits=0)
        counts = np.zeros(features.shape[0], np.int32)
        counts[: len(feeds)] = [len(feed.tokens) for feed in feeds]
        is_found = np.zeros(features.shape[0], bool)
        is_found[: len(feeds)] = [
            feed.start > 0 and feed.held not in self._tips for feed in feeds
        ]
        reading = [
            feed._replace(tokens=feed.tokens[1:], start=feed.start + 1)
            if found
            else feed
            for feed, found in zip(feeds, is_found, strict=False)
        ]
        tips = [self._tip(feed) for feed in feeds]
        none = [self._zeros] * (features.shape[0] - len(tips))
        rows, before = from_the_left(features, counts), jnp.stack([*tips, *none])
        self._compute(reading, bucket, None, _before(rows, before, is_found))
        for at, feed in enumerate(feeds):
            self._befores[feed.held] = (feed.start, tips[at])
            self._rows[feed.held] = rows[at]
            self._tips[feed.held] = rows[at, len(feed.tokens) - 1]

    def forked(self, sequence: Sequence, twin: Sequence) -> None:
        """Let a twin go on from the last row of its prompt."""
        if sequence.held in self._tips:
            self._tips[twin.held] = self._tips[sequence.held]

    def accepted(self, sequence: Sequence, count: int) -> None:
        """Go back to the row of the last token that stands."""
        self._tips[sequence.held] = self._rows[sequence.held][count]

    def forget(self, sequence: Sequence) -> None:
        """Forget the rows of a sequence; its pages are given back with the target's."""
        for known in (self._tips, self._rows, self._befores):
            known.pop(sequence.held, None)

    def warm_up(self) -> int:
        """Compile what follows each declared bucket of the target."""
        target, before = self._target, sum(self._stepper.num_traces.values())
        hidden = self._zeros.shape[0]
        for each in target.buckets.all():
            rows = jnp.zeros((each.rows, each.tokens, hidden), jnp.float32)
            none = np.zeros(each.rows, np.int32)
            tips = jnp.zeros((each.rows, hidden), jnp.float32)
            rows = _before(from_the_left(rows, none), tips, none.astype(bool))
            reading = Bucket(each.rows, each.tokens, each.pages, logits=0)
            self._compute((), reading, None, rows)
            if each.tokens == 1:
                self._compute((), reading._replace(logits=1, features=1), None, rows)
        return sum(self._stepper.num_traces.values()) - before

    def _stepper_of(self, facts: MTP, target: Target) -> Stepper:
        """Return steps over the target's own pages."""
        return Stepper(
            facts.model,
            facts.groups,
            target.topology,
            target.order,
            target.executor,
            target.groups,
            len(target.own_groups),
            target.stepper.weights,
        )

    def _compute(
        self,
        feeds: ListLike[Feed],
        bucket: Bucket,
        tokens: jax.Array | None,
        hidden: jax.Array,
    ) -> list[jax.Array]:
        """Read tokens behind rows of those before them; return logits and own rows.

        Args:
            feeds: where the tokens stand, and which they are.
            bucket: of the step.
            tokens: i32[S, Q] where the host has not seen them; None: the feeds'.
            hidden: f32[S, Q, D] rows of the tokens before.
        """
        target = self._target
        target.pool = target.table.apply(target.pool)
        batch = with_rows(self._stepper.pack(feeds, bucket), tokens, hidden)
        target.pool, *answers = self._stepper(target.pool, batch)
        return answers

    def _tip(self, feed: Feed) -> jax.Array:
        """Return the target's row f32[D] of the token before the first one of a feed,
        zeros where it is not at hand."""
        start, before = self._befores.get(feed.held, (None, None))
        if start == feed.start:
            return before
        return self._tips.get(feed.held, self._zeros)

    def _bucket(self, rows: int, length: int) -> Bucket:
        return self._target.buckets.decode(rows, length)._replace(features=1)


def require_rows(model: LoadedModel, target: Target) -> None:
    """Refuse draft layers that read other rows than a target gives.

    Raises:
        IncompatiblePlan: with both sizes.
    """
    mine, theirs = model.spec, target.model.spec
    if (mine.hidden, mine.vocab) != (theirs.hidden, theirs.vocab):
        raise errors.IncompatiblePlan(
            errors.say(
                f"drafting with {model.source}",
                f"its rows have {mine.hidden} elements of {mine.vocab} tokens, the "
                f"target's {theirs.hidden} of {theirs.vocab}",
                "Make the draft layers for this target",
            )
        )


def _require_way_back(target: Target) -> None:
    """Refuse a target in which a token that was found cannot be computed again.

    Raises:
        IncompatiblePlan: all of it at once.
    """
    kinds = {group.lifecycle.kind for group in target.own_groups}
    laws = {
        "draft layers go with pages of full attention": "full" in kinds,
        "the last token of a stored text is computed again for its hidden row, and "
        "windows and states have passed it": target.recall is None or kinds == {"full"},
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        names = ", ".join(group.name for group in target.own_groups)
        raise errors.IncompatiblePlan(
            errors.say(
                f"draft layers behind the groups {names}"
                + " and a store" * (target.recall is not None),
                "; ".join(broken),
                "Leave the store out, or draft with ngram",
            )
        )


def with_rows(batch: Batch, tokens: jax.Array | None, hidden: jax.Array) -> Batch:
    """Return a batch with rows of the tokens before, and with tokens if any are
    given."""
    tokens = batch.tokens if tokens is None else tokens
    return dataclasses.replace(batch, tokens=tokens, hidden=hidden)


@jax.jit
def _before(rows: jax.Array, tips: jax.Array, is_found: jax.Array) -> jax.Array:
    """Return the row before each token that is read: f32[S, n, D] behind f32[S, D], or
    where the first token is left out, bool[S], the rows themselves."""
    shifted = jnp.concatenate([tips[:, None], rows[:, :-1]], axis=1)
    return jnp.where(is_found[:, None, None], rows, shifted)


@jax.jit
def from_the_left(features: jax.Array, counts: jax.Array) -> jax.Array:
    """Bring the last c of n places of f32[S, n, D] to the left; behind are zeros."""
    steps = jnp.arange(features.shape[1], dtype=jnp.int32)[None]
    at = jnp.minimum(features.shape[1] - counts[:, None] + steps, features.shape[1] - 1)
    rows = jnp.take_along_axis(features, at[..., None], axis=1)
    return jnp.where((steps < counts[:, None])[..., None], rows, 0.0)
