"""One memory divided between two owners whose costs are affine in the tokens.

A manager's cost is bytes(tokens) = slope * tokens + intercept: the slope is what a
token takes, the intercept what is owed before the first (states, windows). On a device
both intercepts are paid first and the rest is divided by slope, so that both owners
hold equally many tokens; on the host there are no fixed costs, and slopes alone divide.
The law: the parts add up to the whole, exactly.

    split_affine(10 << 30, Term("target", "target", 80), Term("draft", "draft", 20))
    # (8 GiB, 2 GiB)

After TensorRT-LLM's split between a target and a separate draft cache (PR #12188,
#12855, #13130: without one, each took the whole).
"""

from typing import Literal, NamedTuple

from kvmem import errors
from kvmem.budget.pages import Budget
from kvmem.geometry import Term

__all__ = ["Part", "division", "split_affine", "token_bound"]


class Part(NamedTuple):
    """What one owner may take of a rank's pools: bytes, and the rows they keep.

    A row is one of the target's pool; `rows` is None where the owner's cost does not
    grow with them.
    """

    owner: str
    nbytes: int
    rows: int | None


def split_affine(
    nbytes: int,
    target: Term,
    draft: Term,
    tier: Literal["device", "host"] = "device",
) -> tuple[int, int]:
    """Return the bytes of the target and of the draft; their sum is `nbytes`.

    Args:
        nbytes: the whole of one tier.
        target, draft: what each claims for a token, and before the first.
        tier: fixed costs live on the device; a host tier is divided by slope alone.

    Raises:
        OutOfPages: the fixed costs are more than the whole.
        ConfigError: nothing costs anything, so that there is no proportion.
    """
    fixed = (0, 0) if tier == "host" else (target.fixed_bytes, draft.fixed_bytes)
    slopes = target.bytes_per_token + draft.bytes_per_token
    left = nbytes - sum(fixed)
    if left < 0:
        raise errors.OutOfPages(
            errors.say(
                f"{nbytes:,} B of the {tier} budget for target and draft",
                f"they owe {fixed[0]:,} + {fixed[1]:,} B before the first token",
                f"Give at least {sum(fixed):,} B",
            )
        )
    if slopes <= 0:
        raise errors.ConfigError(
            errors.say(
                f"{target.name} and {draft.name} at {slopes} B a token together",
                "bytes are divided in proportion to what a token costs",
                "Bound the draft's tokens instead (token_bound)",
            )
        )
    taken = fixed[1] + int(left * draft.bytes_per_token // slopes)
    return nbytes - taken, taken


def division(solved: Budget) -> tuple[Part, ...]:
    """Return how target and draft divide a rank's smallest limit, () without a draft.

    What others are owed before the first page (workspaces) comes off the whole.

    Raises:
        OutOfPages: as of `split_affine`.
    """
    owners = {"target": [], "draft": []}
    for term in solved.terms:
        owners.get(term.owner, []).append(term)
    if not owners["draft"]:
        return ()
    target, draft = (
        Term(
            owner,
            owner,
            sum(term.bytes_per_token for term in terms),
            sum(term.fixed_bytes for term in terms),
        )
        for owner, terms in owners.items()
    )
    others = sum(term.fixed_bytes for term in solved.terms)
    others -= target.fixed_bytes + draft.fixed_bytes
    parts = split_affine(solved.pool_nbytes - others, target, draft)
    return tuple(
        Part(term.owner, nbytes, token_bound(nbytes, term))
        for term, nbytes in zip((target, draft), parts, strict=True)
    )


def token_bound(nbytes: int, term: Term) -> int | None:
    """Return how many tokens `term` may keep in `nbytes`; None: nothing bounds them.

    For an owner that cannot be given a share of its own, and shares a cap in bytes.
    """
    if term.bytes_per_token == 0:
        return None
    return int(max(0, nbytes - term.fixed_bytes) // term.bytes_per_token)
