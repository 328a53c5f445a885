"""The step: one compiled program a bucket, from a pool and a batch to logits.

    translate the tables ► write keys and values ► attend ► logits of the last tokens

`step` is pure: it may be jitted, donated and traced into a larger program. `Stepper`
holds what does not change between steps (weights, placement) and counts traces. The
law: rows that a batch does not use have no tokens and null tables, so they write
nothing.

    stepper = Stepper(model, groups, topology, order)
    batch = stepper.pack(rows, bucket)
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
from kvmem.geometry import Envelope, LifecycleGroup, Topology
from kvmem.model import parallel
from kvmem.model.loaded import LoadedModel
from kvmem.pool import dispatch
from kvmem.pool.table import GroupTable
from kvmem.serve.buckets import Bucket
from kvmem.serve.scheduler import Row

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
    bucket: Bucket = dataclasses.field(metadata={"static": True})


def step(
    ranks: parallel.StepFn, pool: pools.Pool, weights: parallel.Weights, batch: Batch
) -> tuple[pools.Pool, ...]:
    """Compute a batch; donate `pool` where you jit.

    Args:
        ranks: the step of all ranks over physical pages (`parallel.make_step`).
        pool: pages and books; only bytes of the batch's own slots change.
        weights: of all ranks.
        batch: tables in virtual pages.

    Returns:
        The pool, and the logits of each row's last new tokens; then their features, if
        the bucket asks for any.
    """
    tables = tuple(
        _physical(pool, group, table, batch.starts * 0 if first is None else first)
        for group, (table, first) in enumerate(
            zip(batch.tables, batch.firsts, strict=True)
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
    )
    return dataclasses.replace(pool, pages=pages), *answers


def _physical(pool: pools.Pool, group: int, table: jax.Array, first: jax.Array):
    """Return the pages of a group; of a state, the parts of its one page a row."""
    if pool.groups[group].extent == 1:
        return GroupTable(pools.translate(pool, group, table), first)
    parts = pools.translate_parts(pool, group, table)
    return GroupTable(parts.reshape(table.shape[0], -1), first)


class Stepper:
    """The compiled steps of one model on one topology.

    Args:
        groups: its lifecycle groups, which share the pages of one pool.
        executor: "auto" runs one rank plainly and several on a mesh of as many devices;
            "vmap" runs them on one device, slowly (for tests).
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[LifecycleGroup, ...],
        topology: Topology,
        order: str,
        executor: str = "auto",
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
            model.spec, model.params, topology, self.mesh, model.dtype
        )
        self.num_traces: collections.Counter[Bucket] = collections.Counter()
        self.groups = groups
        self._page_size = groups[0].page_size
        ranks = parallel.make_step(envelopes(groups, topology, order), self.mesh)
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

    def pack(self, rows: Sequence[Row], bucket: Bucket) -> Batch:
        """Pad rows of work to a bucket; unused rows have no tokens and null tables."""
        tokens = np.zeros((bucket.rows, bucket.tokens), np.int32)
        starts = np.zeros(bucket.rows, np.int32)
        num_new = np.zeros(bucket.rows, np.int32)
        widths = [bucket.width(group) for group in self.groups]
        tables = tuple(np.full((bucket.rows, n), _NULL, np.int32) for n in widths)
        firsts = tuple(
            np.zeros(bucket.rows, np.int32) if _is_windowed(group) else None
            for group in self.groups
        )
        for at, (sequence, start, count) in enumerate(rows):
            tokens[at, :count] = sequence.tokens[start : start + count]
            starts[at], num_new[at] = start, count
            for group, table in enumerate(tables):
                held = sequence.held
                vpages = held.within(group, -(-(start + count) // self._page_size))
                table[at, : len(vpages)] = vpages
                if firsts[group] is not None:
                    firsts[group][at] = held.firsts[group]
        return Batch(tokens, starts, num_new, tables, firsts, bucket)

    def _count(self, ranks, pool, weights, batch):
        self.num_traces[batch.bucket] += 1
        return step(ranks, pool, weights, batch)


def envelopes(
    groups: Sequence[LifecycleGroup], topology: Topology, order: str
) -> tuple[Envelope, ...]:
    """Return each group's page, cut to the pages of one pool as its budget cuts it."""
    inside = members.members_of(groups, topology, order, kind="unified")
    return tuple(member.envelope for member in inside)


def _is_windowed(group: LifecycleGroup) -> bool:
    return group.lifecycle.kind == "window"
