"""All ranks of a decoder together: weights with a rank axis, and one step function.

The rank is an axis of the arrays: what ranks split has a leading axis R, what they
share has none. The same step runs plain on one rank, under `shard_map` on a mesh with
axes "tp" and "dcp", or under `vmap` on one device (for tests: a prefill there copies
batched weights). The law: all three give the same logits.

    weights = load(spec, params, topology, mesh=mesh)
    step = jax.jit(make_step(envelopes, mesh=mesh), donate_argnums=1)
    pages, logits = step(weights, pages, tokens, starts, num_new, tables)

A model has an envelope and a table a lifecycle group, in the order of groups. Along
"tp" ranks hold different heads, weights and rows of the vocabulary. Along "dcp" they
hold the same ones, and read every new token; of the groups that are spread each writes
and attends to its own share of the tokens, and the shares are merged
(`kvmem.model.merge`), in a prefill as in a decode step.

Letters: R ranks, P pages, E page bytes, S sequences, Q new tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Envelope, Spread, Topology, np_dtype
from kvmem.mesh import DCP, TP
from kvmem.model.decoder import Decoder
from kvmem.model.dflash import DFlashPartition
from kvmem.model.dflash_decoder import DFlashDecoder
from kvmem.model.hybrid.decoder import HybridDecoder
from kvmem.model.hybrid.partition import HybridPartition
from kvmem.model.mtp import MtpPartition
from kvmem.model.mtp_decoder import MtpDecoder
from kvmem.model.ops import Split
from kvmem.model.partition import Partition
from kvmem.model.partitions import AnySpec, partition_of
from kvmem.model.placed import placed
from kvmem.pool.table import GroupTable

__all__ = ["AXIS", "StepFn", "Weights", "load", "make_step", "page_sharding"]

AXIS = TP

StepFn = Callable[..., tuple[jax.Array, ...]]
"""(weights, pages u8[R, P, E], tokens i32[S, Q], starts i32[S], num_new i32[S],
tables: a GroupTable a group) -> (pages, logits f32[S, V]); V counts the padded
vocabulary. Keywords num_logits=n and num_features=m, both static, ask for logits
f32[S, n, V] of the last n new tokens, and features f32[S, m, D] after them;
branches=Branches(...) says where tokens stand that do not follow each other, and
hidden=f32[S, Q, D] are rows that a draft reads: of the tokens before (mtp), or of the
tokens themselves, which a block draft keeps and gives no logits for (dflash)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A decoder's weights on all ranks."""

    split: nnx.State  # every leaf [tp, ...]: each head shard's own part
    shared: nnx.State  # leaves without a rank axis, equal on every rank
    graph: nnx.GraphDef = dataclasses.field(metadata={"static": True})

    @property
    def ranks(self) -> int:
        """Ranks along "tp" that the weights are cut for."""
        return jax.tree.leaves(self.split)[0].shape[0]

    @property
    def rank_nbytes(self) -> int:
        """Bytes of the weights on one rank."""
        split = sum(leaf.nbytes for leaf in jax.tree.leaves(self.split))
        shared = sum(leaf.nbytes for leaf in jax.tree.leaves(self.shared))
        return split // self.ranks + shared


def load(
    spec: AnySpec,
    params: Mapping[str, np.ndarray],
    topology: Topology | None = None,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    beside: Weights | None = None,
) -> Weights:
    """Cut a whole model's tensors for every rank and put them on their devices.

    Of a draft, what is its target's (embeddings, norm, head, the first layers of a cut)
    is there already, and is not put there twice.

    Args:
        spec: the model's facts.
        params: the tensors of `spec.parameters()`, as a loader returns them.
        topology: ranks; None: one.
        mesh: a mesh of as many devices as ranks, with an axis "tp" and, of token
            shards, "dcp" (`kvmem.mesh.make`); None: one device.
        dtype: of the weights and of the products' inputs; sums are float32.
        beside: weights on the same ranks; arrays that are equal there, under the same
            name, are theirs. None: every array is new.

    Raises:
        IncompatiblePlan: heads that the topology cannot divide or replicate, or a mesh
            of another size.
    """
    topology = topology or Topology()
    tp = topology.tp
    partition = partition_of(spec, Topology(tp))  # token shards hold the same weights
    _require_mesh(mesh, tp, topology.dcp)
    parts = []
    for rank in range(tp):
        own = partition.rank_params(params, rank)
        own = {name: np.asarray(rows, np_dtype(dtype)) for name, rows in own.items()}
        graph, split, shared = nnx.split(_decoder(partition, own), Split, ...)
        parts.append(split)
    shared_at = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    split_at = None if mesh is None else NamedSharding(mesh, _by_head(mesh))
    return Weights(
        split=placed(stacked, split_at, beside and beside.split),
        shared=placed(shared, shared_at, beside and beside.shared),
        graph=graph,
    )


def make_step(
    envelopes: tuple[Envelope, ...],
    mesh: Mesh | None = None,
    spreads: tuple[Spread, ...] | None = None,
) -> StepFn:
    """Return the pure step of all ranks: write what tokens leave, give next logits.

    Jit it and donate its pages (argument 1): they are updated in place. A row's logits
    are those of its last new token, or of several (see `StepFn`); padded rows of the
    vocabulary are -inf. On a mesh the logits are sharded over ranks along the
    vocabulary.

    Args:
        envelopes: rank 0's page of each group, cut to the pool's; the pages of all
            ranks have equal offsets.
        mesh: where the ranks live; None: one device, by `vmap` if they are several.
        spreads: how the tokens of each group lie on the ranks along "dcp"
            (`Spread.of`); None: there is one such rank.

    Raises:
        IncompatiblePlan: an envelope of several arrays, or spreads of other ranks.
    """
    for envelope in envelopes:
        _require_one_array(envelope)
    spreads = (Spread(),) * len(envelopes) if spreads is None else tuple(spreads)
    ranks = _Ranks(envelopes, spreads)

    def step(
        weights,
        pages,
        tokens,
        starts,
        num_new,
        tables,
        num_logits=1,
        num_features=0,
        branches=None,
        hidden=None,
    ):
        _require_ranks(weights, pages, ranks.dcp)
        _require_tables(envelopes, tables)
        tables = tuple(map(_spread_over, tables, spreads))
        batch = (tokens, starts, num_new, tables, branches, hidden)
        asked = _Asked(num_logits, num_features)
        if mesh is not None:
            return _on_mesh(mesh, ranks, asked, weights, pages, batch)
        if pages.shape[0] > 1:
            return _stacked(ranks, asked, weights, pages, batch)
        pages, logits, *features = _held(ranks, asked, None, weights, pages, batch)
        return pages, logits, *_of_one_rank(features)

    return step


def page_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Return where arrays with a leading rank axis live; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, _by_rank(mesh))


_DECODERS = {
    Partition: Decoder,
    HybridPartition: HybridDecoder,
    MtpPartition: MtpDecoder,
    DFlashPartition: DFlashDecoder,
}


def _decoder(partition, own: Mapping[str, np.ndarray]) -> nnx.Module:
    """Return the decoder of one rank's arrays."""
    return _DECODERS[type(partition)](partition, own)


class _Asked(NamedTuple):
    """Of how many of the last new tokens logits and features are asked for."""

    num_logits: int
    num_features: int


class _Ranks(NamedTuple):
    """What every rank's pages mean, and how tokens lie on the ranks along "dcp"."""

    envelopes: tuple[Envelope, ...]
    spreads: tuple[Spread, ...]

    @property
    def dcp(self) -> int:
        """Ranks along "dcp"."""
        return max(spread.dcp for spread in self.spreads)

    @property
    def has_copies(self) -> bool:
        """Say whether ranks along "dcp" compute anything each from a copy of its own.

        What is merged is one value by construction; copies are equal by their law.
        """
        return any(spread.is_whole for spread in self.spreads)


def _spread_over(table: GroupTable, spread: Spread) -> GroupTable:
    return dataclasses.replace(table, spread=spread)


def _on_mesh(mesh, ranks, asked, weights, pages, batch):
    """Run every rank on its own device; their axes are the mesh's."""
    _require_mesh(mesh, weights.ranks, ranks.dcp)
    by_rank, by_head, everywhere = _by_rank(mesh), _by_head(mesh), PartitionSpec()
    run = jax.shard_map(
        functools.partial(_held, ranks, asked, AXIS),
        mesh=mesh,
        in_specs=(
            Weights(by_head, everywhere, weights.graph),
            by_rank,
            everywhere,
        ),
        out_specs=(
            by_rank,
            PartitionSpec(*[None] * (1 + (asked.num_logits > 1)), *by_head),
            *[by_rank] * bool(asked.num_features),
        ),
    )
    pages, logits, *features = run(weights, pages, batch)
    return pages, logits, *_of_one_rank(features)


def _stacked(ranks, asked, weights, pages, batch):
    """Run every rank on one device; their axes are batch axes."""
    run = functools.partial(_rank_step, ranks, asked, AXIS)
    if ranks.dcp > 1:
        run = _over_shards(run)
        pages = pages.reshape(-1, ranks.dcp, *pages.shape[1:])
    run = jax.vmap(
        run,
        in_axes=(Weights(0, None, weights.graph), 0, None),
        out_axes=(0, -2, *[0] * bool(asked.num_features)),
        axis_name=AXIS,
    )
    pages, logits, *features = run(weights, pages, batch)
    logits = logits.reshape(*logits.shape[:-2], -1)
    return pages.reshape(-1, *pages.shape[-2:]), logits, *_of_one_rank(features)


def _over_shards(run: Callable) -> Callable:
    """Run the token shards of one head shard; what all have alike comes once."""
    every = jax.vmap(run, in_axes=(None, 0, None), axis_name=DCP)

    def on_all(weights, pages, batch):
        pages, *alike = every(weights, pages, batch)
        return pages, *_of_one_rank(alike)

    return on_all


def _of_one_rank(features: Sequence[jax.Array]) -> list[jax.Array]:
    """Drop the rank axis of what every rank has alike."""
    return [rows[0] for rows in features]


def _held(ranks, asked, axis_name, weights, pages, batch):
    """Run the one rank that this device holds, under its rank axis of length 1.

    Logits have none: they are sharded along the vocabulary.
    """
    split = jax.tree.map(lambda leaf: leaf.squeeze(0), weights.split)
    own = dataclasses.replace(weights, split=split)
    pages, logits, *features = _rank_step(
        ranks, asked, axis_name, own, pages.squeeze(0), batch
    )
    return pages[None], logits, *[rows[None] for rows in features]


def _rank_step(ranks, asked, axis_name, weights, pages, batch):
    """Run one rank's decoder; no rank axis."""
    decoder = nnx.merge(weights.graph, weights.split, weights.shared)
    *batch, branches, hidden = batch
    given = {"branches": branches, "hidden": hidden}
    more = {name: each for name, each in given.items() if each is not None}
    pages, logits, *features = decoder.paged(
        pages, ranks.envelopes, *batch, axis_name, *asked, **more
    )
    if ranks.has_copies:
        logits = _of_first_shard(logits)
    return pages, logits, *features


def _of_first_shard(rows: jax.Array) -> jax.Array:
    """Give every rank along "dcp" the rows of the first: all choose the same token."""
    is_first = lax.axis_index(DCP) == 0
    return lax.psum(jnp.where(is_first, rows, 0.0), DCP)


def _by_rank(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(mesh.axis_names)


def _by_head(mesh: Mesh) -> PartitionSpec:
    """Return how weights lie: ranks along "dcp", if any, hold the same ones."""
    return PartitionSpec(TP) if dict(mesh.shape).get(DCP, 1) > 1 else _by_rank(mesh)


def _require_mesh(mesh: Mesh | None, tp: int, dcp: int) -> None:
    """Refuse a mesh that does not give each rank one device."""
    if mesh is None:
        return
    axes = dict(mesh.shape)
    if (axes.get(TP), axes.get(DCP, 1), mesh.size) == (tp, dcp, tp * dcp):
        return
    sizes, names = f"({tp},)", f"({TP!r},)"
    if dcp > 1:
        sizes, names = f"({tp}, {dcp})", f"({TP!r}, {DCP!r})"
    raise IncompatiblePlan(
        say(
            f"weights of TP {tp}"
            + f" on {dcp} token shards" * (dcp > 1)
            + f" on a mesh of {axes}",
            f"each rank has one device along the axis {TP!r}"
            + f" and {DCP!r}" * (dcp > 1),
            f"Use jax.make_mesh({sizes}, {names})",
        )
    )


def _require_one_array(envelope: Envelope) -> None:
    """Refuse an envelope whose layers do not share the pool's one array."""
    if len(envelope.planes) > 1:
        raise IncompatiblePlan(
            say(
                f"a step over pages in order {envelope.order!r}",
                "an engine's pool is one array, and each layer is found in its pages",
                "Use an order without a bar",
            )
        )


def _require_tables(envelopes: tuple[Envelope, ...], tables: tuple) -> None:
    """Refuse tables of other groups than the pages are made for."""
    if not isinstance(tables, tuple) or len(tables) != len(envelopes):
        found = len(tables) if isinstance(tables, tuple) else type(tables).__name__
        raise IncompatiblePlan(
            say(
                f"tables of {found} groups for {len(envelopes)}",
                "a step sees the pages of every lifecycle group",
                "Give one GroupTable a group, in the order of groups",
            )
        )


def _require_ranks(weights: Weights, pages: jax.Array, dcp: int) -> None:
    """Refuse pages of another number of ranks."""
    ranks = weights.ranks * dcp
    if pages.shape[0] != ranks:
        raise IncompatiblePlan(
            say(
                f"pages of {pages.shape[0]} ranks with weights of {weights.ranks}"
                + f" on {dcp} token shards" * (dcp > 1),
                "each rank reads its own pages",
                f"Make a pool of {ranks} ranks",
            )
        )
