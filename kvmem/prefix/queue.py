"""The queue of leaves that wait for eviction, the smallest rank first.

A heap with late corrections: an edge that is used while it waits is not moved, it is
put back with its new rank when its turn comes. Only a rank that has become smaller is
entered again at once. The law: an entry counts while it is its edge's latest one and
the edge is still a leaf of the tree.
"""

import array
import heapq
import itertools
from typing import Any

from kvmem.prefix.policy import Policy

__all__ = ["LeafQueue", "Node"]


class Node:
    """An edge of the tree and what hangs below it: a run of whole pages."""

    __slots__ = ("children", "entered", "key", "last_used", "name", "num_uses")
    __slots__ += ("parent", "rank", "vpages")

    def __init__(
        self, parent: "Node | None", name: Any, key: bytes, vpages: array.array
    ):
        self.parent = parent
        self.name = name  # its first page, as its parent knows it
        self.key = key  # the tokens of its pages
        self.vpages = vpages  # i32, four bytes a page
        self.children: dict[Any, Node] = {}
        self.last_used = 0
        self.num_uses = 0
        self.rank: Any = None
        self.entered: Any = None  # the rank it waits with


class LeafQueue:
    """Leaves in the order of a policy."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self._floor: Any = 0
        self._order = itertools.count()
        self._heap: list[tuple[Any, int, Node]] = []

    def use(self, node: Node, now: int) -> None:
        """Count a use of an edge at time `now`."""
        node.last_used = now
        node.num_uses += 1
        self.rank_again(node)

    def rank_again(self, node: Node) -> None:
        """Take an edge's rank anew."""
        node.rank = self.policy.rank(node, self._floor)
        if node.entered is not None and node.rank < node.entered:
            self._push(node)

    def enter(self, node: Node) -> None:
        """Let a leaf wait, once."""
        if node.entered is None:
            self._push(node)

    def pop(self) -> Node | None:
        """Take out the leaf that goes first; None when none waits."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if node.entered != rank:
                continue  # it has a later entry, or has left
            node.entered = None
            if node.parent is None or node.children:
                continue  # gone, or not a leaf any more
            if node.rank == rank:
                return node
            self._push(node)  # used since: it waits its turn again
        return None

    def evicted(self, node: Node) -> None:
        """Note that pages of this rank have gone."""
        self._floor = node.rank

    def clear(self) -> None:
        """Forget who waits."""
        self._heap = []

    def _push(self, node: Node) -> None:
        node.entered = node.rank
        heapq.heappush(self._heap, (node.rank, next(self._order), node))
