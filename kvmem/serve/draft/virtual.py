"""Virtual pages: what a draft keeps behind the ids of its target's full attention.

The target writes and reads through v2p; a draft on virtual ids takes them as they are.
Its rows are in pages of its own, one for each virtual page of the target (dcp of them
on token shards, each of which keeps all). The law: a virtual id means one text for as
long as anybody holds it, wherever its bytes lie, so pages may be moved at any time,
between a proposal and its verification too; and whoever holds, shares, copies or gives
back a page of the target does so with the draft's.

    pages = VirtualPages(model, draft_groups, target)
    logits, *rows = pages.run(feeds, bucket, tokens, hidden)

`VirtualDraft` is the facts of such a draft, and `OnVirtualIds` its half of a proposer.
"""

import dataclasses
import functools
from collections.abc import Sequence as ListLike
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvmem import canonical, errors, settings, transfer
from kvmem import pool as pools
from kvmem.geometry import LifecycleGroup, Term, Topology, followers
from kvmem.model import parallel
from kvmem.model.loaded import LoadedModel
from kvmem.pool import dispatch
from kvmem.pool.table import GroupTable
from kvmem.serve.buckets import Bucket
from kvmem.serve.draft.mtp import require_rows
from kvmem.serve.draft.protocol import Target
from kvmem.serve.holding import Holding
from kvmem.serve.request import Sequence
from kvmem.serve.step import Batch, Stepper
from kvmem.serve.work import Feed

__all__ = ["OnVirtualIds", "VirtualDraft", "VirtualPages", "VirtualStepper"]
__all__ += ["require_pages"]


@dataclasses.dataclass(frozen=True, eq=False)
class VirtualDraft:
    """Facts of a draft on virtual ids; who starts one says who proposes.

    Args:
        model: the draft's layers, made for the target.
        draft_groups: theirs, one of full attention, of domain "draft".
        draft_tokens: tokens proposed for a sequence at most.
    """

    model: LoadedModel
    draft_groups: tuple[LifecycleGroup, ...]
    draft_tokens: int = 4
    groups: ClassVar[tuple[LifecycleGroup, ...]] = ()  # none in the target's pool

    def __post_init__(self):
        settings.require_positive(draft_tokens=self.draft_tokens)

    def require(self, target: Target) -> None:
        """Refuse a target whose rows or ids the draft does not read.

        Raises:
            IncompatiblePlan: layers of another shape than the target's, other pages, or
                a target without full attention.
        """
        require_rows(self.model, target)
        require_pages(self.draft_groups, target)


class VirtualPages:
    """A draft's pages behind the virtual ids of one engine, and its compiled steps.

    Args:
        model: the draft's layers.
        draft_groups: theirs, one of full attention, of domain "draft".
        target: whose ids they are (see `require_pages`).
    """

    def __init__(
        self,
        model: LoadedModel,
        draft_groups: tuple[LifecycleGroup, ...],
        target: Target,
    ):
        self._leader = _leader(target)
        self._copies: list[tuple[int, int]] = []  # virtual pages, owed to the draft's
        self.stepper = VirtualStepper(
            model,
            draft_groups,
            target.topology,
            target.order,
            target.executor,
            target.pool.groups[self._leader].num_vpages,
            target.stepper.weights,
        )
        self.pages = self.stepper.empty_pages(target.poison)
        (self.group,) = draft_groups
        self._plan = canonical.plan(self.group, target.topology, target.order)
        self.terms: tuple[Term, ...] = tuple(
            followers.terms(draft_groups, target.topology, target.order)
        )
        target.table.books.on_copy = self._note_copy

    def run(
        self,
        feeds: ListLike[Feed],
        bucket: Bucket,
        tokens: jax.Array | None,
        hidden: jax.Array | None,
    ) -> list[jax.Array]:
        """Run a step of the draft on its pages; return its logits, then features.

        Args:
            feeds: where the tokens stand, by the target's holdings.
            bucket: of the step.
            tokens: i32[S, Q] where the host has not seen them; None: the feeds'.
            hidden: f32[S, Q, D] rows of the target that the draft reads; None: none.
        """
        mine = [feed._replace(held=self._followed(feed.held)) for feed in feeds]
        batch = self.stepper.pack(mine, bucket)
        tokens = batch.tokens if tokens is None else tokens
        batch = dataclasses.replace(batch, tokens=tokens, hidden=hidden)
        self._play_copies()
        self.pages, *answers = self.stepper(self.pages, batch)
        return answers

    def export(self, sequence: Sequence, first: int, end: int) -> np.ndarray:
        """Return u8[end - first, record] of tokens that the target has computed."""
        return transfer.export_records(
            self.pages, self._ids(sequence), self._plan, end - first, first
        )

    def fill(self, sequence: Sequence, first: int, records: np.ndarray) -> None:
        """Write the records of tokens behind those that the target has computed."""
        known = max(first, sequence.num_computed)
        rows = np.ascontiguousarray(records[known - first :])
        if len(rows):
            ids = self._ids(sequence)
            self.pages = transfer.import_records(
                self.pages, ids, rows, self._plan, first_token=known
            )

    def _ids(self, sequence: Sequence) -> np.ndarray:
        """Return the draft's pages behind a sequence's, by their place in its text.

        What the target has copied of them is copied by then.
        """
        self._play_copies()
        vpages = np.asarray(sequence.held.columns[self._leader], np.int32)
        return np.asarray(self.stepper.physical(vpages[None]))[0]

    def _play_copies(self) -> None:
        """Copy the rows of pages that the target has copied."""
        copies, self._copies = self._copies, []
        for source, copy in copies:
            self.pages = self.stepper.copy(self.pages, source, copy)

    def _followed(self, held: Holding) -> Holding:
        """Return the pages of the target's full attention alone."""
        mine = Holding((0,))
        mine.columns = [held.columns[self._leader]]
        return mine

    def _note_copy(self, group: int, source: int, copy: int) -> None:
        """Owe the draft's rows of a page that the target has copied."""
        if group == self._leader:
            self._copies.append((source, copy))


class OnVirtualIds:
    """A proposer whose rows stand behind virtual ids: how they travel.

    `_virtual` are its pages. Its rows are at hand of all that the target has computed.
    """

    _virtual: VirtualPages

    @property
    def apart(self) -> tuple[LifecycleGroup, ...]:
        """The group whose rows are in pages of the draft's own."""
        return (self._virtual.group,)

    def known(self, sequence: Sequence) -> int:
        """Return how many tokens the target has computed: the draft follows."""
        return sequence.num_computed

    def caught_up(self, sequence: Sequence) -> int:
        """Return how many tokens the target has computed; nothing is left to read."""
        return sequence.num_computed

    def export(
        self, sequence: Sequence, group: int, first: int, end: int
    ) -> np.ndarray:
        """Return u8[end - first, record] of tokens that the target has computed."""
        return self._virtual.export(sequence, first, end)

    def fill(
        self, sequence: Sequence, group: int, first: int, records: np.ndarray
    ) -> None:
        """Write the records of tokens that the target has not computed."""
        self._virtual.fill(sequence, first, records)

    def landed(self, sequence: Sequence, length: int) -> None:
        """Look away: the rows are where the target's pages are."""


class VirtualStepper(Stepper):
    """Compiled steps whose tables are ids of the target's virtual pages.

    Args:
        model, topology, order, executor: as of `Stepper`.
        groups: of the draft, a page of each for a page of the target.
        num_vpages: of the group whose ids they are.
        beside: as of `Stepper`.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[LifecycleGroup, ...],
        topology: Topology,
        order: str,
        executor: str,
        num_vpages: int,
        beside: parallel.Weights | None = None,
    ):
        super().__init__(model, groups, topology, order, executor, beside=beside)
        self._extent = followers.pages(1, topology)
        self._num_vpages = num_vpages
        self._shape = (
            topology.ranks,
            followers.pages(num_vpages, topology),
            followers.page_nbytes(groups, topology, order),
        )

    def empty_pages(self, poison: bool) -> jax.Array:
        """Return u8[R, P, E]: pages for the whole range of virtual ids."""
        fill = pools.POISON if poison else 0
        make = functools.partial(jnp.full, self._shape, fill, jnp.uint8)
        return jax.jit(make, out_shardings=self.page_sharding)()

    def copy(self, pages: jax.Array, source: int, copy: int) -> jax.Array:
        """Donates `pages`. Copy what stands behind one virtual id behind another."""
        ids = jnp.asarray([source, copy], jnp.int32)
        return dispatch.call(_copied, pages, ids, self._extent)

    def physical(self, table: jax.Array) -> jax.Array:
        """Return i32[S, M * K]: the K pages behind each virtual id; null of others."""
        inside = (table >= 0) & (table < self._num_vpages)
        first = jnp.where(inside, table, 0) * self._extent
        pages = first[..., None] + jnp.arange(self._extent, dtype=jnp.int32)[None, None]
        pages = jnp.where(inside[..., None], pages, self._shape[1])
        return pages.reshape(table.shape[0], -1)

    def _count(
        self,
        ranks: parallel.StepFn,
        pages: jax.Array,
        weights: parallel.Weights,
        batch: Batch,
    ):
        """Compute a batch on the draft's pages; nothing is translated."""
        self.num_traces[batch.bucket] += 1
        (table,) = batch.tables
        return ranks(
            weights,
            pages,
            batch.tokens,
            batch.starts,
            batch.num_new,
            (GroupTable(self.physical(table), jnp.zeros_like(batch.starts)),),
            num_logits=batch.bucket.logits,
            num_features=batch.bucket.features,
            hidden=batch.hidden,
        )


def require_pages(draft_groups: ListLike[LifecycleGroup], target: Target) -> None:
    """Refuse a target whose virtual ids do not say which rows the draft has.

    Raises:
        IncompatiblePlan: pages of another size, a draft of other groups than one of
            full attention, or a target without full attention.
    """
    sizes = {group.page_size for group in (*target.own_groups, *draft_groups)}
    kinds = [group.lifecycle.kind for group in draft_groups]
    laws = {
        "the draft's pages have the size of the target's": len(sizes) == 1,
        "the draft's layers are one group of full attention": kinds == ["full"],
        "ids are followed of pages that keep every token": _leader(target) >= 0,
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise errors.IncompatiblePlan(
            errors.say(
                "a draft on virtual ids",
                "; ".join(broken),
                "Make the draft's groups with the target's page size, for a target of "
                "full attention",
            )
        )


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _copied(pages: jax.Array, ids: jax.Array, extent: int) -> jax.Array:
    source, copy = ids[0] * extent, ids[1] * extent
    rows = lax.dynamic_slice_in_dim(pages, source, extent, axis=1)
    return lax.dynamic_update_slice_in_dim(pages, rows, copy, axis=1)


def _leader(target: Target) -> int:
    """Return the group whose virtual ids are followed, -1 where none keeps all."""
    kinds = [group.lifecycle.kind for group in target.own_groups]
    return kinds.index("full") if "full" in kinds else -1
