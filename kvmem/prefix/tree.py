"""The prefix tree: a radix tree over whole pages of tokens, one root an identity.

An edge of the tree carries a run of tokens, a whole number of pages of it, and the
virtual pages that hold their KV. Tokens are compared, never only hashed. Texts of
different namespaces (adapter, salt, tenant, weights) share nothing; a page with a mark
(the images it touches) equals a page of the same tokens and the same mark only, while
the pages before it are shared. The tree keeps no counts of the pool: the caller retains
the pages that `publish` adopts and releases those that `evict` drops.

    hit = cache.match(tokens)                # whole pages, at most len - 1 tokens
    adopted = cache.publish(tokens, vpages)  # retain these
    dropped = cache.evict(2, idle)           # release these: tails first

The law of eviction: a page goes only when no page behind it is cached, and only when
`idle` says that nobody but the cache reads it.
"""

import array
import itertools
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvmem import errors
from kvmem.prefix import policy as policies
from kvmem.prefix.queue import LeafQueue, Node

__all__ = ["Hit", "Marks", "PrefixCache"]

NO_PAGE = "shorter than one page"
NO_TOKEN_LEFT = "one page exactly, and one token is always left to compute"
NO_IDENTITY = "nothing is cached under this identity"
NO_TEXT = "no cached text of this identity begins with its first page"

Marks = Mapping[int, Hashable]

_TOKEN_NBYTES = 4
_NO_MARKS: Marks = {}


class Hit(NamedTuple):
    """A cached prefix: its tokens, a whole number of pages, and the pages in order.

    `reason` says why there is none; None where there is one. Where several groups must
    agree, `num_matched` tokens have their pages of full attention, of which those
    beyond the hit are not in `vpages`. A hit that ends inside a page names that one as
    `copied`: whoever goes on from it writes there, and has a copy.
    """

    num_tokens: int
    vpages: tuple[int, ...]
    reason: str | None = None
    num_matched: int = 0
    copied: int | None = None


class PrefixCache:
    """The prefix index of one lifecycle group in one process.

    Args:
        page_size: tokens of a page.
        policy: who is forgotten first; least recently used by default.

    Raises:
        ConfigError: a page of no token, or of no whole number of them.
        InvalidId: of every question, about tokens that are no 32-bit integers.
    """

    def __init__(self, page_size: int, policy: policies.Policy | None = None):
        if type(page_size) is not int or page_size < 1:
            raise errors.ConfigError(
                errors.say(
                    f"pages of {page_size!r} tokens",
                    "a page has a whole number of tokens, one at least",
                    "Give the page size of the pool",
                )
            )
        self.page_size = page_size
        self.num_pages = 0
        self._page_nbytes = page_size * _TOKEN_NBYTES
        self.now = 0  # uses of the tree so far
        self._roots: dict[Hashable, Node] = {}
        self._leaves = LeafQueue(policy or policies.lru())

    @property
    def num_edges(self) -> int:
        """Edges of the tree, all identities together."""
        return sum(1 for node in self._nodes() if node.parent is not None)

    def match(
        self,
        tokens: Sequence[int],
        namespace: Hashable = (),
        marks: Marks = _NO_MARKS,
    ) -> Hit:
        """Find the longest cached prefix that leaves at least one token to compute.

        A question: it changes neither the tree nor the order of eviction.

        Args:
            tokens: the text.
            namespace: whose text it is; only texts of the same one are compared.
            marks: what tells a page from others of the same tokens, by its number.
        """
        vpages = self._find(tokens, max(0, len(tokens) - 1), namespace, marks)
        if vpages:
            return Hit(len(vpages) * self.page_size, tuple(vpages))
        return Hit(0, (), self._why_not(len(tokens), namespace))

    def pages(
        self,
        tokens: Sequence[int],
        namespace: Hashable = (),
        marks: Marks = _NO_MARKS,
    ) -> tuple[int, ...]:
        """Return the cached pages of a text, the last whole one included."""
        return tuple(self._find(tokens, len(tokens), namespace, marks))

    def touch(
        self,
        tokens: Sequence[int],
        namespace: Hashable = (),
        marks: Marks = _NO_MARKS,
    ) -> None:
        """Mark the cached prefix of `tokens` as used now, and nothing behind it."""
        root = self._roots.get(_typed(namespace))
        if root is not None:
            self._use(root, self._key(tokens, len(tokens)), marks)

    def publish(
        self,
        tokens: Sequence[int],
        vpages: Sequence[int],
        namespace: Hashable = (),
        marks: Marks = _NO_MARKS,
    ) -> tuple[int, ...]:
        """Enter every whole page of `tokens`; return the pages adopted, in order.

        Where the tree already holds a page of the same text, it keeps its own and
        adopts none: two sequences that computed one prefix never free a page that the
        other still names.

        Args:
            tokens: the text, whose KV is written and whose tokens are accepted.
            vpages: its pages; at least one for each whole page of tokens.
            namespace: whose text it is.
            marks: what tells a page from others of the same tokens, by its number.

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
        if whole == 0:
            return ()
        key, name = self._key(tokens, len(tokens)), _typed(namespace)
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Node(None, name, b"", array.array("i"))
        node, at, now = self._use(root, key, marks)
        adopted = array.array("i", vpages[at:whole])
        self._attach(node, key, at, adopted, marks, now)
        self.num_pages += len(adopted)
        return tuple(adopted)

    def evict(self, num_pages: int, idle: Callable[[int], bool]) -> tuple[int, ...]:
        """Drop up to `num_pages` pages, tails first, in the order of the policy.

        Args:
            num_pages: how many pages are needed.
            idle: says whether nobody but the cache reads a page.
        """
        dropped = array.array("i")
        busy = []
        by_page = self._leaves.policy.by_page
        while len(dropped) < num_pages and (node := self._leaves.pop()):
            wanted = 1 if by_page else num_pages - len(dropped)
            gone = self._drop_tail(node, wanted, idle)
            dropped += gone
            if gone:
                self._leaves.evicted(node)
            if not node.vpages:
                self._detach(node)
            elif len(gone) < wanted:
                busy.append(node)  # its tail is being read
            else:
                self._leaves.rank_again(node)
                self._leaves.enter(node)
        for node in busy:
            self._leaves.enter(node)
        self.num_pages -= len(dropped)
        return tuple(dropped)

    def coldest(self) -> int | None:
        """Return when the text whose tail goes first was last used; None without any.

        A question: the order of eviction stays as it is.
        """
        node = self._leaves.pop()
        if node is None:
            return None
        self._leaves.enter(node)
        return node.last_used

    def clear(self) -> tuple[int, ...]:
        """Forget everything; return the pages that the caller releases."""
        held = tuple(self.vpages())
        self._roots = {}
        self._leaves.clear()
        self.num_pages = 0
        return held

    def vpages(self) -> Iterator[int]:
        """Yield every page that the cache holds."""
        for node in self._nodes():
            yield from node.vpages

    def _nodes(self) -> Iterator[Node]:
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children.values())

    def _find(
        self, tokens: Sequence[int], length: int, namespace: Hashable, marks: Marks
    ) -> array.array:
        """Return the cached pages of the first `length` tokens."""
        vpages, root = array.array("i"), self._roots.get(_typed(namespace))
        if root is not None:
            for node, pages in self._walk(root, self._key(tokens, length), marks):
                vpages += node.vpages[:pages]
        return vpages

    def _why_not(self, length: int, namespace: Hashable) -> str:
        """Say why a text of `length` tokens has no hit."""
        if length < self.page_size:
            return NO_PAGE
        if length == self.page_size:
            return NO_TOKEN_LEFT
        return NO_TEXT if _typed(namespace) in self._roots else NO_IDENTITY

    def _key(self, tokens: Sequence[int], length: int) -> bytes:
        """Return the whole pages of the first `length` tokens as bytes."""
        whole = length - length % self.page_size
        if whole < len(tokens):
            tokens = tokens[:whole]
        if isinstance(tokens, np.ndarray):
            ids = tokens.astype(np.int32, casting="unsafe")
            if tokens.dtype.kind in "iu" and (ids == tokens).all():
                return ids.tobytes()
            raise _no_tokens(f"tokens of {tokens.dtype}")
        try:
            return struct.pack(f"{whole}i", *tokens)
        except struct.error as error:
            raise _no_tokens("a text") from error

    def _walk(self, root: Node, key: bytes, marks: Marks) -> list[tuple[Node, int]]:
        """Return the edges along `key` and how many of their pages agree with it."""
        steps, node, at, end = [], root, 0, len(key)
        while child := node.children.get(self._name(key, at, marks)):
            if marks:
                end = self._next_mark(at, len(key), marks)
            pages = len(child.vpages)
            if not key.startswith(child.key, at, end):
                pages = self._agreeing_pages(child.key, key, at, end)
            steps.append((child, pages))
            if pages < len(child.vpages):
                break
            at += pages * self._page_nbytes
            node = child
        return steps

    def _name(self, key: bytes, at: int, marks: Marks) -> Any:
        """Return what a parent calls the edge that begins at `at`."""
        page = key[at : at + self._page_nbytes]
        if marks and (mark := marks.get(at // self._page_nbytes)) is not None:
            return page, _typed(mark)
        return page

    def _next_mark(self, at: int, end: int, marks: Marks) -> int:
        """Return where the next marked page behind `at` begins: it begins an edge.

        A mark behind `end` is of a page that is not whole, or is not asked for.
        """
        starts = (page * self._page_nbytes for page in marks)
        return min((start for start in starts if at < start < end), default=end)

    def _agreeing_pages(self, edge: bytes, key: bytes, at: int, end: int) -> int:
        """Count the whole pages in which `edge` and `key` in [at, end) agree."""
        length = min(len(edge), end - at)
        if key.startswith(edge[:length], at):
            return length // self._page_nbytes
        ours = np.frombuffer(edge, np.uint8, length)
        theirs = np.frombuffer(key, np.uint8, length, at)
        return int(np.argmax(ours != theirs)) // self._page_nbytes

    def _use(self, root: Node, key: bytes, marks: Marks) -> tuple[Node, int, int]:
        """Use the cached prefix of `key` now, cutting an edge where it ends inside.

        Returns:
            The last edge used, the pages up to its end, and the time.
        """
        self.now += 1
        now, node, at = self.now, root, 0
        for node, pages in self._walk(root, key, marks):
            at += pages
            if pages < len(node.vpages):
                node = self._cut(node, pages)
            self._leaves.use(node, now)
        return node, at, now

    def _cut(self, node: Node, pages: int) -> Node:
        """Split an edge after `pages` pages; return its upper half."""
        width = self._page_nbytes
        key, vpages = node.key[: pages * width], node.vpages[:pages]
        upper = Node(node.parent, node.name, key, vpages)
        upper.last_used, upper.num_uses = node.last_used, node.num_uses
        node.parent.children[upper.name] = upper
        node.key, node.vpages = node.key[pages * width :], node.vpages[pages:]
        node.parent, node.name = upper, node.key[:width]
        upper.children[node.name] = node
        return upper

    def _attach(
        self,
        node: Node,
        key: bytes,
        at: int,
        vpages: array.array,
        marks: Marks,
        now: int,
    ) -> None:
        """Hang pages from `at` on below an edge; a marked page begins one."""
        width, first, end = self._page_nbytes, at, at + len(vpages)
        cuts = sorted({at, *(page for page in marks if at < page < end)} - {end})
        for begin, stop in itertools.pairwise([*cuts, end]):
            name = self._name(key, begin * width, marks)
            run = vpages[begin - first : stop - first]
            leaf = Node(node, name, key[begin * width : stop * width], run)
            node.children[name] = leaf
            self._leaves.use(leaf, now)
            node = leaf
        if node.parent is not None and not node.children:
            self._leaves.enter(node)

    def _drop_tail(
        self, node: Node, wanted: int, idle: Callable[[int], bool]
    ) -> array.array:
        """Take up to `wanted` idle pages off the end of an edge."""
        pages, keep = node.vpages, len(node.vpages)
        for vpage in reversed(pages[max(0, keep - wanted) :]):
            if not idle(vpage):
                break
            keep -= 1
        gone = pages[keep:][::-1]
        if gone:
            node.vpages = pages[:keep]
            node.key = node.key[: keep * self._page_nbytes]
        return gone

    def _detach(self, node: Node) -> None:
        """Remove an empty leaf; its parent may have become one."""
        parent = node.parent
        del parent.children[node.name]
        node.parent = None
        if parent.children:
            return
        if parent.parent is not None:
            self._leaves.enter(parent)
        else:
            del self._roots[parent.name]


def _typed(value: Hashable) -> Hashable:
    """Return a name that equals another of the same types only: 0 is not False."""
    if isinstance(value, tuple):
        return tuple(map(_typed, value))
    return value if type(value) in (str, bytes) else (type(value), value)


def _no_tokens(asked: str) -> errors.InvalidId:
    return errors.InvalidId(
        errors.say(
            f"{asked}, not all of them 32-bit integers",
            "token ids are compared whole, and one that is cut would meet another",
            "Give the ids that the tokenizer gave",
        )
    )
