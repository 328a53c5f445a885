"""Solving: how many pages every group gets out of a number of bytes.

Costs come in two kinds. Some are owed before the first page: workspaces, and the state
of every sequence that may run. Others grow with the tokens: a row of pages is one page
of every group that keeps all tokens, and of windows as many as they still read. The
law: fixed costs first, then whole rows while they fit, and no limit is exceeded.

With decode context parallelism full attention of the target is spread over dcp ranks,
so a page of it keeps dcp times as many tokens; windows, states and drafts stand whole
on each of them, and pay for it.

In a split plan a window is never charged more than full attention in its place would
be. In a unified plan it may be: its pages are as long as the longest group's, and where
most of one is padding, windows can cost more than they save. Nothing is changed behind
the back of who asked for one pool; `Budget.split_tokens` says what pools of their own
would hold, wherever that is more.

    solve(groups, Topology(), [limit("memory", 1 << 30)], sequences=8, max_length=2_048)
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from kvmem import errors
from kvmem.budget import checks
from kvmem.budget import members as parts
from kvmem.budget.checks import MAX_PAGES
from kvmem.budget.limits import Limit, limit
from kvmem.budget.members import Member
from kvmem.budget.pages import Budget, GroupPages, PoolPages
from kvmem.budget.rows import Frame, Load, most, need_of, primary
from kvmem.budget.terms import group_terms
from kvmem.geometry import LifecycleGroup, Term, Topology, followers

__all__ = ["MAX_PAGES", "solve"]


def solve(
    groups: Sequence[LifecycleGroup],
    topology: Topology,
    limits: Sequence[Limit],
    *,
    order: str = "head_major",
    draft: LifecycleGroup | Sequence[LifecycleGroup] | None = None,
    max_pages: int | None = None,
    kind: Literal["unified", "split"] = "unified",
    sequences: int | None = None,
    snapshots: int = 0,
    max_length: int | None = None,
    step: int = 1,
    window_ratio: float | None = None,
    fixed: Sequence[Term] = (),
) -> Budget:
    """Turn bytes into pages for every lifecycle group.

    Args:
        groups: the target's lifecycle groups, and those of a draft that shares its
            pools (domain "draft").
        topology: ranks that share the cache.
        limits: caps on the bytes of one rank; the smallest wins. None at all: as many
            bytes as `max_pages` take.
        order: page order, which decides padding.
        draft: groups of domain "draft" with pools of their own that follow the
            target's virtual ids: dcp draft pages for each.
        max_pages: a further cap, on the pages of every pool.
        kind: "unified": one pool, whose page is the largest page of tokens, and a state
            lies in several; "split": one pool for each size of page.
        sequences: how many run at once; each has one state, and pages of windows.
        snapshots: states kept for reuse beside those of running sequences.
        max_length: tokens of the longest sequence; bounds what windows need.
        step: tokens that one step writes at most.
        window_ratio: rows of windows a row of full attention, in place of what
            `sequences` of `max_length` hold. Without either: one.
        fixed: claims paid before the first page; only their `fixed_bytes` count.

    Returns:
        The budget: `pools` to allocate, and for each group what it counts with.

    Raises:
        OutOfPages: the smallest limit does not hold one page of everything.
        IncompatiblePlan: more pages than ids can tell apart, pages too long for their
            offsets, or a state that no page can be cut for.
        ConfigError: no limit, a group in the wrong role, or states for nobody.
    """
    load = Load(sequences, snapshots, max_length, step, window_ratio)
    asked = (groups, topology, tuple(limits), order, _as_groups(draft), max_pages)
    solved = _solve(*asked, load, tuple(fixed), kind)
    if kind == "split" or len(groups) == 1 or not limits:
        return solved
    try:
        apart = _solve(*asked, load, tuple(fixed), "split")
    except (errors.OutOfPages, errors.IncompatiblePlan):
        return solved
    lead = primary(groups)
    tokens = apart.groups[lead].tokens
    more = tokens > solved.groups[lead].tokens
    return dataclasses.replace(solved, split_tokens=tokens if more else None)


def _solve(
    groups: Sequence[LifecycleGroup],
    topology: Topology,
    limits: tuple[Limit, ...],
    order: str,
    drafts: tuple[LifecycleGroup, ...],
    max_pages: int | None,
    load: Load,
    fixed: tuple[Term, ...],
    kind: str,
) -> Budget:
    """Solve what was asked, for one kind of pools."""
    bounds = len(limits) + (max_pages is not None)
    checks.require_roles(groups, drafts, bounds)
    checks.require_counts(groups, load)
    members = parts.members_of(groups, topology, order, kind)
    checks.require_offsets(members)
    first = primary(groups)
    needs = tuple(
        need_of(member.group, groups, first, topology, load) for member in members
    )
    behind = followers.page_nbytes(drafts, topology, order)
    frame = Frame(members, needs, first, followers.pages(1, topology) * behind, kind)
    owed = sum(term.fixed_bytes for term in fixed)
    if not limits:
        limits = (_as_asked(frame, max_pages, owed),)
    smallest = min(limits, key=lambda each: each.nbytes)
    rows = _rows(frame, smallest.nbytes - owed, max_pages)
    if rows < 1:
        raise _no_page(frame, smallest, owed, max_pages)
    pools = _pools(frame, rows, smallest.nbytes - owed, max_pages)
    lead = pools[members[first].pool].pages
    draft_pages = followers.pages(lead, topology) if drafts else 0
    checks.require_ids(pools, members[first].group.page_size, draft_pages)
    terms = [
        t for at in range(len(members)) for t in group_terms(frame, at, rows, topology)
    ]
    terms += followers.terms(drafts, topology, order)
    return Budget(
        groups=tuple(
            _group_pages(member, need.at(rows))
            for member, need in zip(members, needs, strict=True)
        ),
        terms=(*terms, *fixed),
        limits=limits,
        draft_pages=draft_pages,
        draft_page_nbytes=behind,
        max_pages=max_pages,
        pools=pools,
        fixed_nbytes=owed,
        step_nbytes=frame.step_nbytes(rows),
        paddings=parts.paddings(members, topology, order),
        kind=kind,
    )


def _as_groups(
    draft: LifecycleGroup | Sequence[LifecycleGroup] | None,
) -> tuple[LifecycleGroup, ...]:
    """Return the groups of a draft, () without one."""
    if draft is None:
        return ()
    return (draft,) if isinstance(draft, LifecycleGroup) else tuple(draft)


def _as_asked(frame: Frame, max_pages: int, owed: int) -> Limit:
    """Return the bytes that a number of pages takes, where nothing else is given."""
    if frame.kind == "unified":
        nbytes = max_pages * frame.page_nbytes(0)
    else:
        nbytes = frame.nbytes(
            most(lambda n: max(frame.pages(n)) <= max_pages, max_pages)
        )
    return limit("pages", nbytes + owed, "as many as asked")


def _rows(frame: Frame, nbytes: int, max_pages: int | None) -> int:
    """Return the most rows that fit, 0 when not one does."""

    def fits(rows: int) -> bool:
        capped = max_pages is None or max(frame.pages(rows)) <= max_pages
        return capped and frame.nbytes(rows) <= nbytes

    lead = frame.members[frame.first]
    return most(fits, max(0, nbytes) // (lead.extents * frame.page_nbytes(lead.pool)))


def _pools(
    frame: Frame, rows: int, nbytes: int, max_pages: int | None
) -> tuple[PoolPages, ...]:
    """Return the pools; a unified one takes the pages that no whole row would."""
    pages = frame.pages(rows)
    if frame.kind == "unified":
        most = nbytes // frame.page_nbytes(0)
        pages = (most if max_pages is None else min(most, max_pages),)
    found = []
    for pool, count in enumerate(pages):
        inside = [i for i, member in enumerate(frame.members) if member.pool == pool]
        extents = tuple(frame.members[i].extents for i in inside)
        found.append(
            PoolPages(
                page_nbytes=frame.members[inside[0]].page_nbytes,
                pages=count,
                groups=tuple(inside),
                num_vpages=tuple(count // extent for extent in extents),
                extents=extents,
            )
        )
    return tuple(found)


def _group_pages(member: Member, pages: int) -> GroupPages:
    group = member.group
    return GroupPages(
        name=group.name,
        lifecycle=str(group.lifecycle),
        layers=len(group.layers),
        page_size=group.page_size,
        page_nbytes=member.page_nbytes,
        pages=pages,
        tokens=0 if group.is_state else pages * member.virtual.page_size,
        domain=group.domain,
        extents=member.extents,
        payload_nbytes=member.payload_nbytes,
        pool=member.pool,
    )


def _no_page(
    frame: Frame, smallest: Limit, owed: int, max_pages: int | None
) -> errors.OutOfPages:
    """Say what one row of pages takes, and what is owed before it."""
    group = frame.members[frame.first].virtual
    least = frame.nbytes(1) + owed
    first = frame.nbytes(1) - frame.nbytes(0)
    before = frame.nbytes(0) + owed
    owes = f", after {before:,} B owed before the first" if before else ""
    capped = "" if max_pages is None else f" and a cap of {max_pages:,} pages"
    of = "" if smallest.rank is None else f" (rank {smallest.rank})"
    return errors.OutOfPages(
        errors.say(
            f"{smallest.nbytes:,} B of {smallest.name}{of}{capped} for pools",
            f"the target cannot get one page: one page of {group.page_size} tokens "
            f"takes {first:,} B on a rank{owes}",
            f"Give at least {least:,} B, a smaller page, or fewer sequences",
        )
    )
