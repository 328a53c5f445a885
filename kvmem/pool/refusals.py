"""What a ledger refuses, each id named with its numbers.

The law: a verb is refused as a whole, before anything has changed, and every id that
speaks against it is in the message (eight of them, and how many more).

    require_held("pin", 0, books, ids)     # InvalidId: page 3 is held by nobody
"""

from typing import Protocol

import numpy as np

from kvmem import errors
from kvmem.pool.ids import as_host_ids

__all__ = [
    "require_held",
    "require_pinned",
    "require_releasable",
    "without_padding",
]


class Books(Protocol):
    """What is asked of one group's books on the host."""

    refs: np.ndarray  # i32[V]
    pins: np.ndarray  # i32[V]

    @property
    def num_vpages(self) -> int:
        """Virtual pages of the group, V."""


def without_padding(books: Books, vpages: np.typing.ArrayLike) -> np.ndarray:
    """Return the ids in one line, those beyond the end left out."""
    ids = as_host_ids(vpages, "vpages").reshape(-1)
    return ids[ids < books.num_vpages]


def require_releasable(
    group: int, books: Books, ids: np.ndarray, counts: np.ndarray
) -> None:
    """Refuse ids listed more often than held, and the last reference of a pinned one.

    Args: distinct ids, and how often each is listed.
    """
    held, pinned = _of(books.refs, ids), _of(books.pins, ids) > 0
    wrong = (counts > held) | (pinned & (counts == held))
    lanes = zip(ids[wrong], counts[wrong], held[wrong], strict=True)
    reasons = [
        f"page {page} is listed {count} times and held {refs} times"
        if count > refs
        else f"page {page} is pinned by a move in flight"
        for page, count, refs in lanes
    ]
    _refuse("release", group, books, reasons)


def require_pinned(
    group: int, books: Books, ids: np.ndarray, counts: np.ndarray
) -> None:
    """Refuse to unpin ids listed more often than pinned; args as above."""
    pins = _of(books.pins, ids)
    wrong = counts > pins
    reasons = [
        f"page {page} is listed {count} times and pinned {held} times"
        for page, count, held in zip(
            ids[wrong], counts[wrong], pins[wrong], strict=True
        )
    ]
    _refuse("unpin", group, books, reasons)


def require_held(verb: str, group: int, books: Books, ids: np.ndarray) -> None:
    """Refuse ids that nobody holds."""
    wrong = np.unique(ids[_of(books.refs, ids) == 0])
    _refuse(verb, group, books, [f"page {page} is held by nobody" for page in wrong])


def _of(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the count of each id, none for a negative one."""
    return np.where(ids < 0, 0, counts[np.maximum(ids, 0)])


def _refuse(verb: str, group: int, books: Books, reasons: list[str]) -> None:
    if not reasons:
        return
    more = f" and {len(reasons) - 8} more" if len(reasons) > 8 else ""
    raise errors.InvalidId(
        errors.say(
            f"{verb} in group {group}, virtual pages 0 to {books.num_vpages - 1}",
            "; ".join(reasons[:8]) + more,
            "Nothing was changed; let each holder give back once what it took",
        )
    )
