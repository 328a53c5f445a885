"""Chains: which held chunk continues which, and which may be forgotten first.

The law: a chunk that a held chunk continues is never the one to go, nor is a pinned
one; among the others the least recently used goes first. So suffixes go before their
prefixes, whatever the order in which they came.

    chains.add(key, parent)
    chains.touch(keys)
    victim = chains.oldest()        # None if nothing may go
    chains.forget(victim)

Keys are digests over their parents, so honest chains have no cycles; a parent that
would close one is not believed.
"""

import collections
from collections.abc import Container, Iterable, Sequence

from kvmem.errors import InvalidId, say
from kvmem.store.page_key import PageKey


class Chains:
    """Parents, pins and the order of use of held keys; mutable, one a tier."""

    def __init__(self):
        """Hold nothing."""
        # least recently used first; the value is what the key continues
        self._parents: collections.OrderedDict[PageKey, PageKey | None] = (
            collections.OrderedDict()
        )
        self._continued: collections.Counter[PageKey] = collections.Counter()
        self._pins: collections.Counter[PageKey] = collections.Counter()

    def __contains__(self, key: PageKey) -> bool:
        return key in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def num_pinned(self) -> int:
        """How many keys are pinned."""
        return len(self._pins)

    def add(self, key: PageKey, parent: PageKey | None) -> None:
        """Hold a new key as the most recently used one."""
        if self._continued[key] and self._descends(parent, key):
            parent = None
        self._parents[key] = parent
        if parent is not None:
            self._continued[parent] += 1

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Make held keys, and all that they continue, the most recently used ones.

        A chunk is left older than what it continues, so that the oldest is a suffix.
        """
        for key in reversed(keys):
            self._parents.move_to_end(key)
        above = self._parents[keys[0]] if keys else None
        while above in self._parents:
            self._parents.move_to_end(above)
            above = self._parents[above]

    def oldest(self, but: Container[PageKey] = ()) -> PageKey | None:
        """Return the key to forget first, None if each is pinned or continued."""
        for key in self._parents:
            if key not in but and not self._continued[key] and key not in self._pins:
                return key
        return None

    def forget(self, key: PageKey) -> None:
        """Stop holding a key; its pins go with it."""
        parent = self._parents.pop(key)
        self._pins.pop(key, None)
        if parent is not None:
            self._continued[parent] -= 1
            if not self._continued[parent]:
                del self._continued[parent]

    def pin(self, keys: Iterable[PageKey]) -> None:
        """Keep held keys until as many `unpin`."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[PageKey]) -> None:
        """Undo one `pin` of each key, all or none.

        Raises:
            InvalidId: a key that is not pinned so often.
        """
        times = collections.Counter(keys)
        if low := [key for key, count in times.items() if self._pins[key] < count]:
            raise InvalidId(
                say(
                    f"unpin of {', '.join(map(repr, low))}",
                    "an unpin undoes one pin, and these have none left",
                    "Unpin what `pin` said it pinned, once",
                )
            )
        self._pins -= times  # drops those that reach zero

    def is_pinned(self, key: PageKey) -> bool:
        """Say whether a key is pinned."""
        return key in self._pins

    def _descends(self, key: PageKey | None, ancestor: PageKey) -> bool:
        """Say whether `ancestor` is `key` or among what it continues."""
        while key is not None and key != ancestor:
            key = self._parents.get(key)
        return key == ancestor
