"""The protocol of drafts: who proposes tokens, and what they are told of the outcome.

A draft's facts are frozen (`Draft`); started on an engine they become a `Proposer`,
which holds whatever it remembers of the sequences that run. In the order of a turn:

    begin(sequence, may_wait)     admission, together with the target: both or neither
    propose(sequences, most)      tokens that may come next, some or none of each
    forked(sequence, twin)        another sample goes on from the same prompt
    observe(feeds, features)      hidden rows of what the target has just read, if asked
    accepted(sequence, count)     how many of the proposed tokens stand
    forget(sequence)              it has ended, or was sent back to wait
    clear()                       what is cached of others is to be forgotten

The law: a proposal is a guess. Whatever a proposer says, an engine emits the tokens
that it would emit without one, only sooner. What a proposer cannot tell (no memory left
for a sequence, numbers that are none) it leaves out, and says why in `faults`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from typing import NamedTuple, Protocol

import jax

from kvmem import pool as pools
from kvmem.budget import Budget
from kvmem.geometry import LifecycleGroup, Term, Topology
from kvmem.model.loaded import LoadedModel
from kvmem.serve.buckets import Buckets, ServeConfig
from kvmem.serve.group_recall import GroupRecall
from kvmem.serve.page_table import PageTable
from kvmem.serve.recall import Recall
from kvmem.serve.request import Sequence
from kvmem.serve.step import Stepper
from kvmem.serve.travel import Traveller
from kvmem.serve.work import Feed

__all__ = ["Draft", "Forgetful", "Proposal", "Proposer", "Target"]


class Proposal(NamedTuple):
    """Tokens that may come next, for each sequence that was asked about.

    `probs` f32[S, k, V] are what each token was drawn from, and it is then accepted by
    exact rejection sampling; None: it stands where the target chooses it too. `faults`
    say of rows why they have no tokens, where that is wrong: numbers that are none,
    memory that is lacking.
    """

    tokens: tuple[tuple[int, ...], ...]
    probs: jax.Array | None = None
    faults: Mapping[int, str] = {}


class Target(Protocol):
    """What a draft sees of its engine.

    The pool is the engine's own: who passes it to a donating call puts the answer back,
    after `pool = table.apply(pool)`. `own_groups` are the target's; in `groups`, in
    `table` and in every holding those of a draft that shares the pool stand behind
    them: what a sequence holds, gives back and finds again is then of both.
    """

    model: LoadedModel
    own_groups: tuple[LifecycleGroup, ...]
    groups: tuple[LifecycleGroup, ...]
    topology: Topology
    order: str
    config: ServeConfig
    buckets: Buckets
    stepper: Stepper
    table: PageTable
    pool: pools.Pool
    budget: Budget
    recall: Recall | GroupRecall | None
    executor: str
    poison: bool


class Proposer(Traveller, Protocol):
    """Who drafts for one engine.

    `num_drafted` is the most that it proposes for a sequence; `wants_features` asks for
    hidden rows of every token that the target reads; `needs_room` says that it writes
    into the target's pages, in the slots of the tokens that it will propose. It
    proposes `width` chains of equal length, one behind the other; 1: a linear chain.
    What it keeps goes to a store and comes back as `travel` says.
    """

    num_drafted: int
    width: int
    wants_features: bool
    needs_room: bool

    def begin(self, sequence: Sequence, may_wait: bool) -> bool:
        """Make room for a sequence that is about to run; say whether it may.

        Args:
            sequence: with its tokens known; if its target has no room after all, it
                is forgotten.
            may_wait: whether others run whose end could bring room. If none does, the
                answer is yes, and a sequence without room is served without drafts.
        """

    def forked(self, sequence: Sequence, twin: Sequence) -> None:
        """Learn that a twin goes on from what its sequence has computed; it has begun,
        and holds its pages."""

    def propose(self, sequences: ListLike[Sequence], most: ListLike[int]) -> Proposal:
        """Propose up to `most[i]` >= 1 tokens behind all those known of each."""

    def observe(self, feeds: ListLike[Feed], features: jax.Array) -> None:
        """See the hidden rows of what the target has just read, drafted tokens too.

        Args:
            feeds: what each row of the step read.
            features: f32[rows, n, D] rows before the last norm, of the last n tokens
                fed of each: a row with c of them has them in its last c places.
        """

    def accepted(self, sequence: Sequence, count: int) -> None:
        """Learn that `count` proposed tokens stand; they and the one that follows are
        in the sequence's tokens now."""

    def forget(self, sequence: Sequence) -> None:
        """Give back what is kept of a sequence, if anything is."""

    def clear(self) -> int:
        """Drop what is cached in pages of its own of texts that have ended; return how
        many became free."""

    def warm_up(self) -> int:
        """Compile what `propose` will run; return how many programs were traced."""

    def objections(self) -> tuple[str, ...]:
        """Return the laws of its own memory that do not hold, () when sound."""

    def claims(self) -> tuple[Term, ...]:
        """Return what it claims of a rank's memory."""


class Draft(Protocol):
    """Facts of a draft: frozen, hashable where its model is not part of them.

    `groups` of domain "draft" take pages of the target's pool, of which the engine's
    budget knows; () for a draft with none or with a pool of its own.
    """

    groups: tuple[LifecycleGroup, ...]

    def start(self, target: Target) -> Proposer:
        """Return a proposer for one engine.

        Raises:
            IncompatiblePlan: a target that it cannot draft for.
        """


class Forgetful:
    """A proposer that remembers nothing of a sequence, to be built on."""

    num_drafted: int
    wants_features = False
    needs_room = False
    width = 1
    whose: LoadedModel | None = None
    apart: tuple[LifecycleGroup, ...] = ()

    def begin(self, sequence: Sequence, may_wait: bool) -> bool:
        """Let it run: it needs no room."""
        return True

    def forked(self, sequence: Sequence, twin: Sequence) -> None:
        """Look away: nothing is kept of either."""

    def observe(self, feeds: ListLike[Feed], features: jax.Array) -> None:
        """Look away."""

    def accepted(self, sequence: Sequence, count: int) -> None:
        """Look away: the sequence's tokens say it all."""

    def forget(self, sequence: Sequence) -> None:
        """Forget nothing, for nothing is kept."""

    def clear(self) -> int:
        """Drop nothing, for nothing is cached."""
        return 0

    def warm_up(self) -> int:
        """Compile nothing."""
        return 0

    def objections(self) -> tuple[str, ...]:
        """Object to nothing: it has no memory of its own."""
        return ()

    def claims(self) -> tuple[Term, ...]:
        """Claim nothing."""
        return ()
