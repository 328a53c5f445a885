"""The writer: puts one after another in a thread of their own, each under a lease.

The law: a failure always reaches somebody: whoever asks the future, or else `close`. A
write that hangs holds its turn no longer than its lease: then its future fails, the
next write runs, and what comes of the late one is taken away instead of published.
A thread lives for one job, and while it tells whoever waits of it the next one runs:
what a done-callback does, even another put that it waits for, holds nothing up.

    future = writer.submit(work)      # work(lease): publishes inside `lease.hold()`
    future.result()                   # the result, or why there is none
"""

import atexit
import collections
import concurrent.futures
import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kvmem.errors import Busy, say

_writers: weakref.WeakSet["Writer"] = weakref.WeakSet()
_BEGIN_S = 0.01  # look again so soon for the lease of a write that has not begun
_LOOK_S = 1.0  # and so soon for whether anything is in flight


class Lease:
    """The right of one write to publish what it wrote."""

    def __init__(self, seconds: float):
        """Begin when the write does."""
        self.seconds = seconds
        self._until: float | None = None
        self._lock = threading.Lock()
        self._revoked = False

    def begin(self) -> None:
        """Start the clock, or start it again after something was published."""
        self._until = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds until the lease ends."""
        return self._until - time.monotonic()

    def confirm(self) -> None:
        """Raise Busy if the lease was revoked, without keeping it from that."""
        with self._lock:
            if self._revoked:
                raise self.expired()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Publish in peace, or raise Busy if the lease was revoked."""
        with self._lock:
            if self._revoked:
                raise self.expired()
            yield
            self.begin()

    def revoke(self) -> None:
        """End the lease; what was published stays, and nothing more is."""
        with self._lock:
            self._revoked = True

    def expired(self) -> Busy:
        """Return the error of a write that did not finish in time."""
        return Busy(
            say(
                f"a write that takes more than {self.seconds:g} s",
                "a write in flight holds its turn for as long as its lease, then the "
                "next one runs and the late one is not published",
                "Put the chunks again, or open the store with a longer lease_s",
            )
        )


class PutFuture(concurrent.futures.Future):
    """The result of a put; asking for it counts as having seen a failure."""

    def __init__(self, writer: "Writer"):
        super().__init__()
        self.seen = False
        self._writer = writer

    def result(self, timeout: float | None = None) -> Any:
        """Return what the put did once that is durable, or raise why it is not."""
        return self._ask(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why the put failed, None if it did not."""
        return self._ask(super().exception, timeout)

    def _ask(self, ask: Callable[[float | None], Any], timeout: float | None) -> Any:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.done():
            wait = min(self._writer.reap(), end - time.monotonic())
            concurrent.futures.wait([self], None if wait == float("inf") else wait)
            if time.monotonic() >= end:
                break
        if self.done():
            self.seen = True
        return ask(0)


class Writer:
    """Jobs in order, and the lease of the one that runs."""

    def __init__(self, lease_s: float):
        """Make it idle; `submit` starts the thread."""
        self._lease_s = lease_s
        self._changed = threading.Condition()
        self._queue: collections.deque = collections.deque()
        self._running: tuple[Lease, PutFuture] | None = None
        self._turn = 0  # of the thread that may take jobs; others are late
        self._failed: list[tuple[PutFuture, BaseException]] = []
        self._process = os.getpid()
        _writers.add(self)
        self._telling: set[PutFuture] = set()  # over, and not told to the future yet

    @property
    def in_flight(self) -> int:
        """Jobs that are waiting or running."""
        with self._changed:
            return len(self._queue) + (self._running is not None)

    def submit(self, work: Callable[[Lease], Any]) -> PutFuture:
        """Run `work` when its turn comes; return the future of what it returns."""
        self.reap()
        future = PutFuture(self)
        with self._changed:
            self._queue.append((work, future))
            if self._running is None and len(self._queue) == 1:
                self._start()
        return future

    def reap(self) -> float:
        """Revoke the running lease if it has ended; return seconds until it does."""
        with self._changed:
            if self._running is None:  # its thread is about to begin, if there is work
                return _BEGIN_S if self._queue else float("inf")
            lease, future = self._running
            if lease.left_s > 0:
                return lease.left_s
            lease.revoke()
            late = lease.expired()
            self._end(future, late)
        self._tell(future, None, late)
        return 0.0

    def drain(self) -> None:
        """Wait until nothing is in flight; no job can hold this up beyond its lease."""
        while True:
            wait = self.reap()
            with self._changed:
                if not self._queue and not self._running:
                    telling = set(self._telling)
                    break
                if wait > 0:
                    self._changed.wait(min(wait, _LOOK_S))
        concurrent.futures.wait(telling)

    def first_unseen_failure(self) -> BaseException | None:
        """Return the first failure that nobody asked for, and forget them all."""
        with self._changed:
            failed, self._failed = self._failed, []
        unseen = [error for future, error in failed if not future.seen]
        return unseen[0] if unseen else None

    def warn_of_loss(self) -> None:
        """Say what a process that ends now takes with it."""
        if self._process != os.getpid():
            return  # a fork's copy: the puts are its parent's
        failed = self.first_unseen_failure()
        if count := self.in_flight:
            warnings.warn(_lost(f"{count} puts in flight are lost"), stacklevel=2)
        if failed:
            why = f"a put failed and nobody asked ({failed!r})"
            warnings.warn(_lost(why), stacklevel=2)

    def _start(self) -> None:
        self._turn += 1
        threading.Thread(
            target=self._work, args=(self._turn,), name="kvmem store", daemon=True
        ).start()

    def _work(self, turn: int) -> None:
        if job := self._take(turn):
            work, lease, future = job
            result = error = None
            try:
                result = work(lease)
            except BaseException as raised:  # it is the future's, whatever it is
                error = raised
            with self._changed:
                if self._running is None or self._running[1] is not future:
                    return  # it was given up, and its future told so
                self._end(future, error)
            self._tell(future, result, error)

    def _take(self, turn: int) -> tuple | None:
        with self._changed:
            while turn == self._turn and self._queue:
                work, future = self._queue.popleft()
                if future.set_running_or_notify_cancel():
                    lease = Lease(self._lease_s)
                    lease.begin()
                    self._running = lease, future
                    return work, lease, future
            self._changed.notify_all()
            return None

    def _end(self, future: PutFuture, error: BaseException | None) -> None:
        """Let the next job run, and keep a failure for `close`; the lock is held."""
        self._running = None
        self._telling.add(future)
        if error is not None:
            unseen = [failed for failed in self._failed if not failed[0].seen]
            self._failed = [*unseen, (future, error)]
        if self._queue:
            self._start()
        self._changed.notify_all()

    def _tell(self, future: PutFuture, result: Any, error) -> None:
        """Settle a future whose job is over; no lock is held, for it calls back."""
        try:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        finally:
            with self._changed:
                self._telling.discard(future)


def _lost(what: str) -> str:
    return say(
        "the end of the process while a store is open",
        what,
        "Close the store, or ask every future for its result",
    )


@atexit.register
def _warn() -> None:
    for writer in list(_writers):
        writer.warn_of_loss()
