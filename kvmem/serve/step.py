"""The step: one compiled program a bucket, from a pool and a batch to logits.

    translate the tables ► write keys and values ► attend ► logits of the last tokens

`step` is pure: it may be jitted, donated and traced into a larger program. `Stepper`
holds what does not change between steps (weights, placement) and counts traces. The
law: rows that a batch does not use have no tokens and null tables, so they write
nothing.

    stepper = Stepper(model, groups, topology, order)
    batch = stepper.pack([row.feed for row in work.rows], bucket)
    pool, logits = stepper(pool, batch)        # donates the pool; f32[S, V]

A bucket of several logits gives f32[S, n, V], those of each row's last n new tokens;
one of features gives f32[S, m, D] after the logits.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from kvmem import errors, mesh
from kvmem import pool as pools
from kvmem.budget import members
from kvmem.geometry import Envelope, LifecycleGroup, Spread, Topology
from kvmem.model import parallel
from kvmem.model.branches import Branches
from kvmem.model.loaded import LoadedModel
from kvmem.pool import dispatch
from kvmem.pool.table import GroupTable
from kvmem.serve.buckets import Bucket
from kvmem.serve.work import Feed
from kvmem.speculative import capacity

__all__ = ["EXECUTORS", "Batch", "Stepper", "envelopes", "step"]

EXECUTORS = ("auto", "vmap")
_NULL = np.iinfo(np.int32).max  # an id that is null to every pool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What one step computes; arrays are padded to a bucket."""

    tokens: jax.Array  # i32[S, Q] new tokens
    starts: jax.Array  # i32[S] tokens already in the pages
    num_new: jax.Array  # i32[S] how many of the Q are real; 0: an unused row
    tables: tuple[jax.Array, ...]  # i32[S, M] a group: virtual pages, null beyond
    firsts: tuple[jax.Array | None, ...]  # i32[S] a window: see `pool.GroupTable`
    branches: Branches | None  # where tokens do not follow each other; None: they do
    hidden: jax.Array | None  # f32[S, Q, D] rows of the tokens before, for draft layers
    bucket: Bucket = dataclasses.field(metadata={"static": True})


def step(
    ranks: parallel.StepFn,
    pool: pools.Pool,
    weights: parallel.Weights,
    batch: Batch,
    first: int = 0,
) -> tuple[pools.Pool, ...]:
    """Compute a batch; donate `pool` where you jit.

    Args:
        ranks: the step of all ranks over physical pages (`parallel.make_step`).
        pool: pages and books; only bytes of the batch's own slots change.
        weights: of all ranks.
        batch: tables in virtual pages.
        first: the pool's group of the first table.

    Returns:
        The pool, and the logits of each row's last new tokens; then their features, if
        the bucket asks for any.
    """
    tables = tuple(
        _physical(pool, group, table, batch.starts * 0 if ordinal is None else ordinal)
        for group, (table, ordinal) in enumerate(
            zip(batch.tables, batch.firsts, strict=True), start=first
        )
    )
    pages, *answers = ranks(
        weights,
        pool.pages,
        batch.tokens,
        batch.starts,
        batch.num_new,
        tables,
        num_logits=batch.bucket.logits,
        num_features=batch.bucket.features,
        branches=batch.branches,
        hidden=batch.hidden,
    )
    return dataclasses.replace(pool, pages=pages), *answers


def _physical(pool: pools.Pool, group: int, table: jax.Array, first: jax.Array):
    """Return the pages of a group; of virtual pages in parts, all of these in order."""
    extent = pool.groups[group].extent
    if extent == 1:
        return GroupTable(pools.translate(pool, group, table), first)
    parts = pools.translate_parts(pool, group, table)
    return GroupTable(parts.reshape(table.shape[0], -1), first * extent)


class Stepper:
    """The compiled steps of one model on one topology.

    Args:
        groups: its lifecycle groups, which share the pages of one pool.
        sharing: all groups of the pool, where others take pages of it too; None: these.
        first: where these begin among them, and in every holding.
        executor: "auto" runs one rank plainly and several on a mesh of as many devices;
            "vmap" runs them on one device, slowly (for tests).
        beside: weights on the same ranks, of which these share what is equal.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[LifecycleGroup, ...],
        topology: Topology,
        order: str,
        executor: str = "auto",
        sharing: tuple[LifecycleGroup, ...] | None = None,
        first: int = 0,
        beside: parallel.Weights | None = None,
    ):
        if executor not in EXECUTORS:
            raise errors.ConfigError(
                errors.say(
                    f"executor {executor!r}",
                    f"ranks run by one of {', '.join(EXECUTORS)}",
                    "Use auto",
                )
            )
        self.mesh = None
        if topology.ranks > 1 and executor == "auto":
            self.mesh = mesh.make(topology)
        self.weights = parallel.load(
            model.spec, model.params, topology, self.mesh, model.dtype, beside
        )
        self.num_traces: collections.Counter[Bucket] = collections.Counter()
        self.groups, self._first = groups, first
        spreads = tuple(Spread.of(group, topology) for group in groups)
        rows = zip(spreads, groups, strict=True)
        self._virtual = tuple(spread.virtual(group) for spread, group in rows)
        pages = envelopes(sharing or groups, topology, order)
        pages = pages[first : first + len(groups)]
        ranks = parallel.make_step(pages, self.mesh, spreads)
        self._jitted = jax.jit(functools.partial(self._count, ranks), donate_argnums=0)

    @property
    def page_sharding(self) -> jax.sharding.NamedSharding | None:
        """Where the pool's pages live; None: on one device."""
        return parallel.page_sharding(self.mesh)

    def __call__(self, pool: pools.Pool, batch: Batch) -> tuple[pools.Pool, ...]:
        """Donates `pool`. Compute a batch; see `step`."""
        return dispatch.call(self._jitted, pool, self.weights, batch)

    def lower(self, pool: pools.Pool, batch: Batch) -> jax.stages.Lowered:
        """Lower the step of one bucket, to look at what would run."""
        return self._jitted.lower(pool, self.weights, batch)

    def pack(self, feeds: Sequence[Feed], bucket: Bucket) -> Batch:
        """Pad what rows feed to a bucket; unused rows have no tokens and null tables.

        Pages of a window that no new token reads are left out, though they are held.
        """
        tokens = np.zeros((bucket.rows, bucket.tokens), np.int32)
        starts = np.zeros(bucket.rows, np.int32)
        num_new = np.zeros(bucket.rows, np.int32)
        widths = [bucket.width(group) for group in self._virtual]
        page_tokens = self._virtual[0].page_size
        _require_room(feeds, bucket, page_tokens)
        tables = tuple(np.full((bucket.rows, n), _NULL, np.int32) for n in widths)
        firsts = tuple(
            np.zeros(bucket.rows, np.int32) if _is_windowed(group) else None
            for group in self.groups
        )
        for at, feed in enumerate(feeds):
            count, held = len(feed.tokens), feed.held
            tokens[at, :count] = feed.tokens
            starts[at], num_new[at] = feed.start, count
            end = -(-feed.end // page_tokens)
            for own, table in enumerate(tables):
                group = self._first + own
                vpages = held.within(group, end)
                if firsts[own] is not None:
                    life, sinks = self.groups[own].lifecycle, held.sinks[group]
                    unread = life.stale(feed.start, page_tokens).stop
                    unread = max(0, unread - held.firsts[group])
                    if unread:
                        vpages = [*vpages[:sinks], *vpages[sinks + unread :]]
                    firsts[own][at] = held.firsts[group] + unread
                table[at, : len(vpages)] = vpages
        branches = _branches(feeds, starts, bucket)
        return Batch(tokens, starts, num_new, tables, firsts, branches, None, bucket)

    def _count(self, ranks, pool, weights, batch):
        self.num_traces[batch.bucket] += 1
        return step(ranks, pool, weights, batch, self._first)


def envelopes(
    groups: Sequence[LifecycleGroup], topology: Topology, order: str
) -> tuple[Envelope, ...]:
    """Return each group's page, cut to the pages of one pool as its budget cuts it."""
    inside = members.members_of(groups, topology, order, kind="unified")
    return tuple(member.envelope for member in inside)


def _branches(
    feeds: Sequence[Feed], starts: np.ndarray, bucket: Bucket
) -> Branches | None:
    """Return where the tokens of feeds stand, None where all follow each other."""
    if bucket.chains == 1:
        return None
    positions = starts[:, None] + np.arange(bucket.tokens, dtype=np.int32)[None]
    firsts, ends = np.zeros_like(positions), np.zeros_like(positions)
    for at, feed in enumerate(feeds):
        if feed.chains is not None:
            found = feed.chains.layout(range(feed.start, feed.end))
            for rows, values in zip((positions, firsts, ends), found, strict=True):
                rows[at, : len(values)] = values
    return Branches(positions, firsts, ends)


def _is_windowed(group: LifecycleGroup) -> bool:
    return group.lifecycle.kind == "window"


def _require_room(feeds: Sequence[Feed], bucket: Bucket, page_tokens: int) -> None:
    """Refuse a bucket that is smaller than what goes into it, always and in full."""
    longest = max((feed.end for feed in feeds), default=0)
    held = capacity.attention_entries(bucket.rows, bucket.pages * page_tokens)
    needed = capacity.attention_entries(len(feeds), longest)
    capacity.require_entries("the tables of a step", held, needed)
