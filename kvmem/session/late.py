"""Late: a memory that was forgotten between its recall and the message that tells it.

A recall and the append of what it found are two steps, and a forgetting may come
between them. The law: a forgetting takes its item first and each session's lock after
that; an append looks under that lock whether the memories it tells are still there. So
either the append sees that a memory is gone, and tells a mark in its place, or the
forgetting finds what was appended. A message is marked as a forgetting marks it.

What is looked at: the memories of recalls that are carried, and those of whatever this
process forgot last, which others may have recalled before.

    late = Late()
    late.note(("lab", "ann"), ["memories/tea"], digests)
    late.revised(principal, carries)(stored)
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvmem.session import forget
from kvmem.session.asking import Recall
from kvmem.session.forget import Memory

_MAX_USERS, _MAX_MEMORIES = 1000, 1000  # of one user
Owner = tuple[str, str]  # account, user
type ReviseFn = Callable[[Sequence[dict]], list[dict]]  # messages as they are stored


class Late:
    """What this process forgot last, user by user."""

    def __init__(self):
        """Nothing was forgotten yet."""
        self._memories: OrderedDict[Owner, deque[Memory]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, owner: Owner, uris: Sequence[str], digests: frozenset[str]) -> None:
        """Keep in mind the items that a user forgets; they are gone already."""
        with self._lock:
            mine = self._memories.setdefault(owner, deque(maxlen=_MAX_MEMORIES))
            mine.extend(Memory(uri, digests) for uri in uris)
            self._memories.move_to_end(owner)
            if len(self._memories) > _MAX_USERS:
                self._memories.popitem(last=False)

    def revised(self, principal, carries: Iterable[Recall | str]) -> ReviseFn:
        """Return what takes out of messages the memories that are gone by now."""
        carried = [
            Memory(entry.uri)
            for each in carries
            if isinstance(each, Recall)
            for entry in each.entries
        ]

        def revise(stored: Sequence[dict]) -> list[dict]:
            with self._lock:
                suspects = [*carried, *self._memories.get(principal.owner, ())]
            uris = [p["uri"] for p in _memories(stored) if _is_of(p, suspects)]
            for uri in gone(principal, uris):
                stored = [forget.redacted(each, Memory(uri)) for each in stored]
            return list(stored)

        return revise


def gone(principal, uris: Iterable[str]) -> frozenset[str]:
    """Return those of some uris that no item has any more.

    None where the store's retriever is another one that cannot say.
    """
    gone_of = getattr(principal.store.retriever, "gone", None)
    uris = list(dict.fromkeys(uris))
    return frozenset(gone_of(principal, uris)) if gone_of and uris else frozenset()


def _memories(stored: Sequence[Mapping]):
    """Yield the parts of messages that tell a memory."""
    for each in stored:
        for part in each["parts"]:
            if part["type"] == "context" and isinstance(part.get("uri"), str):
                yield part


def _is_of(part: Mapping, suspects: Sequence[Memory]) -> bool:
    return any(memory.is_in(part) for memory in suspects)
