"""Trial: a small pool, and the model's write path over all ranks, for `certify`.

One sequence of two pages and a half is written in two calls, beside a row that is not
used, as an engine does it: table shuffled, rows padded, the pool donated. The law: how
tokens and heads are dealt to ranks is worked out here by counting, not asked of the
plan that is on trial.

    run = program(plan, write, mesh, layers)
    for chunk in chunks(plan, numbers, layers, 0, mesh):
        pages = run(pages, *chunk)
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvmem import errors
from kvmem.canonical.plan import CopyPlan
from kvmem.geometry import Topology
from kvmem.pool.tokens import WriteFn
from kvmem.transfer import numbers
from kvmem.transfer.arrays import Pages
from kvmem.transfer.numbers import Logical

__all__ = [
    "Arrays",
    "Shape",
    "as_pool",
    "blank",
    "chunks",
    "obstacle",
    "program",
    "require_mesh",
    "shape",
]

_POISON = 0xFF  # NaN in every float dtype: a row that nobody wrote is no number
_SPARE_PAGES = 3

Arrays = tuple[jax.Array, ...]


class Shape(NamedTuple):
    """How much is written: tokens, and the pages they get, by table position."""

    num_tokens: int
    num_pages: int
    page_ids: np.ndarray  # i32[M]


class Chunk(NamedTuple):
    """One call of the write path, a leading axis for ranks; the second row is unused.

    `rows` has (k, v) [R, 2, Q, heads, width] for each layer.
    """

    rows: tuple[tuple[np.ndarray, np.ndarray], ...]
    table: np.ndarray  # i32[R, 2, M]
    starts: np.ndarray  # i32[R, 2]
    num_new: np.ndarray  # i32[R, 2]


def require_mesh(mesh: Mesh | None, plan: CopyPlan) -> None:
    """Refuse a mesh that does not give each rank one device."""
    if mesh is not None and mesh.size != plan.topology.ranks:
        raise errors.IncompatiblePlan(
            errors.say(
                f"a plan of {plan.topology.ranks} ranks on a mesh of {mesh.size}",
                "each rank has a device of its own",
                "Use kvmem.mesh.make(topology), or no mesh to run on one device",
            )
        )


def shape(plan: CopyPlan) -> Shape:
    """Return the sizes of a plan's trial."""
    num_tokens = 2 * plan.page_tokens + max(1, plan.page_tokens // 2)
    needed = -(-num_tokens // plan.page_tokens)
    num_pages = needed + _SPARE_PAGES
    page_ids = np.random.default_rng(0).permutation(num_pages)[:needed]
    return Shape(num_tokens, num_pages, page_ids.astype(np.int32))


def obstacle(plan: CopyPlan, layer: str) -> str | None:
    """Say why a write path cannot be given this layer's pages, None when it can."""
    entries = [e for e in plan.envelope(0).entries if e.field.layer == layer]
    names = sorted({entry.field.name for entry in entries})
    if names != ["k", "v"]:
        return (
            f"it keeps {', '.join(names)}, and a write path is given keys and values "
            "a head"
        )
    planes = {entry.plane for entry in entries}
    if len(planes) == 1 and plan.num_pages is None:
        return None
    return (
        f"order {plan.order!r} spreads a page of it over {len(planes)} planes, and a "
        "write path is given pages of one array"
    )


def blank(plan: CopyPlan, mesh: Mesh | None) -> Arrays:
    """Return u8[R, P, E] full of poison for each array, placed as an engine's pool."""
    num_pages = shape(plan).num_pages
    sizes = [plane.page_stride for plane in plan.planes]
    sharding = None if mesh is None else NamedSharding(mesh, _by_rank(mesh))
    shapes = tuple((plan.topology.ranks, num_pages, nbytes) for nbytes in sizes)
    return _maker(shapes, sharding)()


def as_pool(arrays: Arrays, plan: CopyPlan) -> Pages:
    """Return arrays in the form that transfer takes them."""
    return arrays if plan.num_arrays > 1 else arrays[0]


def program(
    plan: CopyPlan, write: WriteFn, mesh: Mesh | None, layers: Sequence[str]
) -> Callable[..., Arrays]:
    """Return the jitted write path of some layers on all ranks. Donates its pages."""
    env = plan.envelope(0)  # as an engine does: the pages of all ranks are alike
    planes = {entry.field.layer: entry.plane.index for entry in env.entries}

    def one_rank(arrays, rows, table, starts, num_new):
        arrays = list(arrays)
        for layer, (k, v) in zip(layers, rows, strict=True):
            pages = arrays[planes[layer]]
            arrays[planes[layer]] = write(
                pages, env, layer, k, v, table, starts, num_new
            )
        return tuple(arrays)

    if mesh is None and plan.topology.ranks > 1:
        return jax.jit(jax.vmap(one_rank), donate_argnums=0)

    def held(*args):
        own = jax.tree.map(lambda leaf: leaf.squeeze(0), args)
        return jax.tree.map(lambda leaf: leaf[None], one_rank(*own))

    if mesh is None:
        return jax.jit(held, donate_argnums=0)
    spec = _by_rank(mesh)
    run = jax.shard_map(held, mesh=mesh, in_specs=(spec,) * 5, out_specs=spec)
    return jax.jit(run, donate_argnums=0)


def chunks(
    plan: CopyPlan, told: Logical, layers: Sequence[str], digit: int, mesh: Mesh | None
) -> Iterator[Chunk]:
    """Yield two calls that write one digit of every number, each rank's part on it."""
    for chunk in _chunks(plan, told, layers, digit):
        if mesh is not None:
            chunk = jax.device_put(chunk, NamedSharding(mesh, _by_rank(mesh)))
        yield chunk


def _chunks(
    plan: CopyPlan, told: Logical, layers: Sequence[str], digit: int
) -> Iterator[Chunk]:
    ranks, (num_tokens, null_page, page_ids) = plan.topology.ranks, shape(plan)
    owned = [_tokens_of(plan.topology, rank, num_tokens) for rank in range(ranks)]
    cuts = [2 * len(tokens) // 3 for tokens in owned]
    longest = max(
        max(cut, len(own) - cut) for cut, own in zip(cuts, owned, strict=True)
    )
    table = np.full((ranks, 2, len(page_ids)), null_page, np.int32)
    table[:, 0] = page_ids
    deal = functools.partial(_rows, plan, told, layers, digit, longest)
    parts = [(np.zeros_like(cuts), cuts), (cuts, [len(own) for own in owned])]
    for firsts, stops in parts:
        taken = [own[a:b] for own, a, b in zip(owned, firsts, stops, strict=True)]
        starts, num_new = np.zeros((2, ranks, 2), np.int32)
        starts[:, 0] = firsts
        num_new[:, 0] = [len(tokens) for tokens in taken]
        yield Chunk(deal(taken), table, starts, num_new)


def _rows(plan, told, layers, digit, longest, taken):
    """Return (k, v) of each layer: every rank's heads of the tokens it takes."""
    fields = {(field.layer, field.name): field for field in plan.group.fields}
    dealt = []
    for layer in layers:
        pair = []
        for name in ("k", "v"):
            field, whole = fields[layer, name], told[layer, name]
            ranks = []
            for rank, tokens in enumerate(taken):
                heads = _heads_of(plan.topology, rank, field.heads)
                own = numbers.as_digits(whole[tokens][:, heads], field.dtype, digit)
                rows = np.ones((2, longest, *own.shape[1:]), own.dtype)
                rows[0, : len(tokens)] = own  # the rest is to be dropped
                ranks.append(rows)
            pair.append(np.stack(ranks))
        dealt.append(tuple(pair))
    return tuple(dealt)


def _tokens_of(topology: Topology, rank: int, num_tokens: int) -> np.ndarray:
    """Return the tokens of a rank: runs of `interleave` are dealt like cards."""
    runs = np.arange(num_tokens) // topology.interleave
    return np.flatnonzero(runs % topology.dcp == rank % topology.dcp)


def _heads_of(topology: Topology, rank: int, num_heads: int) -> np.ndarray:
    """Return the heads of a rank: equal stretches, each head on equally many ranks."""
    heads = np.arange(num_heads)
    copies = max(1, topology.tp // num_heads)
    shards = np.repeat(heads, copies).reshape(topology.tp, -1)
    return shards[rank // topology.dcp]


@functools.lru_cache(maxsize=16)
def _maker(shapes: tuple, sharding: NamedSharding | None) -> Callable[[], Arrays]:
    def make():
        return tuple(jnp.full(each, _POISON, jnp.uint8) for each in shapes)

    return jax.jit(make, out_shardings=sharding)


def _by_rank(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(mesh.axis_names)
