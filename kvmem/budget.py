"""The budget: bytes to pages, with every claim named.

The law: the claims of all owners, padding and draft included, never exceed the smallest
limit; and whoever builds a pool takes its size from here. With decode context
parallelism a rank keeps every dcp-th token of the target, and all tokens of the draft,
so

    bytes for one row of the target pool = target + draft * dcp

with the target term equal at every dcp. `solve` divides, rounds down to whole pages,
and keeps the arithmetic so that `kvmem plan` can explain it.

    solve(groups, Topology(tp=3), [limit("memory", 1 << 30)]).groups[0].pages
"""

import dataclasses
from collections.abc import Sequence

from kvmem import errors
from kvmem.geometry import LifecycleGroup, Term, Topology, envelope

__all__ = [
    "MAX_PAGES",
    "Budget",
    "GroupPages",
    "Limit",
    "device_limit",
    "fraction_limit",
    "host_term",
    "limit",
    "rank_limit",
    "solve",
    "total_limit",
]


MAX_PAGES = 2**31 - 1  # page ids are int32, the null id one past the last among them


@dataclasses.dataclass(frozen=True)
class Limit:
    """A cap on what the pools of one rank may take, and how it came about."""

    name: str
    nbytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class GroupPages:
    """What one lifecycle group gets: bytes a rank, tokens of the model."""

    name: str
    lifecycle: str
    layers: int
    page_size: int
    page_nbytes: int
    pages: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Budget:
    """A solved budget of one rank; every rank's is the same.

    `terms` are the claims a row of the target pool makes on a rank; `max_pages` is a
    cap in pages that a person set, None when there is none. `host_terms` are claims on
    the machine's memory, outside the pools.
    """

    groups: tuple[GroupPages, ...]
    terms: tuple[Term, ...]
    limits: tuple[Limit, ...]
    draft_pages: int = 0
    draft_page_nbytes: int = 0
    max_pages: int | None = None
    host_terms: tuple[Term, ...] = ()

    @property
    def pool_nbytes(self) -> int:
        """What the pools of one rank may take: the smallest limit."""
        return min(limit.nbytes for limit in self.limits)

    @property
    def used_nbytes(self) -> int:
        """What the pools of one rank do take."""
        target = sum(group.pages * group.page_nbytes for group in self.groups)
        return target + self.draft_pages * self.draft_page_nbytes

    @property
    def left_nbytes(self) -> int:
        """What page rounding, or a cap in pages, leaves unused."""
        return self.pool_nbytes - self.used_nbytes

    @property
    def binding_limit(self) -> str:
        """Name of the limit that decided the number of pages."""
        smallest = min(self.limits, key=lambda limit: limit.nbytes)
        if self.max_pages is None or self.left_nbytes < self._step_nbytes:
            return smallest.name
        return "max_pages"

    @property
    def _step_nbytes(self) -> int:
        """Bytes that one more page would take, its draft pages included."""
        return self.used_nbytes // self.groups[0].pages


def limit(name: str, nbytes: int, reason: str = "as given, for each rank") -> Limit:
    """Return a cap of `nbytes` on each rank."""
    return Limit(name, nbytes, reason)


def total_limit(name: str, nbytes: int, topology: Topology) -> Limit:
    """Return the cap of each rank when `nbytes` is for all ranks together."""
    ranks = topology.ranks
    return Limit(name, nbytes // ranks, f"{nbytes:,} B in all, over {ranks} ranks")


def rank_limit(
    name: str, nbytes: int, topology: Topology, machine_nbytes: int
) -> Limit:
    """Return a cap for each rank, where all ranks share one machine.

    Raises:
        IncompatiblePlan: all ranks together ask for more than the machine has.
    """
    ranks, asked = topology.ranks, nbytes * topology.ranks
    if asked > machine_nbytes:
        raise errors.IncompatiblePlan(
            errors.say(
                f"{nbytes:,} B for each of {ranks} ranks",
                f"{nbytes:,} x {ranks} = {asked:,} B is more than the "
                f"{machine_nbytes:,} B of this machine",
                f"Give at most {machine_nbytes // ranks:,} B a rank, or declare the "
                "figure as a total",
            )
        )
    return Limit(name, nbytes, f"for each of {ranks} ranks, {asked:,} B in all")


def host_term(
    nbytes: int,
    topology: Topology,
    solved: Budget,
    machine_nbytes: int | None = None,
) -> Term:
    """Return each rank's part of a host tier that all ranks share.

    Args:
        nbytes: of the tier, once for all ranks.
        topology: the ranks.
        solved: their pools.
        machine_nbytes: memory of the machine that holds pools and tier, if declared.

    Raises:
        IncompatiblePlan: pools and tier together ask for more than the machine has.
    """
    ranks, pools = topology.ranks, solved.used_nbytes * topology.ranks
    if machine_nbytes is not None and pools + nbytes > machine_nbytes:
        raise errors.IncompatiblePlan(
            errors.say(
                f"a host tier of {nbytes:,} B for {ranks} ranks together",
                f"with pools of {solved.used_nbytes:,} x {ranks} = {pools:,} B that is "
                f"{pools + nbytes:,} B, more than the {machine_nbytes:,} B of this "
                "machine",
                f"Give the tier at most {max(0, machine_nbytes - pools):,} B, or the "
                "pools less",
            )
        )
    return Term("host tier", "store", 0, fixed_bytes=-(-nbytes // ranks))


def fraction_limit(name: str, free_nbytes: int, fraction: float) -> Limit:
    """Return the cap of a fraction of the bytes that are free.

    Raises:
        ConfigError: a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise errors.ConfigError(
            errors.say(
                f"{name} = {fraction}",
                "a fraction of the free bytes lies in (0, 1]",
                "Give for example 0.9",
            )
        )
    return Limit(
        name, int(free_nbytes * fraction), f"{fraction} of {free_nbytes:,} B free"
    )


def device_limit(
    name: str, device_nbytes: int, weight_nbytes: int, reserve_nbytes: int
) -> Limit:
    """Return what a device has left for pools after this rank's weights and a reserve.

    Raises:
        OutOfPages: nothing is left.
    """
    left = device_nbytes - weight_nbytes - reserve_nbytes
    reason = (
        f"{device_nbytes:,} B less {weight_nbytes:,} B of weights "
        f"less {reserve_nbytes:,} B reserved"
    )
    if left <= 0:
        raise errors.OutOfPages(
            errors.say(
                f"{name} of {device_nbytes:,} B",
                f"{reason} leaves {left:,} B for pages",
                "Use a larger device, a larger TP, or a smaller reserve",
            )
        )
    return Limit(name, left, reason)


def solve(
    groups: Sequence[LifecycleGroup],
    topology: Topology,
    limits: Sequence[Limit],
    *,
    order: str = "head_major",
    draft: LifecycleGroup | None = None,
    max_pages: int | None = None,
) -> Budget:
    """Turn bytes into pages for one target group and, if there is one, its draft.

    Args:
        groups: the target's lifecycle groups (one in this version).
        topology: ranks that share the cache.
        limits: caps on the bytes of one rank; the smallest wins. None at all: as many
            bytes as `max_pages` take.
        order: page order, which decides padding.
        draft: a group of domain "draft" whose pool follows the target's virtual range:
            every token on every dcp rank, so dcp draft pages a target page.
        max_pages: a further cap, in pages.

    Raises:
        OutOfPages: the smallest limit does not hold one page of everything.
        IncompatiblePlan: more pages than ids can tell apart.
        ConfigError: no limit, or a group in the wrong role.
    """
    bounds = len(limits) + (max_pages is not None)
    group = _one_target(groups, draft, bounds)
    page_nbytes = envelope.build(group, topology, 0, order).nbytes
    draft_nbytes = 0
    terms = list(_terms("target", group, topology, order, copies=1))
    if draft is not None:
        draft_nbytes = envelope.build(draft, topology, 0, order).nbytes
        terms += _terms("draft", draft, topology, order, copies=topology.dcp)
    step = page_nbytes + topology.dcp * draft_nbytes
    if not limits:
        limits = (limit("pages", max_pages * step, "as many as asked"),)
    smallest = min(limits, key=lambda limit: limit.nbytes)
    pages = smallest.nbytes // step
    if pages < 1:
        raise errors.OutOfPages(
            errors.say(
                f"{smallest.nbytes:,} B of {smallest.name} for pools",
                f"one page of {group.page_size} tokens takes {step:,} B on a rank",
                f"Give at least {step:,} B, or a smaller page",
            )
        )
    if max_pages is not None:
        pages = min(pages, max_pages)
    draft_pages = pages * topology.dcp if draft is not None else 0
    _require_ids(pages, group.page_size, topology.dcp if draft is not None else 1)
    return Budget(
        groups=(
            GroupPages(
                name=group.name,
                lifecycle=str(group.lifecycle),
                layers=len(group.layers),
                page_size=group.page_size,
                page_nbytes=page_nbytes,
                pages=pages,
                tokens=pages * group.page_size * topology.dcp,
            ),
        ),
        terms=tuple(terms),
        limits=tuple(limits),
        draft_pages=draft_pages,
        draft_page_nbytes=draft_nbytes,
        max_pages=max_pages,
    )


def _require_ids(pages: int, page_size: int, copies: int) -> None:
    """Refuse more pages, or draft pages (`copies` a page), than ids can tell apart."""
    if pages * copies > MAX_PAGES:
        raise errors.IncompatiblePlan(
            errors.say(
                f"a pool of {pages * copies:,} pages of {page_size} tokens",
                f"page ids are int32, which tell {MAX_PAGES:,} pages apart",
                f"Cap pool.pages at {MAX_PAGES // copies}, or use a larger "
                "pool.page_size",
            )
        )


def _one_target(
    groups: Sequence[LifecycleGroup], draft: LifecycleGroup | None, bounds: int
) -> LifecycleGroup:
    """Return the target group after checking that every part is in its role."""
    roles = [group.domain for group in groups]
    if roles != ["target"] or not bounds:
        raise errors.ConfigError(
            errors.say(
                f"a budget of {len(roles)} groups {roles} and {bounds} limits",
                "this version divides its bytes over one target group",
                "Pass one group of domain 'target' and at least one limit",
            )
        )
    (group,) = groups
    if draft is not None and (draft.domain, draft.page_size) != (
        "draft",
        group.page_size,
    ):
        raise errors.ConfigError(
            errors.say(
                f"a draft of domain {draft.domain!r} with pages of {draft.page_size}",
                f"draft pages follow the target's, of {group.page_size} tokens",
                "Build the draft group with domain 'draft' and the same page_size",
            )
        )
    return group


def _terms(
    owner: str, group: LifecycleGroup, topology: Topology, order: str, copies: int
) -> tuple[Term, ...]:
    """Return a group's claims for one row of the target pool on one rank.

    `copies` is how many of the group's own rows that row stands for: dcp for a draft,
    which keeps every token on every dcp rank.
    """
    built = envelope.build(group, topology, 0, order)
    per_row = built.payload_nbytes // group.page_size
    padding = built.padding_nbytes // group.page_size
    replicas = max(topology.replicas(field) for field in group.fields)
    if owner == "draft":
        replicas *= topology.dcp
    terms = [Term(f"{owner} kv", owner, per_row * copies, replicas=replicas)]
    if padding:
        terms.append(Term(f"{owner} padding", owner, padding * copies))
    return tuple(terms)
