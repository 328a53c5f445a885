"""Two engines: a smaller model drafts, with a manager and a pool of its own.

It reads what it has not seen of a sequence (a prompt in chunks, else the one or two
tokens since its last proposal) and draws its likeliest tokens one after the other. The
law: a sequence begins in both pools or in none, and where the draft's has no room for
more of it, or the draft knows no longer texts, the target goes on without proposals.
Beside a store a text is kept, and found, as far as both have it.

    draft = cut.first_layers(model, 10)
    TwoEngine(draft, groups, paid, draft_tokens=3).start(engine)
"""

import dataclasses
import warnings
from collections.abc import Sequence as ListLike
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvmem import errors, settings
from kvmem.budget import PoolPages
from kvmem.geometry import LifecycleGroup, Term, followers
from kvmem.model.loaded import LoadedModel
from kvmem.serve import sampler
from kvmem.serve.buckets import Bucket, declare
from kvmem.serve.draft import chain, rejection
from kvmem.serve.draft.own_pages import Mine, OwnPages
from kvmem.serve.draft.protocol import Forgetful, Proposal, Target
from kvmem.serve.request import SamplingParams, Sequence
from kvmem.serve.step import Stepper
from kvmem.serve.work import Feed
from kvmem.speculative.capacity import proposable

__all__ = ["TwoEngine"]

_LAG = 2  # tokens behind a proposal that was accepted whole: its last, and the next
_NO_ROOM = "the draft's pool has no room"


@dataclasses.dataclass(frozen=True, eq=False)
class TwoEngine:
    """Facts of a draft model.

    Args:
        model: of the target's vocabulary.
        draft_groups: its lifecycle groups, in pages of the target's size.
        paid: its pool, as a budget pays for it.
        draft_tokens: tokens proposed for a sequence at most.
        max_length: tokens of the longest text that it knows; None: the model's.
        acceptance: of sampled tokens. "coupled": those that the target draws with the
            same noise, so that a seed gives the tokens that it gives without a draft;
            "rejection": by exact rejection sampling, which accepts more of them.
    """

    model: LoadedModel
    draft_groups: tuple[LifecycleGroup, ...]
    paid: PoolPages
    draft_tokens: int = 4
    max_length: int | None = None
    acceptance: Literal["coupled", "rejection"] = "coupled"
    groups: ClassVar[tuple[LifecycleGroup, ...]] = ()

    def __post_init__(self):
        settings.require_positive(
            draft_tokens=self.draft_tokens, max_length=self.max_length
        )
        if self.acceptance not in ("coupled", "rejection"):
            raise errors.ConfigError(
                errors.say(
                    f"acceptance {self.acceptance!r}",
                    "sampled tokens are accepted by one of two rules",
                    "Use coupled or rejection",
                )
            )

    def start(self, target: Target) -> "TwoEngineProposer":
        """Make the draft's pool, and put its weights where the target's are.

        Raises:
            IncompatiblePlan: another vocabulary or page size, or a recurrent state.
        """
        _require_match(self, target)
        return TwoEngineProposer(self, target)


class TwoEngineProposer(Forgetful):
    """A draft model beside one engine."""

    def __init__(self, facts: TwoEngine, target: Target):
        self.num_drafted = facts.draft_tokens
        self.whose = facts.model
        self.apart = _kept_whole(facts.draft_groups)
        self._stepper = Stepper(
            facts.model,
            facts.draft_groups,
            target.topology,
            target.order,
            target.executor,
            beside=target.stepper.weights,
        )
        self.pages = OwnPages(
            facts.draft_groups,
            facts.paid,
            target.topology,
            target.config,
            target.poison,
            self._stepper.page_sharding,
            target.order,
        )
        self._buckets = declare(target.config, self.pages.page_tokens)
        self._chunk = target.config.prefill_chunk
        self._longest = facts.max_length or facts.model.spec.max_position
        self._terms = tuple(
            followers.terms(facts.draft_groups, target.topology, target.order)
        )
        self._by_rejection = facts.acceptance == "rejection"
        self._has_warned = False

    def begin(self, sequence: Sequence, may_wait: bool) -> bool:
        """Hold pages for a sequence's tokens too."""
        return self.pages.begin(sequence, may_wait)

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int]) -> Proposal:
        """Read what is new of each sequence, and draw what may come next."""
        faults, reading = {}, []
        for at, (sequence, count) in enumerate(zip(sequences, most, strict=True)):
            mine, count = self._ready(sequence, count)
            if mine is None or not count:
                faults |= {at: _NO_ROOM} if mine is None else {}
                continue
            reading.append((at, sequence, mine, count))
        if not reading:
            return Proposal(tuple(() for _ in sequences), faults=faults)
        found = [()] * len(sequences)
        chains, probs = self._draw([row[1:] for row in reading])
        for (at, *_), each in zip(reading, chains, strict=True):
            found[at] = each.tokens if each.is_sound else ()
            faults |= {} if each.is_sound else {at: chain.NO_NUMBERS}
        if probs is not None:
            probs = self._of_asked(probs, [at for at, *_ in reading])
        return Proposal(tuple(found), probs, faults)

    def forget(self, sequence: Sequence) -> None:
        """Give the draft's pages of a sequence back."""
        self.pages.forget(sequence)

    def clear(self) -> int:
        """Drop what the draft's prefix cache has; return the pages freed."""
        return self.pages.clear()

    def known(self, sequence: Sequence) -> int | None:
        """Return how many tokens of a sequence the draft has read; None: it has no
        pages."""
        return self.pages.num_fed(sequence)

    def caught_up(self, sequence: Sequence) -> int:
        """Read what the target has computed of a sequence, as far as there is room."""
        mine = self.pages.settled(sequence)
        if mine is None:
            return 0
        self._read(sequence, mine, min(sequence.num_computed, self._longest))
        return len(mine.fed)

    def export(
        self, sequence: Sequence, group: int, first: int, end: int
    ) -> np.ndarray:
        """Return u8[end - first, record] of tokens that the draft has read."""
        return self.pages.export(sequence, group, first, end)

    def fill(
        self, sequence: Sequence, group: int, first: int, records: np.ndarray
    ) -> None:
        """Write the records of tokens that the draft has not read."""
        self.pages.fill(sequence, group, first, records)

    def landed(self, sequence: Sequence, length: int) -> None:
        """Count the first `length` tokens as read."""
        self.pages.landed(sequence, length)

    @property
    def num_traces(self) -> dict[Bucket, int]:
        """How often a step of the draft was traced, a bucket."""
        return dict(self._stepper.num_traces)

    def warm_up(self) -> int:
        """Compile every declared bucket, those of two tokens a row, and what judges
        drafted tokens by their probabilities."""
        before = sum(self._stepper.num_traces.values())
        buckets = self._buckets.all()
        pairs = {each._replace(tokens=_LAG) for each in buckets if each.tokens == 1}
        for bucket in (*buckets, *sorted(pairs)):
            batch = self._stepper.pack((), bucket)
            self.pages.pool, logits = self._stepper(self.pages.pool, batch)
        if self._by_rejection:
            for rows in self._buckets.batches:
                self._warm_up_rejection(jnp.zeros((rows, logits.shape[-1])))
        return sum(self._stepper.num_traces.values()) - before

    def objections(self) -> tuple[str, ...]:
        """Return the laws of the draft's pool that do not hold."""
        return self.pages.objections()

    def claims(self) -> tuple[Term, ...]:
        """Return what the draft keeps of each row of the target."""
        return self._terms

    def _ready(self, sequence: Sequence, most: int) -> tuple[Mine | None, int]:
        """Read a sequence up to its last tokens; return for how many there is room."""
        length = len(sequence.tokens)
        count = proposable(most, length, known=self._longest)
        mine = self.pages.settled(sequence)
        if not count:
            self._warn()
            return mine, 0
        if mine is None or not self._catch_up(sequence, mine):
            return None, 0
        room = self.pages.extend(mine, length, count - 1)
        return (None, 0) if room is None else (mine, room + 1)

    def _catch_up(self, sequence: Sequence, mine: Mine) -> bool:
        """Read until a token or two are left; say whether there was room."""
        length = len(sequence.tokens)
        is_near = length - len(mine.fed) <= _LAG
        return is_near or self._read(sequence, mine, length - 1)

    def _read(self, sequence: Sequence, mine: Mine, end: int) -> bool:
        """Read the first `end` tokens in chunks; say whether there was room."""
        tokens = sequence.tokens
        while (left := end - len(mine.fed)) > 0:
            start, count = len(mine.fed), min(left, self._chunk)
            if self.pages.extend(mine, start + count) is None:
                return False
            feed = Feed(tuple(tokens[start : start + count]), start, mine.held)
            batch = self._stepper.pack([feed], self._buckets.prefill(count, feed.end))
            self.pages.pool = self.pages.table.apply(self.pages.pool)
            self.pages.pool, _ = self._stepper(self.pages.pool, batch)
            self.pages.passed(mine, feed.tokens)
        return True

    def _draw(
        self, rows: list[tuple[Sequence, Mine, int]]
    ) -> tuple[list[chain.Chain], jax.Array | None]:
        """Feed the last tokens of each row and draw the next ones."""
        feeds = [
            Feed(tuple(s.tokens[len(mine.fed) :]), len(mine.fed), mine.held)
            for s, mine, _ in rows
        ]
        longest = max(feed.end for feed in feeds)
        first = None
        if any(len(feed.tokens) > 1 for feed in feeds):
            first = self._bucket(len(feeds), longest)._replace(tokens=_LAG)
        self.pages.pool = self.pages.table.apply(self.pages.pool)
        self.pages.pool, chains, probs = chain.draw(
            self._stepper,
            self.pages.pool,
            feeds,
            self._bucket,
            [count for *_, count in rows],
            chain.keys_of([sequence for sequence, *_ in rows]),
            first,
            self.num_drafted * self._by_rejection,
        )
        for (sequence, mine, _), feed, each in zip(rows, feeds, chains, strict=True):
            self.pages.passed(mine, feed.tokens)
            self.pages.publish(sequence)
            mine.fed.extend(each.tokens[:-1])
        return chains, probs

    def _bucket(self, rows: int, length: int) -> Bucket:
        return self._buckets.decode(rows, length)

    def _warm_up_rejection(self, logits: jax.Array) -> None:
        """Compile what draws by f32[S, V] logits and judges what was drawn."""
        keys = [sampler.RowKey(SamplingParams(temperature=1.0), 0, 0)]
        choose = chain.Chooser(keys, self.num_drafted)
        choose(logits, 0)
        rejection.warm_up(logits.shape[0], self._of_asked(choose.probs, ()))

    def _of_asked(self, probs: jax.Array, asked: ListLike[int]) -> jax.Array:
        """Return rows of probabilities by the place of who asked, in one shape for any
        number of them."""
        where = np.zeros(self._buckets.batches[-1], np.int32)
        where[list(asked)] = np.arange(len(asked))
        return jnp.take(probs, where, axis=0)

    def _warn(self) -> None:
        """Say once that texts outgrow the draft."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                errors.say(
                    f"drafting behind {self._longest} tokens",
                    "the draft knows no longer texts, so the target goes on alone",
                    "Use a draft of longer texts, or lower serve.max_length",
                ),
                stacklevel=2,
            )


def _kept_whole(groups: ListLike[LifecycleGroup]) -> tuple[LifecycleGroup, ...]:
    """Return the groups whose rows a store may keep, all or none: those of a draft that
    keeps every token."""
    kinds = {group.lifecycle.kind for group in groups}
    return tuple(groups) if kinds == {"full"} else ()


def _require_match(facts: TwoEngine, target: Target) -> None:
    """Refuse a draft that speaks other tokens, or cannot take any back."""
    mine, theirs = facts.model.spec.vocab, target.model.spec.vocab
    size, of_target = facts.draft_groups[0].page_size, target.own_groups[0].page_size
    laws = {
        f"its vocabulary has {mine} ids, the target's {theirs}": mine == theirs,
        f"its pages have {size} tokens, the target's {of_target}": size == of_target,
        "a recurrent state cannot forget a rejected token": not any(
            group.is_state for group in facts.draft_groups
        ),
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise errors.IncompatiblePlan(
            errors.say(
                f"drafting with {facts.model.source}",
                "; ".join(broken),
                "Use a draft of attention layers with the target's vocabulary and "
                "page size",
            )
        )
