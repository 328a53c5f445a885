"""Draft layers on virtual ids: a linear chain that never asks where a page lies.

The weights are those of `mtp`; the rows are in a pool of the draft's own, one page for
each virtual page of the target's full attention (dcp of them on token shards). The
target writes and reads through v2p; the draft takes the virtual ids as they are. The
law: a virtual id means one text for as long as anybody holds it, wherever its bytes
lie, so pages may be moved at any time, between a proposal and its verification too; and
whoever holds, shares, copies or gives back a page of the target does so with the
draft's.

    DSpark(mtp.draw(model), groups, draft_tokens=3).start(engine)
"""

import dataclasses
import functools
from collections.abc import Sequence as ListLike
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from kvmem import errors, settings
from kvmem import pool as pools
from kvmem.geometry import LifecycleGroup, Term, Topology, followers
from kvmem.model import parallel
from kvmem.model.loaded import LoadedModel
from kvmem.pool import dispatch
from kvmem.pool.table import GroupTable
from kvmem.serve.buckets import Bucket
from kvmem.serve.draft.mtp import MTPProposer, require_rows, with_rows
from kvmem.serve.draft.protocol import Target
from kvmem.serve.holding import Holding
from kvmem.serve.step import Batch, Stepper
from kvmem.serve.work import Feed

__all__ = ["DSpark", "VirtualStepper"]


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
            IncompatiblePlan: layers of another shape than the target's, other pages, a
                target without full attention, or one whose pages come from a store.
        """
        require_rows(self.model, target)
        _require_pages(self, target)
        return DSparkProposer(self, target)


class DSparkProposer(MTPProposer):
    """Draft layers behind one engine's model, on the virtual ids of its pages."""

    def __init__(self, facts: DSpark, target: Target):
        self._leader = _leader(target)
        self._copies: list[tuple[int, int]] = []  # virtual pages, owed to the draft's
        super().__init__(facts, target)
        self.pages = self._stepper.empty_pages(target.poison)
        self._terms = tuple(
            followers.terms(facts.draft_groups, target.topology, target.order)
        )
        target.table.books.on_copy = self._note_copy

    def claims(self) -> tuple[Term, ...]:
        """Return what the draft keeps of each row of the target."""
        return self._terms

    def _stepper_of(self, facts: DSpark, target: Target) -> "VirtualStepper":
        """Return steps whose tables are virtual ids."""
        num_vpages = target.pool.groups[self._leader].num_vpages
        return VirtualStepper(
            facts.model,
            facts.draft_groups,
            target.topology,
            target.order,
            target.executor,
            num_vpages,
        )

    def _compute(
        self,
        feeds: ListLike[Feed],
        bucket: Bucket,
        tokens: jax.Array | None,
        hidden: jax.Array,
    ) -> list[jax.Array]:
        """Read tokens into the draft's own pages; return logits and own rows."""
        mine = [feed._replace(held=self._followed(feed.held)) for feed in feeds]
        batch = with_rows(self._stepper.pack(mine, bucket), tokens, hidden)
        copies, self._copies = self._copies, []
        for source, copy in copies:
            self.pages = self._stepper.copy(self.pages, source, copy)
        self.pages, *answers = self._stepper(self.pages, batch)
        return answers

    def _followed(self, held: Holding) -> Holding:
        """Return the pages of the target's full attention alone."""
        mine = Holding((0,))
        mine.columns = [held.columns[self._leader]]
        return mine

    def _note_copy(self, group: int, source: int, copy: int) -> None:
        """Owe the draft's rows of a page that the target has copied."""
        if group == self._leader:
            self._copies.append((source, copy))


class VirtualStepper(Stepper):
    """Compiled steps whose tables are ids of the target's virtual pages.

    Args:
        model, topology, order, executor: as of `Stepper`.
        groups: of the draft, a page of each for a page of the target.
        num_vpages: of the group whose ids they are.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[LifecycleGroup, ...],
        topology: Topology,
        order: str,
        executor: str,
        num_vpages: int,
    ):
        super().__init__(model, groups, topology, order, executor)
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


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _copied(pages: jax.Array, ids: jax.Array, extent: int) -> jax.Array:
    source, copy = ids[0] * extent, ids[1] * extent
    rows = lax.dynamic_slice_in_dim(pages, source, extent, axis=1)
    return lax.dynamic_update_slice_in_dim(pages, rows, copy, axis=1)


def _leader(target: Target) -> int:
    """Return the group whose virtual ids are followed, -1 where none keeps all."""
    kinds = [group.lifecycle.kind for group in target.own_groups]
    return kinds.index("full") if "full" in kinds else -1


def _require_pages(facts: DSpark, target: Target) -> None:
    """Refuse a target whose virtual ids do not say which rows the draft has."""
    sizes = {group.page_size for group in (*target.own_groups, *facts.draft_groups)}
    kinds = [group.lifecycle.kind for group in facts.draft_groups]
    laws = {
        "the draft's pages have the size of the target's": len(sizes) == 1,
        "the draft's layers are one group of full attention": kinds == ["full"],
        "ids are followed of pages that keep every token": _leader(target) >= 0,
        "pages that a store fills come without the draft's rows": target.recall is None,
    }
    broken = [law for law, holds in laws.items() if not holds]
    if broken:
        raise errors.IncompatiblePlan(
            errors.say(
                "a draft on virtual ids",
                "; ".join(broken),
                "Make the groups of the draft with the target's page size, and leave "
                "the store out",
            )
        )
