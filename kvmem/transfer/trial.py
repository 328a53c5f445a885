"""Trial: a small pool, and the model's write path over all ranks, for `certify`.

Two sequences are written beside each other and beside a row that is not used, as an
engine does it: two chunks of a text and between them a step of one token, table
shuffled, rows padded, the pool donated. The first begins at position 0, the second goes
on across position 65536, where narrow arithmetic wraps. The law: how tokens and heads
are dealt to ranks is worked out here by counting, not asked of the plan that is on
trial.

    run = program(Path(plan, write, mesh), layers)
    for chunk in chunks(path, numbers, layers, 0):
        pages = run(pages, *chunk)
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvmem import errors
from kvmem.canonical.plan import CopyPlan
from kvmem.geometry import Topology
from kvmem.mesh import DCP, TP
from kvmem.pool.tokens import WriteFn
from kvmem.transfer import numbers
from kvmem.transfer.arrays import Pages
from kvmem.transfer.numbers import Logical

__all__ = [
    "Arrays",
    "Path",
    "Piece",
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
_FAR = 1 << 16  # the position, counted on one rank, that the second sequence crosses
_ROWS = 3  # of a batch; the last is of no sequence

Arrays = tuple[jax.Array, ...]


class Path(NamedTuple):
    """What is on trial: how pages are written, and where the ranks live.

    One that `deals` is given every token on every rank, and keeps those of the rank.
    """

    plan: CopyPlan
    write: WriteFn
    mesh: Mesh | None
    deals: bool = False


class Piece(NamedTuple):
    """What is written of one sequence."""

    first_page: int  # where it begins, by table position; nothing lies before
    num_tokens: int
    page_ids: np.ndarray  # i32[M], null up to `first_page`


class Shape(NamedTuple):
    """How much is written: tokens and pages in all, and the piece of each sequence."""

    num_tokens: int
    num_pages: int
    pieces: tuple[Piece, ...]


class Chunk(NamedTuple):
    """One call of the write path, a leading axis for ranks; the last row is unused.

    `rows` has (k, v) [R, 3, Q, heads, width] for each layer.
    """

    rows: tuple[tuple[np.ndarray, np.ndarray], ...]
    table: np.ndarray  # i32[R, 3, M]
    starts: np.ndarray  # i32[R, 3]
    num_new: np.ndarray  # i32[R, 3]


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
    page, local = plan.page_tokens, plan.envelope(0).page_size
    counts = (2 * page + max(1, page // 2), page + 1)
    firsts = (0, max(1, _FAR // local - 1))
    needed = [-(-count // page) for count in counts]
    num_pages = sum(needed) + _SPARE_PAGES
    taken = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    pieces = []
    for first, count, pages in zip(firsts, counts, needed, strict=True):
        ids, taken = taken[:pages], taken[pages:]
        table = np.concatenate([np.full(first, num_pages, np.int32), ids])
        pieces.append(Piece(first, count, table))
    return Shape(sum(counts), num_pages, tuple(pieces))


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


def program(path: Path, layers: Sequence[str]) -> Callable[..., Arrays]:
    """Return the jitted write path of some layers on all ranks. Donates its pages."""
    plan, write, mesh, deals = path
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

    if mesh is None and deals:
        return jax.jit(_by_axes(one_rank, plan.topology.dcp), donate_argnums=0)
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


def _by_axes(one_rank: Callable, dcp: int) -> Callable:
    """Run all ranks on one device, under the names of both their axes."""
    run = jax.vmap(jax.vmap(one_rank, axis_name=DCP), axis_name=TP)

    def on_all(*args):
        args = jax.tree.map(lambda a: a.reshape(-1, dcp, *a.shape[1:]), args)
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), run(*args))

    return on_all


def chunks(
    path: Path, told: Logical, layers: Sequence[str], digit: int
) -> Iterator[Chunk]:
    """Yield the calls that write one digit of every number, each rank's part on it.

    The second is a step of one token, those beside it are chunks of a text, and no step
    comes after to cover what the last one writes too much.
    """
    for chunk in _chunks(path.plan, told, layers, digit, path.deals):
        if path.mesh is not None:
            ranks = NamedSharding(path.mesh, _by_rank(path.mesh))
            chunk = jax.device_put(chunk, ranks)
        yield chunk


def _chunks(
    plan: CopyPlan, told: Logical, layers: Sequence[str], digit: int, deals: bool
) -> Iterator[Chunk]:
    ranks, (_, null_page, pieces) = plan.topology.ranks, shape(plan)
    width = max(len(piece.page_ids) for piece in pieces)
    table = np.full((ranks, _ROWS, width), null_page, np.int32)
    for row, piece in enumerate(pieces):
        table[:, row, : len(piece.page_ids)] = piece.page_ids
    owned = [
        [_tokens_of(plan, rank, piece.num_tokens, deals) for piece in pieces]
        for rank in range(ranks)
    ]
    page = plan.page_tokens if deals else plan.envelope(0).page_size
    lengths = np.array([[len(own) for own in each] for each in owned])
    begins = [piece.first_page * page for piece in pieces]
    offsets = np.cumsum([0, *(piece.num_tokens for piece in pieces[:-1])])
    early = 2 * lengths // 3
    cuts = [lengths * 0, early, early + 1, lengths]
    longest = max(1, int(early.max()))
    for (firsts, stops), room in zip(
        itertools.pairwise(cuts), (longest, 1, longest), strict=True
    ):
        taken = [
            [own[a:b] + o for own, a, b, o in zip(*each, offsets, strict=True)]
            for each in zip(owned, firsts, stops, strict=True)
        ]
        starts, num_new = np.zeros((2, ranks, _ROWS), np.int32)
        starts[:, : len(pieces)] = firsts + begins
        num_new[:, : len(pieces)] = stops - firsts
        rows = _rows(plan, told, layers, digit, room, taken)
        yield Chunk(rows, table, starts, num_new)


def _rows(plan, told, layers, digit, room, taken):
    """Return (k, v) of each layer: every rank's heads of the tokens each row takes."""
    fields = {(field.layer, field.name): field for field in plan.group.fields}
    dealt = []
    for layer in layers:
        pair = []
        for name in ("k", "v"):
            field, whole = fields[layer, name], told[layer, name]
            ranks = []
            for rank, tokens in enumerate(taken):
                heads = _heads_of(plan.topology, rank, field.heads)
                of_rank = numbers.as_digits(whole[:, heads], field.dtype, digit)
                rows = np.ones((_ROWS, room, *of_rank.shape[1:]), of_rank.dtype)
                for row, own in enumerate(tokens):
                    rows[row, : len(own)] = of_rank[own]  # the rest is to be dropped
                ranks.append(rows)
            pair.append(np.stack(ranks))
        dealt.append(tuple(pair))
    return tuple(dealt)


def _tokens_of(plan: CopyPlan, rank: int, num_tokens: int, deals: bool) -> np.ndarray:
    """Return the tokens of a rank: runs of `interleave` are dealt like cards.

    A window's tokens are on every rank; and a write path that deals is given all.
    """
    topology, tokens = plan.topology, np.arange(num_tokens)
    if deals or plan.group.lifecycle.kind == "window":
        return tokens
    runs = tokens // topology.interleave
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
