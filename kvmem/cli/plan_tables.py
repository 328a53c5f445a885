"""The tables of `kvmem plan`: claims, limits, groups, pools, padding, ids and gates.

Law: what stands in a table stands in the JSON under the same name, and no number is
worked out here that the budget does not give.
"""

from collections.abc import Sequence
from fractions import Fraction

from kvmem import budget, console, speculative
from kvmem.budget import Budget, Padding, Part, PoolPages
from kvmem.speculative import SpecPlan

__all__ = ["gate_rows", "number", "show", "show_gates"]

_SPLIT = 'pool.kind = "split", planned only: an engine has one pool'


def show(out: console.Console, solved: Budget, may_split: bool = True) -> None:
    """Print a solved budget for a person.

    Args:
        out: where to.
        solved: the budget.
        may_split: whether pools of their own are to be named as a cure.
    """
    _claims(out, solved)
    _limits(out, solved)
    _groups(out, solved)
    if len(solved.groups) > 1:
        _pools(out, solved)
    print(_rounding(solved))
    parts = budget.division(solved)
    if parts:
        print(_division(parts))
    if solved.limiting_rank is not None:
        smallest = solved.limit
        print(
            f"limiting rank: {solved.limiting_rank}, with {smallest.nbytes:,} B of "
            f"{smallest.name}; every rank's pools are as large as its"
        )
    for padding in solved.paddings:
        print(_padding(solved, padding, may_split))
    if may_split and solved.split_tokens is not None:
        print(_apart(solved))
    print(_ids(solved))


def gate_rows(plan: SpecPlan, rules: str = "kvmem") -> list[dict[str, str]]:
    """Return what each gate of drafting says, as JSON has it."""
    return [
        {
            "gate": verdict.gate,
            "said": verdict.said,
            "why": "" if verdict.violation is None else verdict.violation.advice.law,
        }
        for verdict in speculative.verdicts(plan, rules)
    ]


def show_gates(
    out: console.Console, plan: SpecPlan, rows: Sequence[dict[str, str]]
) -> None:
    """Print the gates that have something to say of a plan that drafts, or would."""
    spoken = [row for row in rows if row["said"] != "silent"]
    refused = any(row["said"] == "refused" for row in spoken)
    if plan.algorithm is None and not refused:
        return
    gates = console.table("gates of drafting", "gate", "verdict", "law")
    for row in spoken:
        gates.add_row(row["gate"], row["said"], row["why"])
    out.print(gates)
    silent = len(rows) - len(spoken)
    print(
        f"drafting by {plan.algorithm}: {plan.num_drafted} tokens a step; "
        f"{silent} of {len(rows)} gates of kvmem have nothing to say of this plan"
    )


def number(value: int | Fraction) -> int | float:
    """Return a number as JSON has it."""
    return int(value) if value == int(value) else float(value)


def _count(value: int | Fraction) -> str:
    return f"{number(value):,}" if value == int(value) else f"{float(value):,.2f}"


def _claims(out: console.Console, solved: Budget) -> None:
    claims = console.table(
        "claims, on each rank",
        *("claim", "owner", "> bytes per token", "> fixed bytes", "> replicas"),
    )
    for term in solved.terms:
        claims.add_row(
            term.name,
            term.owner,
            _count(term.bytes_per_token),
            _count(term.fixed_bytes),
            _count(term.replicas),
        )
    claims.add_section()
    total = sum(term.bytes_per_token for term in solved.terms)
    fixed = sum(term.fixed_bytes for term in solved.terms)
    claims.add_row("total", "", _count(total), _count(fixed), "")
    out.print(claims)


def _limits(out: console.Console, solved: Budget) -> None:
    limits = console.table("limits, on each rank", "limit", "> bytes", "reason", "")
    binds = solved.limit if solved.binding_limit == solved.limit.name else None
    for each in solved.limits:
        bound = "binds" * (each is binds)
        limits.add_row(each.name, console.count(each.nbytes), each.reason, bound)
    if solved.max_pages is not None:
        reason = f"at most {solved.max_pages:,} pages"
        limits.add_row("max_pages", "", reason, "binds" * (binds is None))
    out.print(limits)


def _groups(out: console.Console, solved: Budget) -> None:
    groups = console.table(
        "pages",
        *("group", "> layers", "> page size", "> page bytes"),
        *("> pages", "> tokens"),
    )
    for each in solved.groups:
        numbers = (each.layers, each.page_size, each.page_nbytes, each.pages)
        name = each.name if each.domain == "target" else f"{each.domain} {each.name}"
        groups.add_row(
            name,
            *map(console.count, numbers),
            console.count(each.tokens or None),
        )
    if solved.draft_pages:
        (group, *_) = solved.groups
        numbers = (group.page_size, solved.draft_page_nbytes, solved.draft_pages)
        groups.add_row("draft", "-", *map(console.count, numbers), "")
    out.print(groups)


def _pools(out: console.Console, solved: Budget) -> None:
    pools = console.table(
        f"pools ({solved.kind}), on each rank",
        *("pool", "groups", "> page bytes", "> pages", "> pages each", "> virtual ids"),
    )
    for index, pool in enumerate(solved.pools):
        names = ", ".join(solved.groups[group].name for group in pool.groups)
        ids = ", ".join(map(console.count, pool.num_vpages))
        parts = ", ".join(map(console.count, pool.extents))
        numbers = (pool.page_nbytes, pool.pages)
        pools.add_row(str(index), names, *map(console.count, numbers), parts, ids)
    out.print(pools)


def _division(parts: Sequence[Part]) -> str:
    """Say what target and draft may take."""
    said = ", ".join(
        f"{each.owner} {each.nbytes:,} B"
        + ("" if each.rows is None else f" for {each.rows:,} rows")
        for each in parts
    )
    return f"divided, fixed costs first and the rest by what a row costs: {said}"


def _rounding(solved: Budget) -> str:
    """Say how bytes became pages."""
    kept = f"use {solved.used_nbytes:,} B and leave {solved.left_nbytes:,} B"
    step = solved.step_nbytes
    owed = f" less {solved.fixed_nbytes:,} B owed" if solved.fixed_nbytes else ""
    whole = f"{solved.pool_nbytes:,} B{owed}"
    if solved.kind == "unified":
        (pool,) = solved.pools
        free = solved.pool_nbytes - solved.fixed_nbytes
        return (
            f"rounding: {whole} / {step:,} B a page = {_hundredths(free, step)}, so "
            f"{pool.pages:,} pages {kept}"
            if _is_shared(pool)
            else f"rounding: of {whole}, {step:,} B a page, quotas of "
            f"{' + '.join(f'{n:,}' for n in pool.num_vpages)} pages {kept}"
        )
    pages = " + ".join(f"{pool.pages:,}" for pool in solved.pools)
    return (
        f"rounding: of {whole}, one more row would take {step:,} B, so {pages} pages "
        f"{kept}"
    )


def _is_shared(pool: PoolPages) -> bool:
    """Say whether a pool has every page that each of its groups may take."""
    shared = zip(pool.num_vpages, pool.extents, strict=True)
    return all(count == pool.pages // extent for count, extent in shared)


def _hundredths(nbytes: int, step: int) -> str:
    """Return a quotient of integers of any size, rounded to hundredths."""
    whole, part = divmod((200 * nbytes + step) // (2 * step), 100)
    return f"{whole:,}.{part:02}"


def _padding(solved: Budget, padding: Padding, may_split: bool) -> str:
    """Say what a group wastes, and what would waste less."""
    said = (
        f"padding: {padding.nbytes:,} of {padding.of_nbytes:,} B of a page of "
        f"{padding.group} ({padding.share:.1%}) mean nothing"
    )
    is_state = any(
        group.name == padding.group and group.lifecycle == "state"
        for group in solved.groups
    )
    sizes = padding.page_sizes
    cures = []
    if sizes and is_state:
        cures.append(f"pages of {_listed(sizes)} tokens in the other groups")
    elif sizes:
        cures.append(f"pages of its own, of {sizes[0]:,} to {sizes[1]:,} tokens")
    if may_split and solved.kind == "unified" and len(solved.groups) > 1:
        cures.append(f"a pool of its own ({_SPLIT})")
    return said + ("; at most an eighth would with " + ", or ".join(cures)) * bool(
        cures
    )


def _apart(solved: Budget) -> str:
    """Say what one pool for every group costs in tokens."""
    targets = [group for group in solved.groups if group.domain == "target"]
    held = [g for g in targets if g.lifecycle == "full"] or targets
    return (
        f"split gives {solved.split_tokens:,} tokens beside these {held[0].tokens:,} "
        f"({_SPLIT}): in one pool every page is as long as the longest"
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)


def _ids(solved: Budget) -> str:
    """Say the largest id, and where a flat 32-bit address would wrap."""
    said = (
        f"ids: the largest page is {solved.largest_id:,}; bytes are addressed as "
        "(page, offset)"
    )
    first = [_wraps(pool) for pool in solved.pools if pool.first_wrapping is not None]
    return said + (", a flat int32 address would wrap " + ", ".join(first)) * bool(
        first
    )


def _wraps(pool: PoolPages) -> str:
    return f"from page {pool.first_wrapping:,} of {pool.page_nbytes:,} B on"
