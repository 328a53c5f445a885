"""Limits of the service: how much one request may bring, and how many a key may send.

    limiter = Limiter(rate=50.0)
    limiter.wait_s("key-1")  # 0.0: go on; else the seconds until the next may come

The law: each key has a bucket of its own, which holds one second's requests and fills
at the rate; a refused request takes nothing out of it. Each key has threads of its own
too: however long its requests wait for something, those of another key do not wait for
them. What more of a key's would wait for its threads than may is refused.
"""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread

from kvmem import errors

__all__ = ["Lanes", "Limiter", "Limits"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the service takes."""

    max_body_nbytes: int = 1 << 20
    max_messages: int = 100  # of one batch
    requests_per_s: float = 50.0  # of one key
    max_threads: int = 8  # of one key: its requests that run at the same time
    max_waiting: int = 64  # of one key: its requests that wait for one of these


class Limiter:
    """A token bucket a key."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        self._rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # (tokens, at second)

    def wait_s(self, key: str) -> float:
        """Take one request of a key and return 0, or the seconds until one is there."""
        with self._lock:
            now = self._clock()
            full = max(self._rate, 1.0)
            tokens, at = self._buckets.get(key, (full, now))
            tokens = min(full, tokens + (now - at) * self._rate)
            if tokens < 1.0:
                self._buckets[key] = (tokens, now)
                return (1.0 - tokens) / self._rate
            self._buckets[key] = (tokens - 1.0, now)
            return 0.0


class Lanes:
    """Threads a key."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._threads: dict[str, anyio.CapacityLimiter] = {}
        self._pending: Counter[str] = Counter()  # jobs that run or wait

    async def run[T](self, key: str, job: Callable[..., T], *args: object) -> T:
        """Run a job in one of a key's threads, to its end, and return its answer.

        Raises:
            Busy: too many of the key's wait already.
        """
        limits, pending = self._limits, self._pending[key]
        if pending >= limits.max_threads + limits.max_waiting:
            law = f"{pending} of this key's requests run or wait"
            raise errors.Busy(errors.say("this request", law, "Wait and retry"))
        if key not in self._threads:
            self._threads[key] = anyio.CapacityLimiter(limits.max_threads)
        self._pending[key] += 1
        try:
            return await anyio.to_thread.run_sync(
                partial(job, *args), limiter=self._threads[key]
            )
        finally:
            self._pending[key] -= 1
