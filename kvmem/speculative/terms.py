"""Draft terms: what the draft of an algorithm keeps, and in which pool.

- "nothing": `ngram` has no model, and `frozen_kv` reads the target's own pages: no
  bytes, no term;
- "shared": the groups of `mtp` stand in the target's manager and take pages of its
  pools;
- "own": `two_engine` has a pool of its own, with as many rows as the target has tokens;
- "virtual": `dflash` and `dspark` index the target's virtual ids: behind each page of
  the target stand dcp of theirs, and the highest id can be written.

The law: budget and pool builder ask the same functions, so that what is priced is what
is built; every token shard keeps all of a draft's tokens.

    draft_term(SpecPlan("dflash"), draft_groups, Topology(dcp=8)).bytes_per_token
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvmem import errors
from kvmem.geometry import LifecycleGroup, Term, Topology, followers
from kvmem.speculative import rules_kvmem
from kvmem.speculative.plan import SpecPlan

__all__ = ["HOMES", "DraftPool", "Placed", "draft_pool", "draft_term", "place"]

HOMES = {
    "ngram": "nothing",
    "frozen_kv": "nothing",
    "mtp": "shared",
    "two_engine": "own",
    "dflash": "virtual",
    "dspark": "virtual",
}


class Placed(NamedTuple):
    """Groups by whose pools they take pages of.

    Args:
        joint: the target's, and those of a draft that shares its pools.
        followers: those of a draft with pools of its own, row for row.
    """

    joint: tuple[LifecycleGroup, ...]
    followers: tuple[LifecycleGroup, ...]


class DraftPool(NamedTuple):
    """Pages of a draft's own pool on one rank."""

    pages: int
    page_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the pool on one rank."""
        return self.pages * self.page_nbytes


def place(
    plan: SpecPlan,
    groups: Sequence[LifecycleGroup],
    draft_groups: Sequence[LifecycleGroup],
) -> Placed:
    """Return which groups share the target's pools, and which have their own.

    Raises:
        ConfigError: draft groups for an algorithm that keeps nothing, or none for one
            that does.
    """
    home = _home(plan, draft_groups)
    if home == "shared":
        return Placed((*groups, *draft_groups), ())
    return Placed(tuple(groups), tuple(draft_groups))


def draft_term(
    plan: SpecPlan,
    draft_groups: Sequence[LifecycleGroup],
    topology: Topology,
    order: str = "head_major",
) -> Term | None:
    """Return what the draft claims for a row of the target's pool; None: nothing.

    Of a shared pool whose pages are longer than the draft's, the rest of each page is
    the budget's padding, and not in this term.

    Args:
        plan: says who drafts.
        draft_groups: its groups, () where it keeps nothing.
        topology: the ranks; heads are divided by tp, tokens are on every dcp rank.
        order: page order, which decides padding.

    Raises:
        ConfigError: draft groups for an algorithm that keeps nothing, or none for one
            that does.
        IncompatiblePlan: heads that the topology does not divide.
    """
    if _home(plan, draft_groups) == "nothing":
        return None
    held = max(topology.replicas(f) for group in draft_groups for f in group.fields)
    return Term(
        "draft",
        "draft",
        followers.row_nbytes(draft_groups, topology, order),
        replicas=held * topology.dcp,
    )


def draft_pool(
    plan: SpecPlan,
    draft_groups: Sequence[LifecycleGroup],
    num_vpages: int,
    topology: Topology,
    order: str = "head_major",
) -> DraftPool | None:
    """Return the draft's own pool beside `num_vpages` of the target; None: it has none.

    It covers the whole range of virtual ids, page by page, so its highest position,
    num_vpages * page_size * dcp - 1, lies inside.

    Raises:
        ConfigError: as `draft_term`.
    """
    if _home(plan, draft_groups) in ("nothing", "shared"):
        return None
    pages = followers.pages(num_vpages, topology)
    return DraftPool(pages, followers.page_nbytes(draft_groups, topology, order))


def _home(plan: SpecPlan, draft_groups: Sequence[LifecycleGroup]) -> str:
    """Return whose pools the draft has; a draft that no algorithm runs has its own."""
    if plan.algorithm is None:
        return "own" if draft_groups else "nothing"
    if plan.algorithm not in HOMES:
        raise errors.ConfigError(
            errors.say(
                f"the draft term of {plan.algorithm!r}",
                "what a draft keeps follows from its algorithm",
                f"Use one of {', '.join(rules_kvmem.ALGORITHMS)}",
            )
        )
    home = HOMES[plan.algorithm]
    if (home == "nothing") == bool(draft_groups):
        has = f"{len(draft_groups)} draft groups" if draft_groups else "no draft group"
        keeps = "nothing" if home == "nothing" else "rows of its own"
        raise errors.ConfigError(
            errors.say(
                f"{plan.algorithm!r} with {has}",
                f"a draft by {plan.algorithm} keeps {keeps}",
                "Pass the groups of its layers, and none where it has none",
            )
        )
    return home
