"""Frozen KV: the target's first layers draft, on the target's own pages.

The draft is a cut of the model it drafts for, so the keys and values of its layers are
in the target's pages already, and its weights are the target's: it owns neither, and
prefills nothing. What it writes of the tokens that it proposes lies in the slots of
those tokens, where the target writes the same rows again when it verifies. The law: a
turn changes no byte of the target's pages but the slots of accepted tokens, and draft
and target share one table, so nothing of the draft can be stale, lost or another's.

A tree (topk > 1) has a chain for each of the likeliest tokens, all of equal length; it
is drafted as topk one-token sequences a request, and runs on split pools alone, whose
rows are moved one by one.

    FrozenKV(layers=2, draft_tokens=3).start(engine)
"""

import dataclasses
from collections.abc import Sequence as ListLike
from typing import ClassVar

from kvmem import errors, settings
from kvmem.geometry import LifecycleGroup
from kvmem.model import cut
from kvmem.model.spec import ModelSpec
from kvmem.serve.buckets import Bucket
from kvmem.serve.draft import chain, trees
from kvmem.serve.draft.protocol import Forgetful, Proposal, Target
from kvmem.serve.request import Sequence
from kvmem.serve.step import Stepper
from kvmem.serve.work import Feed

__all__ = ["FrozenKV"]


@dataclasses.dataclass(frozen=True)
class FrozenKV:
    """Facts of a draft on the target's pages.

    Args:
        layers: of the target, from its first; None: half of them.
        draft_tokens: tokens proposed for a sequence at most, of all chains together.
        topk: chains of a sequence.

    Raises:
        ConfigError: a count below one, or chains of unequal length.
    """

    layers: int | None = None
    draft_tokens: int = 4
    topk: int = 1
    groups: ClassVar[tuple[LifecycleGroup, ...]] = ()

    def __post_init__(self):
        settings.require_positive(
            layers=self.layers, draft_tokens=self.draft_tokens, topk=self.topk
        )
        if self.draft_tokens % self.topk:
            raise errors.ConfigError(
                errors.say(
                    f"{self.draft_tokens} drafted tokens in {self.topk} chains",
                    "the chains of a tree are equally long",
                    f"Draft a multiple of {self.topk} tokens",
                )
            )

    def start(self, target: Target) -> "FrozenKVProposer":
        """Cut the target, and compile its steps when they are first run.

        Raises:
            ConfigError: more layers than the target has.
            IncompatiblePlan: recurrent layers among the first, whose states a proposal
                would move on.
        """
        return FrozenKVProposer(self, target)


class FrozenKVProposer(Forgetful):
    """The first layers of one engine's model."""

    needs_room = True

    def __init__(self, facts: FrozenKV, target: Target):
        self.num_drafted, self.width = facts.draft_tokens, facts.topk
        if self.width > 1:
            _require_rows(target)
        layers = facts.layers or -(-cut.num_layers(target.model.spec) // 2)
        model = cut.first_layers(target.model, layers)
        _require_no_states(target, model)
        self._target = target
        self._stepper = Stepper(
            model,
            target.own_groups,
            target.topology,
            target.order,
            target.executor,
            target.groups,
            beside=target.stepper.weights,
        )

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int]) -> Proposal:
        """Read each last token over the target's pages, and the drawn ones after it."""
        target = self._target
        feeds = [
            Feed(tuple(s.tokens[s.num_computed :]), s.num_computed, s.held)
            for s in sequences
        ]
        target.pool = target.table.apply(target.pool)
        if self.width > 1:
            return self._tree(feeds, most)
        target.pool, chains, _ = chain.draw(
            self._stepper,
            target.pool,
            feeds,
            self._bucket,
            most,
            chain.keys_of(sequences),
        )
        return chain.proposal_of(chains)

    def _tree(self, feeds: list[Feed], most: ListLike[int]) -> Proposal:
        """Draw chains of equal length behind each sequence."""
        target, lengths = self._target, [count // self.width for count in most]
        target.pool, chains = trees.draw(
            self._stepper, target.pool, feeds, target.buckets, lengths, self.width
        )
        return chain.proposal_of(chains)

    @property
    def num_traces(self) -> dict[Bucket, int]:
        """How often a step of the draft was traced, a bucket."""
        return dict(self._stepper.num_traces)

    def warm_up(self) -> int:
        """Compile a step for every batch and width."""
        target, before = self._target, sum(self._stepper.num_traces.values())
        sizes = target.buckets
        plain = [
            self._bucket(rows, pages * sizes.page_size)
            for rows in sizes.batches
            for pages in sizes.pages
        ]
        wide = [
            bucket._replace(rows=bucket.rows * self.width, chains=self.width)
            for bucket in plain
        ]
        for bucket in dict.fromkeys([*plain, *wide]):
            batch = self._stepper.pack((), bucket)
            target.pool, _ = self._stepper(target.pool, batch)
        return sum(self._stepper.num_traces.values()) - before

    def _bucket(self, rows: int, length: int):
        return self._target.buckets.decode(rows, length)


def _require_rows(target: Target) -> None:
    """Refuse a tree where rows cannot be moved one by one."""
    kinds = {group.lifecycle.kind for group in target.groups}
    laws = {
        "a unified pool serves a linear draft chain only": target.budget.kind
        == "split",
        "the accepted rows of full attention alone can be moved": kinds == {"full"}
        and len(target.groups) == 1
        and isinstance(target.model.spec, ModelSpec),
        "a token lies whole on one rank of each head shard": target.topology.dcp == 1,
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise errors.IncompatiblePlan(
            errors.say(
                "a tree of drafted tokens",
                "; ".join(broken),
                'Use topk = 1, or pool.kind = "split" for a model of full attention',
            )
        )


def _require_no_states(target: Target, model) -> None:
    """Refuse first layers that move on by what they read."""
    states = {
        layer.name
        for group in target.own_groups
        if group.is_state
        for layer in group.layers
    }
    names = {layer.name for layer in model.spec.layer_specs("float32")}
    if found := sorted(states & names):
        raise errors.IncompatiblePlan(
            errors.say(
                f"drafting with the first {len(names)} layers of {target.model.source}",
                f"{', '.join(found)} keep a recurrent state, which a token that is "
                "only proposed would move on",
                "Draft with ngram or two_engine, or with layers before them",
            )
        )
