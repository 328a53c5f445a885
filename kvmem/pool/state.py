"""The pool: bytes and books in one pytree.

Letters: R ranks, P physical pages, E bytes of a page, V virtual pages of a group, K
parts of a virtual page (1 unless an envelope spans several pages).

The law: a page is either on the free stack or owned by exactly one virtual page, never
both; `p2v` and the groups' `v2p` are mutual inverses. A virtual page is mapped, in all
its parts, exactly while it has references. Stacks pop at the top: the free ids are
`free[:num_free]`, next is `free[num_free - 1]`; what lies above is stale. Null is one
past the end.

Any group may take any page: a pool is split between groups by nothing but what they
hold. Pools of their own are the same type, once a group.

    pool = init(num_pages=1024, page_nbytes=4096, ranks=3, poison=True)
    pool, vpages, ok = handout(pool, 0, want=[2, 1], max_pages=4)
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kvmem import errors
from kvmem.budget import Budget
from kvmem.geometry import Topology
from kvmem.pool.ids import is_integer

__all__ = ["POISON", "GroupBooks", "Pool", "from_budget", "init", "settled_sizes"]

# NaN in bf16, f16, f32, both fp8 types and e8m0.
POISON = 0xFF

_INT32_MAX = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupBooks:
    """Who holds which virtual page of one lifecycle group."""

    v2p: jax.Array  # i32[V, K] physical pages, null_page where unmapped
    refs: jax.Array  # i32[V] holders of a virtual page, 0 exactly where unmapped
    pins: jax.Array  # i32[V] readers and writers in flight, for whom the page stays put
    vfree: jax.Array  # i32[V] stack of free virtual pages
    num_vfree: jax.Array  # i32[]

    @property
    def num_vpages(self) -> int:
        """Virtual pages of the group, V."""
        return self.refs.shape[0]

    @property
    def extent(self) -> int:
        """Physical pages of one virtual page, K."""
        return self.v2p.shape[1]

    @property
    def null_vpage(self) -> int:
        """The id that is nobody's: V, one past the end."""
        return self.num_vpages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Every page of every rank, and the books of all groups that live in them."""

    pages: jax.Array  # u8[R, P, E]
    p2v: jax.Array  # i32[P, 2] (group, vpage) of the owner; null_owner where free
    free: jax.Array  # i32[P] stack of free physical pages
    num_free: jax.Array  # i32[]
    groups: tuple[GroupBooks, ...]
    # Every byte that is not handed out is POISON, and becomes so when it is given back.
    is_poisoned: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def num_ranks(self) -> int:
        """Ranks, R."""
        return self.pages.shape[0]

    @property
    def num_pages(self) -> int:
        """Physical pages of each rank, P; all usable."""
        return self.free.shape[0]

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page on one rank, E."""
        return self.pages.shape[2]

    @property
    def null_page(self) -> int:
        """The physical id that is nobody's: P, one past the end."""
        return self.num_pages

    @property
    def null_owner(self) -> tuple[int, int]:
        """The owner of a free page: one past the last group and its last page."""
        return len(self.groups), max(books.num_vpages for books in self.groups)


def init(
    num_pages: int,
    page_nbytes: int,
    ranks: int = 1,
    *,
    num_vpages: tuple[int, ...] | None = None,
    extents: tuple[int, ...] | None = None,
    poison: bool = False,
    sharding: NamedSharding | None = None,
) -> Pool:
    """Build a pool with every page free: zeros, or `POISON` in every byte.

    Args:
        num_pages: physical pages of each rank, P.
        page_nbytes: bytes of a page on one rank, E.
        ranks: ranks, R; the first axis of the pages, always present.
        num_vpages: virtual pages of each group; one group of P when None.
        extents: physical pages of one virtual page of each group; 1 when None.
        poison: fill with NaN bytes, and again whatever is given back, so that a read of
            what nobody holds shows. A release then costs the bytes it gives back.
        sharding: how to lay u8[R, P, E] over a mesh; only axis 0 may be cut. The books
            are replicated over the same mesh.

    Raises:
        ConfigError: a size that is no integer, below 1, or one that int32 ids cannot
            address; not one extent a group; a sharding that cuts pages or bytes, or
            over more devices than divide the ranks.
    """
    sizes = {"num_pages": num_pages, "page_nbytes": page_nbytes, "ranks": ranks}
    num_vpages, extents = settled_sizes(sizes, num_vpages, extents)
    _require_rank_axis(sharding, ranks)
    shapes = tuple(zip(num_vpages, extents, strict=True))

    def build() -> Pool:
        fill = POISON if poison else 0
        books = tuple(_empty_books(num_pages, *shape) for shape in shapes)
        owner = jnp.array([[len(num_vpages), max(num_vpages)]], jnp.int32)
        return Pool(
            pages=jnp.full((ranks, num_pages, page_nbytes), fill, jnp.uint8),
            p2v=jnp.tile(owner, (num_pages, 1)),
            free=_full_stack(num_pages),
            num_free=jnp.int32(num_pages),
            groups=books,
            is_poisoned=poison,
        )

    return jax.jit(build, out_shardings=_placements(build, sharding))()


def from_budget(
    budget: Budget,
    topology: Topology,
    pool: int | None = None,
    *,
    poison: bool = False,
    sharding: NamedSharding | None = None,
) -> Pool:
    """Build a pool that a budget pays for: a rank's pages on every rank.

    Args:
        pool: which of `budget.pools`; None: the only one, in which every group takes
            pages from one list. A split plan has a pool for each size of page.

    Raises:
        IncompatiblePlan: one pool asked of a split plan.
        InvalidId: a pool that the plan has not.
    """
    sizes = ", ".join(f"{paid.page_nbytes:,}" for paid in budget.pools)
    if pool is None and len(budget.pools) != 1:
        raise errors.IncompatiblePlan(
            errors.say(
                f"one pool of a plan whose pools have pages of {sizes} B",
                "the groups of one pool share pages of one size",
                'Plan with kind="unified", or say which pool',
            )
        )
    if not 0 <= (pool or 0) < len(budget.pools):
        raise errors.InvalidId(
            errors.say(
                f"pool {pool} of a plan with {len(budget.pools)}",
                "pools are counted from zero",
                f"Use a pool from 0 to {len(budget.pools) - 1}",
            )
        )
    paid = budget.pools[pool or 0]
    return init(
        paid.pages,
        paid.page_nbytes,
        topology.ranks,
        num_vpages=paid.num_vpages,
        extents=paid.extents,
        poison=poison,
        sharding=sharding,
    )


def _full_stack(count: int) -> jax.Array:
    """Return a full free stack; page 0 is on top and goes first."""
    return jnp.arange(count - 1, -1, -1, dtype=jnp.int32)


def _empty_books(num_pages: int, num_vpages: int, extent: int) -> GroupBooks:
    return GroupBooks(
        v2p=jnp.full((num_vpages, extent), num_pages, jnp.int32),
        refs=jnp.zeros(num_vpages, jnp.int32),
        pins=jnp.zeros(num_vpages, jnp.int32),
        vfree=_full_stack(num_vpages),
        num_vfree=jnp.int32(num_vpages),
    )


def _placements(
    build: Callable[[], Pool], sharding: NamedSharding | None
) -> Pool | None:
    """Return where each leaf goes: pages cut by rank, books whole on every device.

    A spec is spelled as jax spells its outputs (under explicit axes, every axis by
    name), so that a verb gives back the very sharding it was given and no program is
    compiled twice.
    """
    if sharding is None:
        return None
    explicit = AxisType.Explicit in sharding.mesh.axis_types

    def spell(ndim: int, *spec: object) -> NamedSharding:
        whole = (None,) * (ndim - len(spec)) if explicit else ()
        return NamedSharding(sharding.mesh, PartitionSpec(*spec, *whole))

    placed = jax.tree.map(lambda leaf: spell(leaf.ndim), jax.eval_shape(build))
    return dataclasses.replace(placed, pages=spell(3, *sharding.spec[:1]))


def _require_rank_axis(sharding: NamedSharding | None, ranks: int) -> None:
    if sharding is None:
        return
    if any(axis is not None for axis in sharding.spec[1:]):
        raise errors.ConfigError(
            errors.say(
                f"pages sharded as {sharding.spec}",
                "only the rank axis, the first of u8[R, P, E], is cut over devices",
                'Use PartitionSpec("tp") or PartitionSpec(("tp", "dcp"))',
            )
        )
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    if ranks % devices:
        raise errors.ConfigError(
            errors.say(
                f"{ranks} ranks over {devices} devices, {sharding.spec}",
                "every device holds as many ranks",
                f"Use a multiple of {devices} ranks, or a mesh of their number",
            )
        )


def settled_sizes(
    sizes: dict[str, int],
    num_vpages: tuple[int, ...] | None,
    extents: tuple[int, ...] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the virtual pages and the extent of each group, as `init` takes them.

    Args:
        sizes: by name, "num_pages" among them.
        num_vpages, extents: as in `init`.

    Raises:
        ConfigError: as `init` says.
    """
    num_vpages = (sizes["num_pages"],) if num_vpages is None else num_vpages
    for name, each in (("num_vpages", num_vpages), ("extents", extents)):
        if not isinstance(each, tuple | list | None):
            raise errors.ConfigError(
                errors.say(
                    f"{name}={each!r}",
                    "each group has a size of its own",
                    "Give a tuple, one integer a group",
                )
            )
    num_vpages = tuple(num_vpages)
    extents = (1,) * len(num_vpages) if extents is None else tuple(extents)
    _require_sizes(sizes, num_vpages, extents)
    return num_vpages, extents


def _require_sizes(
    sizes: dict[str, int], num_vpages: tuple[int, ...], extents: tuple[int, ...]
) -> None:
    if len(extents) != len(num_vpages):
        raise errors.ConfigError(
            errors.say(
                f"{len(extents)} extents for {len(num_vpages)} groups",
                "each group says in how many pages one of its envelopes lies",
                "Give one extent a group, 1 where an envelope fits a page",
            )
        )
    sizes = sizes | {f"num_vpages[{i}]": count for i, count in enumerate(num_vpages)}
    sizes |= {f"extents[{i}]": extent for i, extent in enumerate(extents)}
    wrong = [
        f"{name}={n!r}"
        for name, n in sizes.items()
        if not (is_integer(n) and 1 <= n < _INT32_MAX)
    ]
    if wrong or not num_vpages:
        raise errors.ConfigError(
            errors.say(
                f"a pool with {', '.join(wrong) or 'no group'}",
                "pages and the bytes in one are counted from 1 and addressed as pairs "
                f"of int32, below {_INT32_MAX:,} each",
                "Take the sizes from budget.solve",
            )
        )
