"""All ranks of a decoder together: weights with a rank axis, and one step function.

The rank is an axis of the arrays: what ranks split has a leading axis R, what they
share has none. The same step runs plain on one rank, under `shard_map` on a mesh with
an axis "tp", or under `vmap` on one device (for tests: a prefill there copies batched
weights). The law: all three give the same logits.

    weights = load(spec, params, topology, mesh=mesh)
    step = jax.jit(make_step(envelopes, mesh=mesh), donate_argnums=1)
    pages, logits = step(weights, pages, tokens, starts, num_new, tables)

A model has an envelope and a table a lifecycle group, in the order of groups.

Letters: R ranks, P pages, E page bytes, S sequences, Q new tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvmem.errors import IncompatiblePlan, say
from kvmem.geometry import Envelope, Topology, np_dtype
from kvmem.model.decoder import Decoder
from kvmem.model.hybrid.decoder import HybridDecoder
from kvmem.model.hybrid.partition import HybridPartition
from kvmem.model.ops import Split
from kvmem.model.partition import Partition
from kvmem.model.partitions import AnySpec, partition_of

__all__ = ["AXIS", "StepFn", "Weights", "load", "make_step", "page_sharding"]

AXIS = "tp"

StepFn = Callable[..., tuple[jax.Array, ...]]
"""(weights, pages u8[R, P, E], tokens i32[S, Q], starts i32[S], num_new i32[S],
tables: a GroupTable a group) -> (pages, logits f32[S, V]); V counts the padded
vocabulary. Keywords num_logits=n and num_features=m, both static, ask for logits
f32[S, n, V] of the last n new tokens, and features f32[S, m, D] after them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """A decoder's weights on all ranks."""

    split: nnx.State  # every leaf [R, ...]: each rank's own part
    shared: nnx.State  # leaves without a rank axis, equal on every rank
    graph: nnx.GraphDef = dataclasses.field(metadata={"static": True})

    @property
    def ranks(self) -> int:
        """Ranks that the weights are cut for."""
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
) -> Weights:
    """Cut a whole model's tensors for every rank and put them on their devices.

    Args:
        spec: the model's facts.
        params: the tensors of `spec.parameters()`, as a loader returns them.
        topology: ranks; None: one.
        mesh: a mesh of as many devices as ranks, with an axis "tp"; None: one device.
        dtype: of the weights and of the products' inputs; sums are float32.

    Raises:
        IncompatiblePlan: heads that the topology cannot divide or replicate, or a mesh
            of another size.
    """
    partition = partition_of(spec, topology or Topology())
    tp = partition.topology.tp
    _require_mesh(mesh, tp)
    parts = []
    for rank in range(tp):
        own = partition.rank_params(params, rank)
        own = {name: np.asarray(rows, np_dtype(dtype)) for name, rows in own.items()}
        graph, split, shared = nnx.split(_decoder(partition, own), Split, ...)
        parts.append(split)
    shared_at = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    return Weights(
        split=jax.device_put(stacked, page_sharding(mesh)),
        shared=jax.device_put(shared, shared_at),
        graph=graph,
    )


def make_step(envelopes: tuple[Envelope, ...], mesh: Mesh | None = None) -> StepFn:
    """Return the pure step of all ranks: write what tokens leave, give next logits.

    Jit it and donate its pages (argument 1): they are updated in place. A row's logits
    are those of its last new token, or of several (see `StepFn`); padded rows of the
    vocabulary are -inf. On a mesh the logits are sharded over ranks along the
    vocabulary.

    Args:
        envelopes: rank 0's page of each group, cut to the pool's; the pages of all
            ranks have equal offsets.
        mesh: where the ranks live; None: one device, by `vmap` if they are several.

    Raises:
        IncompatiblePlan: an envelope of several arrays.
    """
    for envelope in envelopes:
        _require_one_array(envelope)

    def step(
        weights, pages, tokens, starts, num_new, tables, num_logits=1, num_features=0
    ):
        _require_ranks(weights, pages)
        _require_tables(envelopes, tables)
        batch = (tokens, starts, num_new, tables)
        asked = _Asked(num_logits, num_features)
        if mesh is not None:
            return _on_mesh(mesh, envelopes, asked, weights, pages, batch)
        if weights.ranks > 1:
            return _stacked(envelopes, asked, weights, pages, batch)
        pages, logits, *features = _held(envelopes, asked, None, weights, pages, batch)
        return pages, logits, *_of_one_rank(features)

    return step


def page_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Return where arrays with a leading rank axis live; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, _by_rank(mesh))


_DECODERS = {Partition: Decoder, HybridPartition: HybridDecoder}


def _decoder(partition, own: Mapping[str, np.ndarray]) -> nnx.Module:
    """Return the decoder of one rank's arrays."""
    return _DECODERS[type(partition)](partition, own)


class _Asked(NamedTuple):
    """Of how many of the last new tokens logits and features are asked for."""

    num_logits: int
    num_features: int


def _on_mesh(mesh, envelopes, asked, weights, pages, batch):
    """Run every rank on its own device; their axis is the mesh's."""
    _require_mesh(mesh, weights.ranks)
    ranks, everywhere = _by_rank(mesh), PartitionSpec()
    run = jax.shard_map(
        functools.partial(_held, envelopes, asked, AXIS),
        mesh=mesh,
        in_specs=(
            Weights(ranks, everywhere, weights.graph),
            ranks,
            everywhere,
        ),
        out_specs=(
            ranks,
            PartitionSpec(*[None] * (1 + (asked.num_logits > 1)), *ranks),
            *[ranks] * bool(asked.num_features),
        ),
    )
    pages, logits, *features = run(weights, pages, batch)
    return pages, logits, *_of_one_rank(features)


def _stacked(envelopes, asked, weights, pages, batch):
    """Run every rank on one device; their axis is a batch axis."""
    run = jax.vmap(
        functools.partial(_rank_step, envelopes, asked, AXIS),
        in_axes=(Weights(0, None, weights.graph), 0, None),
        out_axes=(0, -2, *[0] * bool(asked.num_features)),
        axis_name=AXIS,
    )
    pages, logits, *features = run(weights, pages, batch)
    logits = logits.reshape(*logits.shape[:-2], -1)
    return pages, logits, *_of_one_rank(features)


def _of_one_rank(features: Sequence[jax.Array]) -> list[jax.Array]:
    """Drop the rank axis of what every rank has alike."""
    return [rows[0] for rows in features]


def _held(envelopes, asked, axis_name, weights, pages, batch):
    """Run the one rank that this device holds, under its rank axis of length 1.

    Logits have none: they are sharded along the vocabulary.
    """
    split = jax.tree.map(lambda leaf: leaf.squeeze(0), weights.split)
    own = dataclasses.replace(weights, split=split)
    pages, logits, *features = _rank_step(
        envelopes, asked, axis_name, own, pages.squeeze(0), batch
    )
    return pages[None], logits, *[rows[None] for rows in features]


def _rank_step(envelopes, asked, axis_name, weights, pages, batch):
    """Run one rank's decoder; no rank axis."""
    decoder = nnx.merge(weights.graph, weights.split, weights.shared)
    return decoder.paged(pages, envelopes, *batch, axis_name, *asked)


def _by_rank(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(mesh.axis_names)


def _require_mesh(mesh: Mesh | None, tp: int) -> None:
    """Refuse a mesh that does not give each rank one device."""
    if mesh is None or (dict(mesh.shape).get(AXIS) == tp == mesh.size):
        return
    raise IncompatiblePlan(
        say(
            f"weights of TP {tp} on a mesh of {dict(mesh.shape)}",
            f"each rank has one device along the axis {AXIS!r}",
            f"Use jax.make_mesh(({tp},), ({AXIS!r},))",
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


def _require_ranks(weights: Weights, pages: jax.Array) -> None:
    """Refuse pages of another number of ranks."""
    if pages.shape[0] != weights.ranks:
        raise IncompatiblePlan(
            say(
                f"pages of {pages.shape[0]} ranks with weights of {weights.ranks}",
                "each rank reads its own pages",
                f"Make a pool of {weights.ranks} ranks",
            )
        )
