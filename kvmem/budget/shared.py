"""One buffer shared by bytes: the frontiers of stacks that grow pools from both ends.

kvmem shares pages, not bytes: every group takes whole pages of one size, and no slot is
reserved. SGLang's unified memory shares bytes: sub-pools grow towards each other in one
buffer, each may reach over all of it, and the first bytes are a sink for padding. For
those who plan such a stack this file says how many ids each sub-pool has, and from
which on they are real.

    shared_bytes([SubPool("full", 27_648, 100_000, page_size=64),
                  SubPool("state", 56_171_520, 20)]).max_slots      # (140_633, 69)

Figures after SGLang's unified memory pool (#33974, #34441).
"""

import dataclasses
from collections.abc import Sequence

from kvmem import errors

__all__ = ["SharedBytes", "SubPool", "draft_rows", "evicted_tokens", "shared_bytes"]
__all__ += ["state_cost_tokens"]

RULES = ("sglang",)


@dataclasses.dataclass(frozen=True)
class SubPool:
    """One kind of slot in the shared buffer.

    Args:
        name: of the sub-pool.
        entry_nbytes: bytes of one slot, all layers.
        slots: how many were asked for; they add to the buffer, and bound nothing.
        page_size: slots of a page; 1 for states.
    """

    name: str
    entry_nbytes: int
    slots: int
    page_size: int = 1

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page."""
        return self.entry_nbytes * self.page_size


@dataclasses.dataclass(frozen=True)
class SharedBytes:
    """A buffer shared by bytes; tuples are in the order of the sub-pools.

    Args:
        parts: the sub-pools.
        nbytes: of the buffer, without its tail.
        floor_nbytes: bytes at its beginning that padding is written to.
    """

    parts: tuple[SubPool, ...]
    nbytes: int
    floor_nbytes: int

    @property
    def max_slots(self) -> tuple[int, ...]:
        """Slots that the whole buffer would hold of each; they overlap by design."""
        return tuple(self.nbytes // part.entry_nbytes for part in self.parts)

    @property
    def min_slots(self) -> tuple[int, ...]:
        """The first slot of each behind the floor."""
        return tuple(-(-self.floor_nbytes // part.entry_nbytes) for part in self.parts)

    @property
    def min_pages(self) -> tuple[int, ...]:
        """The first page of each behind the floor."""
        return tuple(
            -(-slot // part.page_size)
            for slot, part in zip(self.min_slots, self.parts, strict=True)
        )

    @property
    def tail_nbytes(self) -> int:
        """Bytes behind the buffer: views of a layer reach past the last page."""
        return max(part.page_nbytes for part in self.parts)

    def available(self, live: Sequence[int]) -> tuple[int, ...]:
        """Return how many more slots each of two sub-pools could take.

        The first grows down from the top, the second up from the floor.

        Args:
            live: slots that each holds, without holes.
        """
        (top, bottom), (high, low) = self.parts, live
        up_to = (self.max_slots[0] - high) * top.entry_nbytes
        down_to = (self.min_slots[1] + low) * bottom.entry_nbytes
        gap = max(0, up_to - down_to)
        return gap // top.entry_nbytes, gap // bottom.entry_nbytes


def shared_bytes(parts: Sequence[SubPool], rules: str = "sglang") -> SharedBytes:
    """Return the buffer that the sub-pools share.

    A state counts once for the floor, a paged sub-pool with a whole page.

    Raises:
        ConfigError: unknown rules, or no sub-pool.
        IncompatiblePlan: a sub-pool whose slots all lie in the floor.
    """
    if rules not in RULES or not parts:
        raise errors.ConfigError(
            errors.say(
                f"bytes of {len(parts)} sub-pools shared by the rules {rules!r}",
                "kvmem's own pools share pages, and rules of another stack are its",
                f"Use one of {', '.join(RULES)}, and at least one sub-pool",
            )
        )
    nbytes = sum(part.slots * part.entry_nbytes for part in parts)
    floor = max(part.page_nbytes for part in parts)
    found = SharedBytes(tuple(parts), nbytes, floor)
    for part, most, first in zip(parts, found.max_slots, found.min_slots, strict=True):
        if most <= first:
            raise errors.IncompatiblePlan(
                errors.say(
                    f"{part.name}: {most:,} slots of {part.entry_nbytes:,} B in "
                    f"{nbytes:,} B",
                    f"the first {floor:,} B are no one's, and take {first:,} of them",
                    "Give more slots, or smaller pages",
                )
            )
    return found


def draft_rows(found: SharedBytes, dcp: int = 1, page_size: int = 1) -> int:
    """Return the rows of a draft pool that indexes ids of the first sub-pool.

    The ids reach as far as the whole buffer, not as far as the tokens asked for.
    """
    ids = (found.max_slots[0] - 1) * dcp
    return -(-ids // page_size) * page_size


def state_cost_tokens(state_nbytes: int, token_nbytes: int, dcp: int = 1) -> int:
    """Return the tokens of full attention that one state takes the place of."""
    return -(-state_nbytes * dcp // token_nbytes)


def evicted_tokens(
    missing: int,
    state_nbytes: int,
    token_nbytes: int,
    gap_nbytes: int = 0,
    dcp: int = 1,
) -> int:
    """Return how many tokens must go for `missing` states, `gap_nbytes` being free.

    As many as the bytes require and no more (SGLang #34441: states were refused while
    tokens could have gone).
    """
    wanted = missing * state_nbytes - gap_nbytes
    return max(0, -(-wanted * dcp // token_nbytes))
