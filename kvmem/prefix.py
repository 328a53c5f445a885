"""Which pages already hold this text: a radix tree over whole pages of tokens.

An edge of the tree carries a run of tokens, a whole number of pages of it, and the
virtual pages that hold their KV. Tokens are compared, never only hashed. The tree keeps
no counts of its own: the caller retains the pages that `publish` adopts and releases
those that `evict` drops, so a page's readers are counted in the pool's books and
nowhere else.

    hit = cache.match(tokens)                # whole pages, at most len - 1 tokens
    adopted = cache.publish(tokens, vpages)  # retain these
    dropped = cache.evict(2, idle)           # release these: oldest tails first

The law of eviction: a page goes only when no page behind it is cached, and only when
`idle` says that nobody but the cache reads it.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvmem import errors

__all__ = ["Hit", "PrefixCache"]

_TOKEN_NBYTES = 4


class Hit(NamedTuple):
    """A cached prefix: its tokens, a whole number of pages, and the pages in order."""

    num_tokens: int
    vpages: tuple[int, ...]


class _Node:
    """A run of whole pages; `key` is their tokens as little-endian int32 bytes."""

    __slots__ = ("children", "first", "key", "last_used", "parent", "queued", "vpages")

    def __init__(self, parent, first: bytes, key: bytes, vpages: list[int], used: int):
        self.parent: _Node | None = parent
        self.first = first  # the tokens of its first page: its name among the children
        self.key = key
        self.vpages = vpages
        self.children: dict[bytes, _Node] = {}
        self.last_used = used
        self.queued = False  # whether it stands in the queue of eviction


class PrefixCache:
    """The prefix index of one lifecycle group in one process."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.num_pages = 0
        self._page_nbytes = page_size * _TOKEN_NBYTES
        self._clock = itertools.count(1)
        self._order = itertools.count()
        self._root = _Node(None, b"", b"", [], 0)
        self._oldest: list[tuple[int, int, _Node]] = []

    def match(self, tokens: Sequence[int]) -> Hit:
        """Find the longest cached prefix that leaves at least one token to compute.

        A question: it changes neither the tree nor the order of eviction.
        """
        key = self._key(tokens, max(0, len(tokens) - 1))
        vpages = [v for node, pages in self._walk(key) for v in node.vpages[:pages]]
        return Hit(len(vpages) * self.page_size, tuple(vpages))

    def touch(self, tokens: Sequence[int]) -> None:
        """Mark the cached prefix of `tokens` as used now."""
        now = next(self._clock)
        for node, _ in self._walk(self._key(tokens, len(tokens))):
            node.last_used = now

    def publish(self, tokens: Sequence[int], vpages: Sequence[int]) -> tuple[int, ...]:
        """Enter every whole page of `tokens`; return the pages adopted, in order.

        Where the tree already holds a page of the same text, it keeps its own and
        adopts
        none: two sequences that computed one prefix never free a page that the other
        still names.

        Args:
            tokens: the text, whose KV is written and whose tokens are accepted.
            vpages: its pages; at least one for each whole page of tokens.

        Raises:
            InvalidId: fewer pages than whole pages of tokens.
        """
        whole = len(tokens) // self.page_size
        if len(vpages) < whole:
            raise errors.InvalidId(
                errors.say(
                    f"publishing {len(tokens)} tokens with {len(vpages)} pages",
                    f"{whole} whole pages of {self.page_size} need a page each",
                    "Pass the sequence's own table",
                )
            )
        key = self._key(tokens, len(tokens))
        now = next(self._clock)
        node, pages, at = self._root, 0, 0
        for node, pages in self._walk(key):
            node.last_used = now
            at += pages
        if at == whole:
            return ()
        if pages < len(node.vpages):
            node = self._cut(node, pages)
        adopted = [int(v) for v in vpages[at:whole]]
        self._attach(node, key[at * self._page_nbytes :], adopted, now)
        self.num_pages += len(adopted)
        return tuple(adopted)

    def evict(self, num_pages: int, idle: Callable[[int], bool]) -> tuple[int, ...]:
        """Drop up to `num_pages` pages, the tails of the least recently used first.

        Args:
            num_pages: how many pages are needed.
            idle: says whether nobody but the cache reads a page.
        """
        dropped: list[int] = []
        busy = []
        while self._oldest and len(dropped) < num_pages:
            used, _, node = heapq.heappop(self._oldest)
            node.queued = False
            if node.parent is None or node.children:
                continue  # gone, or not a leaf any more
            if node.last_used != used:
                self._queue(node)  # used since: it waits its turn again
                continue
            while node.vpages and len(dropped) < num_pages and idle(node.vpages[-1]):
                dropped.append(node.vpages.pop())
            node.key = node.key[: len(node.vpages) * self._page_nbytes]
            if not node.vpages:
                self._detach(node)
            elif len(dropped) < num_pages:
                busy.append(node)  # its tail is being read
            else:
                self._queue(node)
        for node in busy:
            self._queue(node)
        self.num_pages -= len(dropped)
        return tuple(dropped)

    def clear(self) -> tuple[int, ...]:
        """Forget everything; return the pages that the caller releases."""
        held = tuple(self.vpages())
        self._root = _Node(None, b"", b"", [], 0)
        self._oldest = []
        self.num_pages = 0
        return held

    def vpages(self) -> Iterator[int]:
        """Yield every page that the cache holds."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            yield from node.vpages
            nodes.extend(node.children.values())

    def _key(self, tokens: Sequence[int], length: int) -> bytes:
        """Return the whole pages of the first `length` tokens as bytes."""
        whole = length // self.page_size * self.page_size
        return np.asarray(tokens[:whole], np.dtype("<i4")).tobytes()

    def _walk(self, key: bytes) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes along `key` and how many of their pages agree with it."""
        node, at, width = self._root, 0, self._page_nbytes
        while child := node.children.get(key[at : at + width]):
            pages = self._agreeing_pages(child.key, key, at)
            yield child, pages
            at += pages * width
            if pages * width < len(child.key):
                return
            node = child

    def _agreeing_pages(self, edge: bytes, key: bytes, at: int) -> int:
        """Count the whole pages in which `edge` and `key` from `at` agree."""
        if key.startswith(edge, at):
            return len(edge) // self._page_nbytes
        length = min(len(edge), len(key) - at)
        ours = np.frombuffer(edge, np.uint8, length)
        theirs = np.frombuffer(key, np.uint8, length, at)
        differ = np.flatnonzero(ours != theirs)
        agreeing = int(differ[0]) if differ.size else length
        return agreeing // self._page_nbytes

    def _cut(self, node: _Node, pages: int) -> _Node:
        """Split an edge after `pages` pages; return its upper half."""
        width = self._page_nbytes
        key, vpages = node.key[: pages * width], node.vpages[:pages]
        upper = _Node(node.parent, node.first, key, vpages, node.last_used)
        node.parent.children[upper.first] = upper
        node.key, node.vpages = node.key[pages * width :], node.vpages[pages:]
        node.parent, node.first = upper, node.key[:width]
        upper.children[node.first] = node
        return upper

    def _attach(self, parent: _Node, key: bytes, vpages: list[int], now: int) -> None:
        """Hang a new leaf below `parent`."""
        leaf = _Node(parent, key[: self._page_nbytes], key, vpages, now)
        parent.children[leaf.first] = leaf
        self._queue(leaf)

    def _detach(self, node: _Node) -> None:
        """Remove an empty leaf; its parent may have become one."""
        parent = node.parent
        del parent.children[node.first]
        node.parent = None
        if parent.parent is not None and not parent.children:
            self._queue(parent)

    def _queue(self, node: _Node) -> None:
        """Let a leaf wait for eviction, once."""
        if not node.queued:
            node.queued = True
            entry = (node.last_used, next(self._order), node)
            heapq.heappush(self._oldest, entry)
