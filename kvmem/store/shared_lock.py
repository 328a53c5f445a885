"""Shares of one root's writer lock, for stores of several folders under one writer.

The law: the root has one writer as long as any share is held, and the next one is let
in when the last share is given back.

    shares = split(root_folder.take(root, chunk_tokens=16), 3)
"""

from kvmem.store.durable import WriterLock


class LockShare:
    """One store's share of a lock; it answers as the lock itself would."""

    def __init__(self, lock: WriterLock, holders: set["LockShare"]):
        """Become one of the holders; `split` makes all of them."""
        self._lock, self._holders = lock, holders
        holders.add(self)

    @property
    def is_held(self) -> bool:
        """Say whether this share is held."""
        return self in self._holders

    def check(self) -> None:
        """Raise StoreLocked if the lock locks nobody out any more."""
        self._lock.check()

    def release(self) -> None:
        """Give the share back, and the lock with the last one; again: nothing."""
        self._holders.discard(self)
        if not self._holders:
            self._lock.release()


def split(lock: WriterLock, count: int) -> tuple[LockShare, ...]:
    """Return as many shares of a lock that was just taken."""
    holders: set[LockShare] = set()
    return tuple(LockShare(lock, holders) for _ in range(count))
