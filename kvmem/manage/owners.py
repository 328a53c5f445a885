"""Owners: who has claimed which bytes of one budget.

The law: a byte is claimed once. A manager that asks for more than the others have left
is refused with their names, so that target and draft cannot both size themselves from
the whole (TensorRT-LLM PR #12188, #12855 and #13130: device, windows and host tier).

    claims = reserve(Claims(8 << 30), "target", 6 << 30)
    reserve(claims, "draft", 8 << 30)       # OutOfPages: target has 6 of 8 GiB
"""

import dataclasses

from kvmem import errors

__all__ = ["Claims", "reserve"]


@dataclasses.dataclass(frozen=True)
class Claims:
    """One budget of one tier, and what each owner has of it."""

    nbytes: int
    taken: tuple[tuple[str, int], ...] = ()

    @property
    def left_nbytes(self) -> int:
        """What nobody has claimed."""
        return self.nbytes - sum(nbytes for _, nbytes in self.taken)


def reserve(claims: Claims, owner: str, nbytes: int) -> Claims:
    """Return the claims with one more.

    Raises:
        OutOfPages: less is left.
        Conflict: the owner has a claim already.
        ConfigError: a claim below zero.
    """
    held = dict(claims.taken)
    if nbytes < 0:
        raise errors.ConfigError(
            errors.say(
                f"a claim of {nbytes} B",
                "bytes are counted from zero",
                "Claim 0 or more",
            )
        )
    if owner in held:
        raise errors.Conflict(
            errors.say(
                f"{owner} asks for {nbytes:,} B",
                f"it has claimed {held[owner]:,} B of this budget before",
                "Size one owner once",
            )
        )
    if nbytes > claims.left_nbytes:
        named = ", ".join(f"{name} has {size:,} B" for name, size in claims.taken)
        raise errors.OutOfPages(
            errors.say(
                f"{owner} asks for {nbytes:,} B of {claims.nbytes:,} B",
                f"{named or 'nobody has any'}: {claims.left_nbytes:,} B are left",
                "Divide the budget first, or hold both in one joint manager",
            )
        )
    return dataclasses.replace(claims, taken=(*claims.taken, (owner, nbytes)))
