"""Eviction policies: which edge of the prefix tree is forgotten first.

A policy is a name and a rank; the leaf of the smallest rank goes first. The law: a rank
is taken when an edge is used and holds until it is used again, so that a policy never
looks at an edge that nobody touched.

    PrefixCache(16, policy.lru())            # the default
    PrefixCache(16, policy.belady(next_use)) # for traces whose future is known
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["NAMED", "Edge", "Policy", "belady", "lfu", "lru", "size_aware"]


class Edge(Protocol):
    """What a policy may know of an edge."""

    last_used: int  # a clock that ticks once a use of the tree
    num_uses: int  # texts that came this way, the one that brought it included
    vpages: Sequence[int]  # its pages, the tail last


RankFn = Callable[[Edge, Any], Any]


class Policy(NamedTuple):
    """How leaves are ordered.

    `rank(edge, floor)` is comparable with the policy's other ranks; `floor` is the rank
    that was evicted last, 0 before any. Where `by_page` is true an edge is ranked anew
    for each page that it loses; else its tail goes as far as is needed.
    """

    name: str
    rank: RankFn
    by_page: bool = False


def lru() -> Policy:
    """Forget first what was used longest ago."""
    return Policy("lru", lambda edge, floor: edge.last_used)


def lfu() -> Policy:
    """Forget first what was used least often; among equals, longest ago."""
    return Policy("lfu", lambda edge, floor: (edge.num_uses, edge.last_used))


def size_aware() -> Policy:
    """Forget first long edges that few texts use; what is not used ages.

    The rank is the floor and uses per page (greedy dual, size and frequency): one long
    private text goes before many short shared ones, and a use counts from the rank
    that was evicted last, so no past popularity lasts for ever.
    """
    return Policy(
        "size_aware", lambda edge, floor: floor + edge.num_uses / len(edge.vpages)
    )


def belady(next_use: Callable[[int], float]) -> Policy:
    """Forget first what is used again last: the optimum, for a trace that is known.

    Args:
        next_use: when a page is used next, as of now; infinity for never.
    """
    return Policy("belady", lambda edge, floor: -next_use(edge.vpages[-1]), True)


# Policies that know no future, by name.
NAMED: dict[str, Callable[[], Policy]] = {
    "lru": lru,
    "lfu": lfu,
    "size_aware": size_aware,
}
