"""Checks: what no plan may ask, each refused with the law and what would work."""

from collections.abc import Sequence

from kvmem import errors
from kvmem.budget import rows
from kvmem.budget.members import Member
from kvmem.budget.pages import PoolPages
from kvmem.geometry import LifecycleGroup, width

__all__ = ["MAX_PAGES", "require_counts", "require_ids", "require_offsets"]
__all__ += ["require_roles"]

# Page ids are int32, the null id one past the last among them; a count of pages and
# its end stay below 2**31 - 1, as in kvmem.pool.init.
MAX_PAGES = 2**31 - 2


def require_roles(
    groups: Sequence[LifecycleGroup], drafts: Sequence[LifecycleGroup], bounds: int
) -> None:
    """Refuse a plan without a target or a limit, or a draft in another's place."""
    roles = [group.domain for group in groups]
    if "target" not in roles or not bounds:
        raise errors.ConfigError(
            errors.say(
                f"a budget of {len(roles)} groups {roles} and {bounds} limits",
                "bytes are divided over at least one target group",
                "Pass one group of domain 'target' or more, and at least one limit",
            )
        )
    keys = [f"{group.domain} {group.name}" for group in (*groups, *drafts)]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise errors.ConfigError(
            errors.say(
                f"groups {', '.join(twice)} more than once",
                "each domain's name stands once in a plan",
                "Pass the groups of one model, the draft's with domain='draft'",
            )
        )
    size = groups[rows.primary(groups)].page_size
    for draft in drafts:
        if (draft.domain, draft.page_size, draft.is_state) != ("draft", size, False):
            raise errors.ConfigError(
                errors.say(
                    f"a draft of domain {draft.domain!r} with pages of "
                    f"{draft.page_size}",
                    f"draft pages follow the target's, of {size} tokens, and a state "
                    "follows none",
                    "Plan a draft with the target's page_size and without recurrent "
                    "layers; for one that has them leave [draft] out, and take what "
                    "they need off the memory",
                )
            )


def require_counts(groups: Sequence[LifecycleGroup], load: rows.Load) -> None:
    """Refuse states for nobody, and counts that count nothing."""
    faults, sequences, ratio = [], load.sequences, load.window_ratio
    paged = any(not group.is_state for group in groups)
    if sequences is None and paged and any(group.is_state for group in groups):
        faults.append("states without the number of sequences that have one")
    if sequences is not None and sequences < 1:
        faults.append(f"sequences = {sequences}")
    if load.step < 1:
        faults.append(f"step = {load.step}")
    if ratio is not None and not 0 < ratio <= 1:
        faults.append(f"window_ratio = {ratio}")
    kinds = {group.lifecycle.kind for group in groups}
    if ratio is not None and "window" not in kinds:
        raise errors.ConfigError(
            errors.say(
                f"window_ratio = {ratio} for groups of kind {', '.join(sorted(kinds))}",
                "it is rows of windows a row of full attention, and decides nothing "
                "for a model without windows",
                "Leave window_ratio out",
            )
        )
    if faults:
        raise errors.ConfigError(
            errors.say(
                ", ".join(faults),
                "each running sequence has a state of its own, counts start at one, "
                "and windows have at most the rows of full attention",
                "Give sequences and step >= 1, and a ratio in (0, 1]",
            )
        )


def require_ids(pools: Sequence[PoolPages], page_size: int, draft_pages: int) -> None:
    """Refuse more pages, of a pool or of the draft behind it, than ids tell apart."""
    pages = max([draft_pages, *(pool.pages for pool in pools)])
    if pages > MAX_PAGES:
        copies = max(1, draft_pages // max(pool.pages for pool in pools))
        raise errors.IncompatiblePlan(
            errors.say(
                f"a pool of {pages:,} pages of {page_size} tokens",
                f"page ids are int32, which tell {MAX_PAGES:,} pages apart",
                f"Cap pool.pages at {MAX_PAGES // copies}, or use a larger "
                "pool.page_size",
            )
        )


def require_offsets(members: Sequence[Member]) -> None:
    """Refuse pages whose last byte an int32 offset does not reach."""
    limit = width.first_wrapping(stride=1)
    for member in members:
        if member.page_nbytes >= limit:
            raise errors.IncompatiblePlan(
                errors.say(
                    f"pages of {member.page_nbytes:,} B for {member.group.page_size:,} "
                    f"tokens of group {member.group.name!r}",
                    "a byte is addressed as (page, offset), and an int32 offset wraps "
                    f"at {limit:,}",
                    "Use a smaller pool.page_size, or a larger TP",
                )
            )
