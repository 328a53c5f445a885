"""Locks: one writer a session, in this process and among processes.

The law: a lock's file stands outside the folder it guards and is never deleted, so that
neither a delete nor a rename can make two writers of one session. A wait has an end:
after `wait_s` it is Busy, which names what was waited for.

    with locks.hold(folder / ".locks" / "s1", "session 's1'"):
        ...
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from kvmem.errors import Busy, say
from kvmem.session.io import OsIO

WAIT_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.01


class Locks:
    """The locks of one open store: a flock each, and a thread's lock before it."""

    def __init__(self, io: OsIO, wait_s: float = WAIT_S):
        """Hold nothing yet."""
        self._io, self.wait_s = io, wait_s
        # A thread's lock lives while somebody holds it or waits for it.
        self._threads = weakref.WeakValueDictionary[Path, threading.Lock]()

    @contextlib.contextmanager
    def hold(
        self, path: Path, what: str, wait_s: float | None = None
    ) -> Iterator[None]:
        """Hold the lock of a file while the block runs.

        Raises:
            Busy: another holds it and did not give it back in `wait_s` seconds.
        """
        mine = self._threads.setdefault(path, threading.Lock())
        handle = self._take(path, mine, what, wait_s)
        try:
            yield
        finally:
            self._give(handle, mine)

    def _take(self, path: Path, mine: threading.Lock, what: str, wait_s: float | None):
        wait_s = self.wait_s if wait_s is None else wait_s
        deadline, pause = self._io.now() + wait_s, _FIRST_PAUSE_S
        while (handle := self._try(path, mine)) is None:
            if self._io.now() >= deadline:
                law = f"another writer holds it, for more than {wait_s:g} s"
                raise Busy(say(f"the lock of {what}", law, "Try again"))
            self._io.pause(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
        return handle

    def _give(self, handle, mine: threading.Lock) -> None:
        self._io.unlock(handle)
        mine.release()

    def _try(self, path: Path, mine: threading.Lock):
        if not mine.acquire(blocking=False):
            return None
        try:
            handle = self._io.try_lock(path)
        except BaseException:
            mine.release()
            raise
        if handle is None:
            mine.release()
        return handle
